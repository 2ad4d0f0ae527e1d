"""Rows that depend on one another: right in a full bucket, wrong in a padded one, and found before either."""

import inspect
import itertools

import pytest
import torch
from torch import Tensor

from graphdecode import GraphManager, Slot, StepBuffers
from graphdecode.buffers import Batch
from graphdecode.graphs import check


def make(rows: int = 4, **slots: float) -> StepBuffers:
    declared = [Slot(name, ("batch", 2), torch.float32, pad=pad) for name, pad in slots.items()]
    return StepBuffers([*declared, Slot("ids", ("batch",), torch.int64, pad=0)], max_batch_size=rows, device="cpu")


def centred(batch: Batch) -> None:
    mean = batch.x.mean(0, keepdim=True)
    batch.y.copy_(batch.x - mean)


def largest(batch: Batch) -> None:
    batch.y.copy_(batch.x.max(0).values.expand_as(batch.x))


def summed(batch: Batch) -> None:
    batch.y.copy_(batch.x.cumsum(0).flip(0))


def ranked(batch: Batch) -> None:
    batch.y.copy_(batch.x[batch.x[:, 0].argsort()])


def counted(batch: Batch) -> None:
    batch.ids.sub_(batch.ids.sum())


def shared(batch: Batch) -> None:
    batch.mean.copy_(batch.x.mean(0))


def shared_of_the_live(batch: Batch) -> None:
    is_live = torch.arange(len(batch.x)) < batch.live_rows
    batch.mean.copy_(torch.where(is_live.unsqueeze(1), batch.x, 0.0).sum(0) / batch.live_rows)


@pytest.mark.parametrize(("step", "kinds"), [(shared, ["mixed-rows"]), (shared_of_the_live, [])])
def test_a_slot_without_rows_that_depends_on_padding_is_reported(step, kinds) -> None:
    x, mean = Slot("x", ("batch", 2), torch.float32, pad=0.0), Slot("mean", (2,), torch.float32)
    findings = check(step, StepBuffers([x, mean], max_batch_size=4, device="cpu"))
    assert [finding.kind for finding in findings] == kinds
    assert all("(slot 'mean')" in finding.reason for finding in findings)


TIMES = itertools.count(1)


@torch.library.custom_op("graphdecode_tests::raced", mutates_args={"y"})
def raced(y: Tensor, x: Tensor) -> None:
    """Write other values each time, as rows of a GPU do that race for one place."""
    y.copy_(x * next(TIMES))


def test_rows_that_race_are_not_mixed_rows() -> None:
    assert check(lambda batch: raced(batch.y, batch.x), make(x=0.0, y=0.0)) == []


@pytest.mark.parametrize("step", [centred, largest, summed, ranked, counted])
def test_a_step_that_mixes_rows_is_found_with_line_and_slot(step) -> None:
    (finding,) = check(step, make(x=0.0, y=0.0))
    assert finding.kind == "mixed-rows"
    assert f"slot {'ids' if step is counted else 'y'!r}" in finding.reason
    lines, first = inspect.getsourcelines(step)
    assert (finding.file, finding.line) == (inspect.getsourcefile(step), first + len(lines) - 1)


def masked_mean(batch: Batch) -> None:
    is_live = (torch.arange(batch.size) < batch.live_rows)[:, None]
    mean = torch.where(is_live, batch.x, 0.0).sum(0) / batch.live_rows
    batch.y.copy_(batch.x - mean)


def multiplied_away(batch: Batch) -> None:
    is_live = (torch.arange(batch.size) < batch.live_rows)[:, None].float()
    batch.y.copy_((batch.x * is_live).sum(0).expand_as(batch.x))


def row_by_row(batch: Batch) -> None:
    batch.y.copy_(torch.softmax(batch.x, -1) + batch.ids[:, None])


@pytest.mark.parametrize("step", [masked_mean, multiplied_away, row_by_row])
def test_a_step_that_ignores_padding_has_no_findings(step) -> None:
    assert check(step, make(x=0.0, y=0.0)) == []


def test_buffers_of_one_row_have_no_mixed_rows() -> None:
    assert check(centred, make(1, x=0.0, y=0.0)) == []


def test_an_adopted_counter_has_no_findings() -> None:
    buffers = make(x=0.0, y=0.0)
    buffers.adopt("total", torch.zeros(1))

    def step(batch: Batch) -> None:
        batch.total.add_(1.0)
        batch.y.copy_(batch.x + batch.total)

    assert check(step, buffers) == []
    assert buffers.total.item() == 2.0  # of the two runs that look for other hazards


@pytest.fixture
def staged() -> StepBuffers:
    return StepBuffers(
        [
            Slot("x", ("batch",), torch.float32, pad=-1.0),
            Slot("n", ("batch",), torch.int32, pad=7, staged="rows"),
            Slot("seen", ("batch",), torch.float32),
            Slot("steps", (1,), torch.int64),
        ],
        max_batch_size=8,
        device="cpu",
    )


def look(batch: Batch) -> None:
    batch.seen.copy_(batch.x + batch.n)
    batch.x.add_(100.0)
    batch.steps.add_(1)


@pytest.mark.parametrize("backend", ["recorded", "eager"])
def test_tails_hold_their_pads_when_the_batch_size_changes_also_behind_an_upload(staged, backend):
    graphs = GraphManager(look, staged, [4, 8], backend=backend)
    graphs.capture(progress=False)
    for rows, bucket in ((3, 4), (6, 8), (2, 4), (7, 8)):
        staged.x.fill_(50.0)  # stale, also past the live rows
        staged.staging("rows")["n"][:] = 5
        staged.upload("rows", rows)  # makes the rows live, and knows nothing of x
        graphs.replay(rows)
        assert staged.seen[:rows].tolist() == [55.0] * rows
        assert staged.seen[rows:bucket].tolist() == [6.0] * (bucket - rows)
    graphs.close()


def test_law_8_a_steady_step_fills_no_tail(staged: StepBuffers, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = GraphManager(look, staged, [4, 8])
    graphs.capture(progress=False)
    graphs.replay(3)
    filled: list[int] = []
    monkeypatch.setattr(StepBuffers, "pad", lambda *given: filled.append(given[1]))
    for _ in range(5):
        graphs.replay(3)
    assert filled == []
    graphs.replay(2)
    assert set(filled) == {2}
    graphs.close()


def bounded(batch: Batch) -> None:
    batch.y.copy_(batch.x + torch.softmax(batch.x, -1).mean(0))


def differing(batch: Batch) -> None:
    apart = (batch.x - batch.y).clamp(-1, 1)
    batch.y.copy_(apart + apart.mean(0))


def turned(batch: Batch) -> None:
    batch.y.copy_(torch.nn.functional.layer_norm(batch.x, (2,)).roll(1, 0))


def saturated(batch: Batch) -> None:
    batch.y.copy_(torch.tanh(batch.x - batch.x.max()))


@pytest.mark.parametrize("step", [bounded, differing, turned, saturated])
def test_mixed_rows_are_found_with_equal_or_large_values(step) -> None:
    (finding,) = check(step, make(x=0.0, y=0.0))
    assert finding.kind == "mixed-rows"
