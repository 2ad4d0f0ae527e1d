"""The checker names each hazard by kind and line, and is silent where there is none."""

import functools
import inspect
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
import torch
from bad_steps import BAD_STEPS
from good_steps import DOUBLED, GOOD_STEPS
from step_buffers import CONSTANTS as DECLARED
from step_buffers import make_buffers

from graphdecode import LLM, BucketConfig, CaptureError, GraphManager, SamplingParams, Slot, StepBuffers
from graphdecode.buckets import StepShape
from graphdecode.buffers import Batch
from graphdecode.engine.steps import SequenceMemory
from graphdecode.graphs import check
from graphdecode.graphs.inspect.observer import launches_watched

HERE = Path(__file__).parent
CONSTANTS = [*DECLARED, DOUBLED]
# steps that replay as they run, but whose rows are one whole: right in a bucket that is full
MIXES_ROWS = {"attention", "scatter_by_index", "loss_that_computes_in_its_output"}
# what one line does wrong may be more than one thing
ALSO_FOUND = {
    "from_numpy": ("host-read", "host-data"),
    "made_at_the_first_step": ("baked-value",),
    "storage": ("moved",),
    "sizes_of_a_shape": ("failed",),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_bad_step_is_found_with_kind_and_line(name: str) -> None:
    step, kind = BAD_STEPS[name]
    findings = check(step, make_buffers(), constants=CONSTANTS)
    assert {finding.kind for finding in findings} == {kind, *ALSO_FOUND.get(name, ())}, list(map(str, findings))
    finding = next(finding for finding in findings if finding.kind == kind)
    assert finding.file == inspect.getsourcefile(step)
    first, lines = step.__code__.co_firstlineno, {line for _, _, line in step.__code__.co_lines() if line}
    assert finding.line in (lines if step.__name__ == "<lambda>" else range(first + 2, max(lines) + 1))
    assert finding.reason
    assert finding.remedy
    assert f"{finding.file}:{finding.line}" in str(finding)


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def elsewhere(batch: Batch) -> None:
    in_a_thread(lambda: batch.y.copy_(2 * batch.x))


def partly_elsewhere(batch: Batch) -> None:
    batch.x.add_(1)
    in_a_thread(lambda: batch.y.copy_(2 * batch.x))


def also_elsewhere(batch: Batch) -> None:
    batch.x.add_(1)
    batch.y.copy_(batch.x)
    in_a_thread(lambda: batch.y.mul_(2))


def nothing(batch: Batch) -> None:
    del batch


@pytest.mark.parametrize("step", [elsewhere, partly_elsewhere, also_elsewhere, nothing])
def test_work_that_no_operator_of_the_steps_thread_does_is_found_and_not_captured(step) -> None:
    slots = [Slot(name, ("batch", 2), torch.float32, pad=0.0) for name in ("x", "y")]
    buffers = StepBuffers(slots, max_batch_size=2, device="cpu")
    findings = check(step, buffers)
    assert {finding.kind for finding in findings} == {"unseen-work"}
    assert {(finding.file, finding.line) for finding in findings} == {(__file__, step.__code__.co_firstlineno)}
    graphs = GraphManager(step, buffers, [2])
    with pytest.raises(CaptureError, match="unseen-work") as refused:
        graphs.capture(progress=False)
    assert (refused.value.file, refused.value.line) == (__file__, step.__code__.co_firstlineno)


def test_a_constant_or_module_buffer_written_in_another_thread_is_found_and_not_captured() -> None:
    weight, norm = torch.ones(8), torch.nn.BatchNorm1d(8)
    for name, written in (("constants[0]", weight), ("constants[1].running_mean", norm.running_mean)):

        def step(batch: Batch, written: torch.Tensor = written) -> None:
            batch.y.copy_(batch.x)
            in_a_thread(lambda: written.mul_(1.0))

        (finding,) = check(step, make_buffers(), constants=[weight, norm])
        assert (finding.kind, finding.operator) == ("unseen-work", name)
        with pytest.raises(CaptureError) as refused:
            GraphManager(step, make_buffers(), [4], constants=[weight, norm]).capture(progress=False)
        assert refused.value.kind == "unseen-work"
        assert (
            (refused.value.file, refused.value.line)
            == (finding.file, finding.line)
            == (
                __file__,
                step.__code__.co_firstlineno,
            )
        )


@pytest.mark.skipif("none" in torch.backends.quantized.engine, reason="this torch packs no quantized weights")
def test_script_objects_are_compared_by_what_they_are() -> None:
    packed = [
        torch.ops.quantized.linear_prepack(torch.quantize_per_tensor(torch.eye(8), 0.1, 0, torch.qint8), None)
        for _ in range(2)
    ]

    def step(batch: Batch) -> None:
        for row, out in zip(batch.x.split(1), batch.y.split(1), strict=True):
            out.copy_(torch.ops.quantized.linear_dynamic(row, packed[0]))

    assert not check(step, make_buffers())
    (finding,) = {each.kind for each in check(step, make_buffers(), between_steps=packed.reverse)}
    assert finding == "baked-value"


def test_watches_of_launches_that_overlap_leave_tritons_class_as_it_was() -> None:
    from triton.runtime.jit import JITFunction

    class Kernel:
        __name__ = "kernel"

    original, refused = JITFunction.run, list[str]()

    def watch(name: str) -> AbstractContextManager[None]:
        return launches_watched(lambda: False, lambda error: refused.append(name))

    first, second = watch("first"), watch("second")
    first.__enter__()
    second.__enter__()
    JITFunction.run(Kernel())
    first.__exit__(None, None, None)
    JITFunction.run(Kernel())
    second.__exit__(None, None, None)
    assert refused == ["first", "second"]
    assert JITFunction.run is original


@pytest.mark.parametrize("name", GOOD_STEPS)
def test_a_good_step_has_no_findings(name: str) -> None:
    findings = check(GOOD_STEPS[name], make_buffers(), constants=CONSTANTS)
    expected = {"mixed-rows"} if name in MIXES_ROWS else set()
    assert {finding.kind for finding in findings} == expected, [str(finding) for finding in findings]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 3},
        {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "logprobs": 5},
        {"logit_bias": {5: 2.0}, "stop_token_ids": [7], "min_tokens": 4},
    ],
    ids=["default", "filters", "penalties", "bias"],
)
def test_the_demo_decoder_has_no_findings(options: dict) -> None:
    """Rows that ask for something are staged, and other rows between the two recordings."""
    with LLM("demo", config=BucketConfig(max_batch_size=2, max_sequence_length=64)) as llm:
        streams = [llm.stream([n, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True, **options)) for n in (5, 8)]
        llm.step()
        runner = llm.engine.runner
        decoding = llm.engine.scheduler.decoding
        rows = [sequence.row_inputs(SequenceMemory(llm.cache.pages_of(sequence.request_id))) for sequence in decoding]
        assert len(rows) == 2
        runner.stage(rows)
        assert not check(
            partial(runner.step.run, StepShape(2)),
            runner.buffers,
            constants=runner.model.constants,
            between_steps=lambda: runner.stage(rows[::-1]),
        )
        for stream in streams:
            stream.close()


def test_the_documents_steps_have_no_findings() -> None:
    documents = [HERE.parents[1] / "README.md", HERE.parents[1] / "docs" / "graphs.md"]
    texts = "".join(document.read_text() for document in documents)
    examples = re.findall(r"```python\n(.*?)```", texts, re.DOTALL)
    checked = []
    for source in examples:
        if "GraphManager(" not in source:
            continue
        names: dict = {}
        exec(compile(source.partition("graphs = ")[0], "README.md", "exec"), names)
        step = next(
            value
            for value in names.values()
            if inspect.isfunction(value) and "batch" in inspect.signature(value).parameters
        )
        constants = [value for value in names.values() if isinstance(value, torch.Tensor)]
        found = check(step, names["buffers"], constants=constants)
        assert ["slot 'sum'" in finding.reason for finding in found] == [True] * ("right as long as the pads" in source)
        checked.append(step.__name__)
    assert "step" in checked
    assert "count_down" in checked


def test_host_state_that_changes_between_steps_is_reported() -> None:
    lengths = [3]

    def step(batch: Batch) -> None:
        batch.x[:, : lengths[0]].add_(1.0)

    assert not check(step, make_buffers())
    (finding,) = check(step, make_buffers(), between_steps=lambda: lengths.__setitem__(0, 4))
    assert finding.kind == "baked-value"
    assert finding.operator == "aten.slice.Tensor"
    assert "3 at first, 4 the next time" in finding.reason


def test_the_number_of_live_rows_on_the_host_is_found_in_a_step() -> None:
    buffers = make_buffers()
    (finding,) = check(lambda batch: batch.x[: buffers.live_row_count].add_(1.0), buffers)
    assert finding.kind == "baked-value"
    assert finding.operator == "aten.slice.Tensor"


def test_methods_and_callable_objects_are_steps_too() -> None:
    class Model:
        def forward(self, batch: Batch) -> None:
            batch.x.add_(float(batch.n.sum()))

        __call__ = forward

    for step in (Model().forward, Model(), functools.partial(Model.forward, Model())):
        (finding,) = check(step, make_buffers())
        assert finding.kind == "host-read"
        assert finding.file == __file__


def test_the_hazards_of_one_step_come_in_the_order_of_its_lines() -> None:
    def step(batch: Batch) -> None:
        batch.x.add_(torch.randn_like(batch.x))
        batch.y.add_(torch.tensor([1.0] * 8))
        rows = batch.flag.nonzero()
        batch.y.add_(rows.sum().item())

    findings = check(step, make_buffers())
    assert [finding.kind for finding in findings] == ["torch-rng", "host-data", "data-dependent-shape", "host-read"]
    lines = [finding.line or 0 for finding in findings]
    assert lines == list(range(lines[0], lines[0] + 4))


def test_a_check_restores_slots_and_live_rows_after_an_error() -> None:
    def step(batch: Batch) -> None:
        batch.x.zero_()
        raise ValueError("half way")

    buffers = make_buffers()
    buffers.x.fill_(3.0)
    buffers.set_live_rows(2)
    before = {name: tensor.clone() for name, tensor in buffers.tensors.items()}
    check(step, buffers)
    assert buffers.live_row_count == 2
    for name, tensor in buffers.tensors.items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.skipif(torch.cuda.is_available(), reason="the corpus runs on the CPU")
@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_capture_refuses_what_the_check_finds(name: str) -> None:
    step, kind = BAD_STEPS[name]
    graphs = GraphManager(step, make_buffers(), [4], constants=CONSTANTS)
    with pytest.raises(CaptureError) as caught:
        graphs.capture(progress=False)
    assert caught.value.kind in {kind, *ALSO_FOUND.get(name, ())}
    assert caught.value.file == str(HERE / "bad_steps.py")
    assert f"[{caught.value.kind}]" in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the corpus runs on the CPU")
@pytest.mark.parametrize("name", GOOD_STEPS)
def test_a_good_step_replays_as_it_runs(name: str) -> None:
    buffers = make_buffers()
    graphs = GraphManager(GOOD_STEPS[name], buffers, [4], constants=CONSTANTS)
    graphs.capture(progress=False)
    results = []
    for run in (graphs.run_eager, graphs.replay):
        generator = torch.Generator().manual_seed(7)
        buffers.set_live_rows(4)
        for tensor in (buffers.x, buffers.y):
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
        for tensor in (buffers.n, buffers.ids, buffers.flag):
            tensor.copy_(torch.randint(0, 2, tensor.shape, generator=generator))
        graphs.graphs[4].poison()
        run(4)
        results.append([tensor.clone() for tensor in buffers.tensors.values()])
    for eager, replayed in zip(*results, strict=True):
        assert torch.equal(eager, replayed)
