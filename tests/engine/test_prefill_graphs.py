"""Short prompts replay graphs: the same answers, and no graph where there can be none."""

import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphdecode import LLM, BucketConfig, Engine, Request, SamplingParams
from graphdecode.buckets import BucketLadder, ShapeLadder, StepShape
from graphdecode.engine import runner as runner_module
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.capacity import graph_bytes
from graphdecode.engine.prompts import PromptChunk
from graphdecode.engine.runner import LaunchPlan, Runner
from graphdecode.engine.steps import SequenceMemory
from graphdecode.engine.steps import step as steps
from graphdecode.graphs import CaptureError
from graphdecode.graphs.backend import Backend
from graphdecode.kernels.native.registration import versions
from graphdecode.models import load_model

LENGTHS = (1, 2, 3, 8, 9, 10, 16, 17, 33, 63, 64, 65, 66, 90)  # of prompts, whose last token no pass takes
CONFIG = BucketConfig(max_batch_size=4, max_sequence_length=128, page_size=8)


def runner_with(**keywords: object) -> Runner:
    return make_runner(load_model("demo", device="cpu"), CONFIG, **keywords)


def answers_of(runner: Runner) -> list[list[int]]:
    """The tokens of prompts that come together, so that passes hold chunks of several."""
    engine = Engine(runner)
    engine.graphs.capture(progress=False, kinds=["steps"])
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    prompts = [[97 + (7 * index + length) % 26 for index in range(length)] for length in LENGTHS]
    told: dict[int, list[int]] = {engine.add(Request(prompt, params)): [] for prompt in prompts}
    while engine.has_work:
        for event in engine.step():
            told[event.request_id] += event.token_ids
    return list(told.values())


def replays_of(runner: Runner) -> int:
    return sum(bucket.replays for bucket in runner.graphs.report("prompts").buckets)


def captured_for_prompts(runner: Runner) -> list[int]:
    """The tokens of passes that have graphs."""
    return [bucket.bucket for bucket in runner.graphs.report("prompts").buckets if bucket.state == "captured"]


@pytest.mark.parametrize("budget", [20, 64, 512])
def test_outputs_are_the_same_with_and_without_graphs(budget: int) -> None:
    without, runner = (runner_with(max_prefill_tokens=budget) for _ in range(2))
    expected = answers_of(without)
    runner.graphs.capture(progress=False, kinds=["prompts"])
    assert answers_of(runner) == expected
    assert replays_of(without) == 0
    assert replays_of(runner) > 0
    assert captured_for_prompts(runner)[-1] == min(budget, 64)
    runner.close()
    assert captured_for_prompts(runner) == []


def test_large_passes_are_captured_when_they_are_first_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost no time at startup, and later the host one launch."""
    expected = answers_of(runner_with(max_prefill_tokens=128))
    monkeypatch.setitem(steps.LARGE_PASSES, "cpu", (96, 128))
    monkeypatch.setattr(runner_module, "STARTUP_TOKENS", 64)
    runner = runner_with(max_prefill_tokens=128)
    runner.graphs.capture(progress=False, kinds=["prompts"])
    assert captured_for_prompts(runner)[-1] == 64
    assert answers_of(runner) == expected
    assert captured_for_prompts(runner)[-1] == 128
    eager = [bucket.eager_runs for bucket in runner.graphs.report("prompts").buckets]
    before = replays_of(runner)
    assert answers_of(runner) == expected
    assert replays_of(runner) > before
    assert [bucket.eager_runs for bucket in runner.graphs.report("prompts").buckets] == eager
    runner.close()


@pytest.mark.parametrize(
    ("width", "max_tokens", "sizes"),
    [
        (1024, 2048, [768, 1024, 1536, 2048]),
        (2048, 2048, [768, 1024, 1536, 2048]),
        (4096, 2048, [768, 1024]),  # 8B: larger ones take the device longer than their launches the host
        (8192, 2048, []),
        (2048, 700, [700]),
        (2048, 512, []),
    ],
)
def test_large_passes_have_graphs_where_launches_would_take_longer(
    width: int, max_tokens: int, sizes: list[int]
) -> None:
    assert steps.large_passes("cuda", max_tokens, width) == sizes
    assert steps.large_passes("cpu", max_tokens, width) == []
    ladder = BucketLadder([1, 8, 64], 64)
    mixed = steps.mixed_shapes("cuda", max_tokens, ladder, width)
    alone = steps.prompt_shapes("cuda", max_tokens, width)
    assert [shape.prompt_tokens for shape in alone if shape.prompt_tokens > 512] == sizes
    assert {shape for shape in mixed if shape.prompt_tokens > 512} == {
        StepShape(rows, 1, size) for rows in (8, 64) for size in sizes
    }
    shapes = ShapeLadder([*map(StepShape, ladder), *mixed, *alone], 64, startup_tokens=steps.STARTUP_TOKENS)
    assert max(shape.prompt_tokens for shape in shapes.at_startup) <= 512
    assert max(shape.prompt_tokens for shape in shapes.without("mixed").at_startup) <= 512


def test_the_memory_of_graphs_counts_those_that_are_captured_later() -> None:
    config, model = BucketConfig(max_batch_size=8), load_model("demo", device="cpu").config
    small, large = (graph_bytes(config, model, prefill_tokens=tokens) for tokens in (512, 2048))
    tokens = max(shape.tokens for shape in steps.mixed_shapes("cuda", 2048, config.ladder, model.width))
    assert small < large < small * tokens / 512


def test_a_scored_prompt_is_computed_without_a_graph() -> None:
    with LLM("demo", max_batch_size=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        (output,) = llm.generate(["12+30="], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        assert replays_of(llm.engine.runner) == 0
        assert llm.engine.runner.reports()["prompts"].buckets[-1].eager_runs == 1
        llm.generate(["12+31="], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        assert replays_of(llm.engine.runner) == 1


@pytest.mark.parametrize("keywords", [{"batch_invariant": True}, {"backend": "eager"}])
def test_there_are_no_graphs_where_nothing_is_captured(keywords: dict[str, object]) -> None:
    runner = runner_with(**keywords)
    runner.graphs.capture(progress=False)
    assert captured_for_prompts(runner) == []


def test_prompts_are_served_without_graphs_where_these_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers_of(runner_with())
    runner = runner_with()

    def refused(*_arguments: object) -> None:
        raise CaptureError("failed", "aten.mm", "not today")

    with monkeypatch.context() as patch:
        patch.setattr(Backend, "captured", refused)
        with pytest.warns(RuntimeWarning, match="prompts .*not today"):
            runner.graphs.capture(progress=False, kinds=["prompts"])
    assert captured_for_prompts(runner) == []
    assert answers_of(runner) == expected


interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="watches launches where the interpreter would run them"
)
ROWS, LENGTH, PAGE = 24, 64, 16
PROMPTS = [[3], [1], [16], [64], [5, 5], [7, 16, 33], [2] * 9, [4] * 16, [3] * ROWS]

Variants = dict[str, set[tuple]]


class WouldLaunch(TorchDispatchMode):
    """For each operator of a pass, do what its Triton version does until it launches."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "graphdecode":
            versions(operator._opname).triton(*args)
        return operator(*args, **(kwargs or {}))


def kind_of(value: Any, parameter: inspect.Parameter, is_any_integer: bool) -> Any:
    """What Triton compiles for: the value of a constant, whether an integer is 1 or divisible by 16, and alignments."""
    from triton import language as tl

    if parameter.annotation is tl.constexpr:
        return value
    if isinstance(value, tuple):
        return tuple(kind_of(part, parameter, is_any_integer) for part in value)
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return is_any_integer or (1 if value == 1 else value % 16 == 0)
    return None if value is None else type(value)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Variants:
    """Kernel -> the variants of it that launches asked for; nothing is run."""
    from triton.runtime.interpreter import InterpretedFunction

    variants: Variants = defaultdict(set)

    def launch(kernel: Any, _grid: Any) -> Callable[..., None]:
        signature, free = inspect.signature(kernel.fn), kernel.kwargs["do_not_specialize"] or []

        def noted(*args: Any, **kwargs: Any) -> None:
            given = {name: value for name, value in kwargs.items() if name in signature.parameters}
            bound = signature.bind(*args, **given).arguments
            kinds = (kind_of(value, signature.parameters[name], name in free) for name, value in bound.items())
            variants[kernel.fn.__name__].add(tuple(kinds))

        return noted

    monkeypatch.setattr(InterpretedFunction, "__getitem__", launch)
    return variants


@pytest.fixture(params=[False, True], ids=["any batch", "batch_invariant"])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    config = BucketConfig(max_batch_size=ROWS, max_sequence_length=LENGTH, page_size=PAGE)
    made = make_runner(load_model("demo", device="cpu"), config, batch_invariant=request.param, max_prefill_tokens=160)
    yield made
    made.close()


def prefill(runner: Runner, lengths: list[int]) -> None:
    pages = LENGTH // PAGE
    chunks = [
        PromptChunk([97 + row] * length, 0, SequenceMemory(range(row * pages, (row + 1) * pages)))
        for row, length in enumerate(lengths)
    ]
    with WouldLaunch():
        runner.stage(chunks=chunks)
        runner.launch(LaunchPlan.of_chunks(chunks))


@interpreted
@pytest.mark.parametrize("runner", [False], indirect=True)
def test_prompts_of_any_length_and_number_take_the_same_variants(runner: Runner, seen: Variants) -> None:
    prefill(runner, PROMPTS[0])
    assert "_rope_append_kernel" in seen
    first = {name: set(variants) for name, variants in seen.items()}
    for lengths in PROMPTS:
        prefill(runner, lengths)
        assert {name for name in seen if seen[name] != first.get(name)} == set(), f"{lengths=}"


@interpreted
def test_a_warm_up_runs_all_variants_and_writes_no_page(runner: Runner, seen: Variants) -> None:
    for layer in runner.cache.layers:
        for tensor in layer:
            tensor.fill_(3.0)
    with WouldLaunch():
        runner.warm_up()
    ready = {name: set(variants) for name, variants in seen.items()}
    for keys, values in runner.cache.layers:
        for tensor in (keys, values):
            assert torch.equal(tensor[:-1], torch.full_like(tensor[:-1], 3.0)), "only the null page is nobody's"
    for lengths in PROMPTS:
        prefill(runner, lengths)
    assert {name for name in seen if seen[name] != ready.get(name)} == set()
