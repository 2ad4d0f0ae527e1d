"""Several steps in one launch, over a step that knows nothing of models: the slots decide how many run."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphdecode import CaptureError, GraphManager, Slot, StepBuffers
from graphdecode.buffers import Batch
from graphdecode.graphs import Loop, cuda_loop
from graphdecode.kernels.cuda import nvrtc

pytestmark = pytest.mark.usefixtures("of_whatever_speed")
ROWS, HISTORY = 8, 64


def make_buffers(device: str) -> StepBuffers:
    """Rows that count down, each at its own pace, and write down how they go."""
    buffers = StepBuffers(
        [
            Slot("left", ("batch",), torch.int32),
            Slot("value", ("batch",), torch.float32),
            Slot("time", (1,), torch.int64),
            Slot("running", (1,), torch.int32),
            Slot("loop_limit", (1,), torch.int32),
            Slot("loop_count", (1,), torch.int32),
            Slot("staged", (1,), torch.int32, staged="host"),
        ],
        max_batch_size=ROWS,
        device=device,
    )
    buffers.adopt("history", torch.zeros(HISTORY, ROWS, device=device))
    buffers.adopt("endings", torch.zeros(4, dtype=torch.int64, device=device))
    return buffers


def step(batch: Batch) -> None:
    """Let every live row with steps left take one; rows without are inert."""
    rows = torch.arange(batch.size, device=batch.left.device)
    goes = (batch.left > 0) & (rows < batch.live_rows)
    batch.value.copy_(torch.where(goes, torch.sin(batch.value + 1.0), batch.value))
    batch.left.copy_(torch.where(goes, batch.left - 1, batch.left))
    batch.running.copy_(((batch.left > 0) & (rows < batch.live_rows)).sum().to(torch.int32))
    batch.history[:, : batch.size].index_copy_(0, batch.time % HISTORY, batch.value[None])
    batch.time.add_(1)


def epilogue(batch: Batch) -> None:
    """Count launches, steps that ran and steps that did not."""
    skipped = batch.loop_limit - batch.loop_count
    batch.time.add_(skipped)
    # behind a capture's own runs nothing is live, and nothing is counted
    one = torch.stack([torch.ones_like(skipped), batch.loop_count, skipped, batch.live_rows]).view(4)
    batch.endings.add_(one * (batch.live_rows > 0))


class Countdown:
    """A manager over the step, and what its rows did."""

    def __init__(self, device: str, backend: str, max_steps: int, **options: object) -> None:
        self.buffers = make_buffers(device)
        loop = Loop(max_steps, epilogue=epilogue)
        self.graphs = GraphManager(step, self.buffers, [1, 2, ROWS], backend=backend, loop=loop, **options)
        self.graphs.capture(progress=False)

    def start(self, lefts: list[int]) -> None:
        self.buffers.left[: len(lefts)].copy_(torch.tensor(lefts, dtype=torch.int32))
        self.buffers.value[: len(lefts)].copy_(torch.arange(len(lefts)))
        self.buffers.time.zero_()
        self.buffers.history.zero_()

    @property
    def count(self) -> int:
        return int(self.buffers.loop_count)

    def rows(self, count: int) -> tuple[list[int], list[float]]:
        return self.buffers.left[:count].tolist(), self.buffers.value[:count].tolist()


def backends() -> list[str]:
    return ["cuda", "eager"] if torch.cuda.is_available() else ["recorded", "eager"]


@pytest.fixture(params=backends())
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ends_early(device: str, backend: str) -> bool:
    """Whether the loop can end before its limit here: not where the host would have to wait for a GPU."""
    return not (device == "cuda" and backend == "eager")


@pytest.fixture
def countdown(device: str, backend: str) -> Iterator[Countdown]:
    made = Countdown(device, backend, max_steps=64)
    yield made
    made.graphs.close()


@pytest.mark.parametrize("num_steps", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("seed", range(6))
def test_a_launch_gives_what_single_steps_give(countdown, ends_early, seed, num_steps):
    rng = random.Random(seed)
    lefts = [rng.randint(0, 2 * num_steps) for _ in range(rng.randint(1, ROWS))]
    countdown.start(lefts)
    for _ in range(num_steps):
        countdown.graphs.replay(len(lefts))
    expected, history = countdown.rows(len(lefts)), countdown.buffers.history.clone()
    countdown.start(lefts)
    bucket = countdown.graphs.launch(len(lefts), num_steps)
    assert bucket == countdown.graphs.bucket_for(len(lefts))
    assert countdown.rows(len(lefts)) == expected, f"{lefts=}"
    # no step runs behind the one that left no row running, and one runs in any case
    ran = max(min(num_steps, max(lefts)), 1) if ends_early else num_steps
    assert countdown.count == ran
    assert torch.equal(countdown.buffers.history[:ran, : len(lefts)], history[:ran, : len(lefts)])
    assert int(countdown.buffers.time) == num_steps


def test_the_epilogue_runs_once_a_launch_and_knows_how_many_steps_ran(countdown: Countdown, ends_early: bool) -> None:
    countdown.buffers.endings.zero_()
    asked, ran = [5, 64, 3, 64], [5, 64, 3, 12] if ends_early else [5, 64, 3, 64]
    for num_steps, left in zip(asked, [60, 70, 9, 12], strict=True):
        countdown.start([left, 1])
        countdown.graphs.launch(2, num_steps)
    assert countdown.buffers.endings.tolist() == [4, sum(ran), sum(asked) - sum(ran), 8]


def test_neither_steps_nor_membership_capture_again(countdown: Countdown) -> None:
    captured = dict(countdown.graphs.graphs)
    for num_steps, rows in [(3, 1), (64, 5), (1, 2), (7, 8), (3, 1)]:
        countdown.start([num_steps] * rows)
        countdown.graphs.launch(rows, num_steps)
        assert countdown.rows(rows)[0] == [0] * rows
    assert countdown.graphs.graphs == captured


class FillsOf(TorchDispatchMode):
    """Sees what one tensor is filled with."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.address = tensor.data_ptr()
        self.values: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.fill_.Scalar and args[0].data_ptr() == self.address:
            self.values.append(args[1])
        return func(*args, **(kwargs or {}))


def test_the_limit_is_written_when_it_changes_and_not_else(countdown: Countdown) -> None:
    with FillsOf(countdown.buffers.loop_limit) as fills:
        for num_steps in (64, 64, 8, 8, 8, 64):
            countdown.start([100])
            countdown.graphs.launch(1, num_steps)
            assert countdown.rows(1)[0] == [100 - num_steps]
    assert fills.values == [8, 64]


def test_the_report_counts_launches_and_steps_and_names_the_loop(countdown: Countdown, backend: str) -> None:
    countdown.start([100] * 3)
    countdown.graphs.launch(3, 8)
    countdown.graphs.launch(3, 2)
    countdown.graphs.replay(3)
    report = countdown.graphs.report()
    largest = report.buckets[-1]
    assert (largest.launches, largest.replays, largest.live_rows) == (2, 11, 33)
    kind = "host" if not torch.cuda.is_available() else "single" if backend == "eager" else largest.loop
    assert {bucket.loop for bucket in report.buckets} == {kind}
    assert f"loop of bucket 1, 2, 8: {kind}" in str(report)
    assert report.as_dict()["buckets"][0]["loop"] == kind


def test_the_report_counts_the_steps_that_ran_and_not_those_that_were_asked_for(countdown: Countdown) -> None:
    countdown.start([5, 3])
    countdown.graphs.launch(2, 64)
    countdown.start([2])
    countdown.graphs.launch(2, 4)
    bucket = countdown.graphs.report().buckets[1]
    ends_early = bucket.loop in ("host", "while")
    assert (bucket.launches, bucket.replays, bucket.live_rows) == ((2, 7, 14) if ends_early else (2, 68, 136))


def test_a_bucket_captured_at_first_use_loops_before_and_after(device: str) -> None:
    lazy = Countdown(device, "auto", max_steps=16, capture_when="first-use")
    for rows, num_steps in [(8, 16), (2, 7), (1, 5), (2, 7), (8, 16), (1, 5)]:
        lazy.start([num_steps - 2] * rows)
        lazy.graphs.launch(rows, num_steps)
        left, values = lazy.rows(rows)
        assert left == [0] * rows
        direct = Countdown(device, "eager", max_steps=16)
        direct.start([num_steps - 2] * rows)
        direct.graphs.launch(rows, num_steps)
        assert values == direct.rows(rows)[1]
        assert int(lazy.buffers.time) == num_steps
    assert {bucket.state for bucket in lazy.graphs.report().buckets} == {"captured"}


def test_impossible_loops_are_refused_with_the_slots_name() -> None:
    buffers = make_buffers("cpu")
    for loop, message in [
        (Loop(0), "max_steps .*0"),
        (Loop(4, running="value"), "'value'"),
        (Loop(4, limit="nowhere"), "'nowhere'"),
        (Loop(4, count="time"), "'time'"),
        (Loop(4, running="staged"), "'staged'"),
        (Loop(4, count="loop_limit"), "count .*loop_limit"),
    ]:
        with pytest.raises(ValueError, match=message):
            GraphManager(step, buffers, [ROWS], loop=loop)


@pytest.mark.parametrize("num_steps", [0, -1, 65, None, "2", 2.0, True])
def test_law_7_an_impossible_number_of_steps_changes_nothing(countdown: Countdown, num_steps: int) -> None:
    countdown.start([5])
    with pytest.raises(ValueError, match=rf"num_steps .*1\.\.max_steps=64.*{num_steps!r}"):
        countdown.graphs.launch(1, num_steps)
    with pytest.raises(ValueError, match=r"1\.\.max_batch_size=8"):
        countdown.graphs.launch(ROWS + 1, 3)
    assert countdown.rows(1) == ([5], [0.0])
    assert int(countdown.buffers.loop_limit) == 64


def test_a_manager_without_a_loop_launches_none(device: str) -> None:
    graphs = GraphManager(step, make_buffers(device), [ROWS])
    graphs.capture(progress=False)
    with pytest.raises(RuntimeError, match="loop="):
        graphs.launch(1, 1)
    assert graphs.report().buckets[0].loop is None
    assert "loop of" not in str(graphs.report())


def test_a_launch_before_the_capture_is_an_error(device: str) -> None:
    graphs = GraphManager(step, make_buffers(device), [ROWS], loop=Loop(4))
    with pytest.raises(RuntimeError, match="capture"):
        graphs.launch(1, 1)


def test_a_loop_may_be_of_one_step(device: str) -> None:
    buffers = make_buffers(device)
    graphs = GraphManager(step, buffers, [ROWS], loop=Loop(1))
    graphs.capture(progress=False)
    buffers.left[:1].fill_(3)
    graphs.launch(1, 1)
    assert int(buffers.left[0]) == 2


def test_a_loop_needs_no_epilogue(device: str) -> None:
    buffers = make_buffers(device)
    graphs = GraphManager(step, buffers, [ROWS], loop=Loop(16))
    graphs.capture(progress=False)
    buffers.left[:2].copy_(torch.tensor([3, 9], dtype=torch.int32))
    graphs.launch(2, 16)
    assert (buffers.left[:2].tolist(), int(buffers.time)) == ([0, 0], int(buffers.loop_count))


def test_an_epilogue_that_no_graph_can_hold_is_refused_and_leaves_no_graph(device: str) -> None:
    buffers = make_buffers(device)

    def reads(batch: Batch) -> None:
        batch.endings.add_(int(batch.loop_count))

    graphs = GraphManager(step, buffers, [2, ROWS], loop=Loop(4, epilogue=reads))
    with pytest.raises(CaptureError) as caught:
        graphs.capture(progress=False)
    assert caught.value.kind == "host-read"
    assert caught.value.line == reads.__code__.co_firstlineno + 1
    assert not graphs.graphs


def test_the_audit_names_stale_pointers_of_an_epilogue(device: str) -> None:
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float64, device=device), requires_grad=False)

    def weighed(batch: Batch) -> None:
        batch.endings.copy_(weight)

    graphs = GraphManager(step, make_buffers(device), [ROWS], constants=[weight], loop=Loop(4, epilogue=weighed))
    graphs.capture(progress=False)
    assert graphs.audit() == []
    kept: Tensor = weight.data
    weight.data = torch.zeros(4, dtype=torch.float64, device=device)
    assert kept is not weight.data
    assert {pointer.owner for pointer in graphs.audit()} == {"constants[0]"}


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_nvrtc_compiles_the_condition(capability: tuple[int, int]) -> None:
    if reason := nvrtc.unavailable_reason():
        pytest.skip(reason)
    code = cuda_loop.compile_condition(capability)
    assert code.startswith(b"\x7fELF")
    assert cuda_loop.CONDITION in code
