"""One table of graphs an engine: one stream and one pool for all shapes, few frames, and no step that nobody counts."""

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from lazy_device import installed, lazy_runner

from graphdecode import LLM, BucketConfig, Engine, EngineConfig, Request, SamplingParams, Slot, StepBuffers
from graphdecode.buckets import BucketLadder, ShapeLadder, StepShape
from graphdecode.buffers import Batch
from graphdecode.engine.loading import make_runner
from graphdecode.engine.steps import step as step_module
from graphdecode.engine.steps.step import mixed_shapes, prompt_shapes
from graphdecode.graphs import GraphTable
from graphdecode.graphs.recorded import RecordedStepGraph
from graphdecode.models import Model, load_model

MOST_FRAMES = 9
CONFIG = BucketConfig(max_batch_size=8, max_sequence_length=128, page_size=8, batch_sizes=(1, 4))


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("demo", device="cpu", dtype="float32")


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model that fits into a processor's caches have mixed steps."""
    monkeypatch.setattr(step_module, "CACHED_BYTES", 0)


def test_a_device_has_one_stream_and_one_pool_for_all_shapes(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, mixed steps, prompts and halves, captured at startup and at a first use."""
    made: list[str] = []

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            made.append(name)
            return call(*arguments)

        return noted

    monkeypatch.setitem(step_module.MIXED_TOKENS, "cuda", (8, 16))
    with installed(3) as streams, lazy_runner(streams, model, EngineConfig(CONFIG)) as runner:
        for name in ("Stream", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, counted(name, getattr(torch.cuda, name)))
        runner.graphs.capture(progress=False)
        engine = Engine(runner)
        for length in (5, 30, 2):
            engine.add(Request([100] * length, SamplingParams(max_tokens=6, ignore_eos=True)))
        while engine.has_work:
            engine.step()
        runner.graphs.run(StepShape(2, part="logits"), meanwhile=lambda: None)
        captured = {kind for kind, report in runner.reports().items() if report.buckets}
        engine.close()
    assert sorted(made) == ["Stream", "graph_pool_handle"]
    assert captured == {"steps", "prompts", "mixed"}


def test_recorded_graphs_of_all_shapes_share_one_pool(model: Model) -> None:
    """Smaller shapes need nothing that larger ones do not have."""
    runner = make_runner(model, EngineConfig(CONFIG))
    runner.graphs.capture(progress=False)
    found = {(kind, bucket.name): bucket for kind, report in runner.reports().items() for bucket in report.buckets}
    added = {key: bucket.pool_bytes for key, bucket in found.items() if bucket.state == "captured"}
    assert len(added) > 6
    assert max(added.values()) == added["mixed", "8+56"] > 0
    assert sum(added.values()) < 1.5 * added["mixed", "8+56"]
    alone = make_runner(model, EngineConfig(CONFIG))
    alone.graphs.capture(progress=False, kinds=["steps"])
    assert sum(bucket.pool_bytes for bucket in alone.reports()["steps"].buckets) > sum(
        nbytes for (kind, _), nbytes in added.items() if kind == "steps"
    )
    runner.close()
    alone.close()


def ladder_of(rows: int, max_tokens: int, widths: tuple[int, ...], device_type: str) -> ShapeLadder:
    buckets = BucketLadder.auto(rows, 5)
    steps = [StepShape(bucket, width) for bucket in buckets for width in (1, *widths)]
    beside = [*prompt_shapes(device_type, max_tokens), *mixed_shapes(device_type, max_tokens, buckets)]
    return ShapeLadder([*steps, *beside], rows)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize(("rows", "max_tokens"), [(1, 1), (3, 20), (12, 70), (70, 300)])
def test_law_3_every_step_within_capacity_fits_a_shape_or_is_beyond_all_prompts(
    rows: int, max_tokens: int, device_type: str
) -> None:
    ladder = ladder_of(rows, max_tokens, (2, 8), device_type)
    for live in range(1, rows + 1):
        for queries in (1, 2, 8):
            fits = ladder.fit(StepShape(live, queries))
            assert fits is not None
            assert fits.rows == BucketLadder.auto(rows, 5).bucket_for(live)
            assert fits.queries == queries
    chosen = random.Random(rows)
    for _ in range(300):
        wanted = StepShape(chosen.randint(0, rows), 1, chosen.randint(1, max_tokens))
        room = [shape for shape in ladder.shapes if shape.holds(wanted)]
        assert ladder.fit(wanted) == min(room, key=lambda shape: (shape.tokens, shape), default=None)
        assert bool(room) or wanted.tokens > 8, "a few tokens always have a shape"


@pytest.mark.parametrize("capture_when", ["startup", "idle", "first-use"])
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_every_step_is_counted_once_whichever_way_it_ran(capture_when: str, backend: str, device: str) -> None:
    slots = [Slot("x", ("batch",), torch.float32), Slot("steps", (1,), torch.int32)]
    rows, prompts = (StepBuffers(slots, max_batch_size=size, device=device) for size in (6, 40))

    def step(shape: StepShape, batch: Batch) -> None:
        batch.x.add_(1.0)
        batch.steps.add_(1)

    shapes_ = [StepShape(r, q, t) for r in (2, 6) for q, t in ((1, 0), (4, 0), (1, 8))] + [StepShape(0, 1, 16)]
    table = GraphTable(
        step, rows, ShapeLadder(shapes_, 6), backend=backend, prompts=prompts,
        capture_when=capture_when,
    )  # fmt: skip
    table.capture(progress=False)
    chosen, asked = random.Random(1), 0
    for _ in range(200):
        queries = chosen.choice([1, 1, 4])
        tokens = chosen.choice([0, chosen.randint(1, 40)]) if queries == 1 else 0
        wanted = StepShape(chosen.randint(0 if tokens else 1, 6), queries, tokens)
        if table.run(wanted) is None:
            buffers = rows if wanted.rows else prompts
            table.run_without_graph(wanted, lambda buffers=buffers: buffers.steps.add_(1))
        asked += 1
    reports = [bucket for kind in ("steps", "prompts", "mixed") for bucket in table.report(kind).buckets]
    assert sum(bucket.replays + bucket.eager_runs for bucket in reports) == asked
    assert int(rows.steps) + int(prompts.steps) == asked
    assert "without a graph" in "".join(str(table.report(kind)) for kind in ("prompts", "mixed"))
    table.close()


def test_a_steady_step_crosses_few_frames_from_generate_to_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("of the recorded backend")
    crossed: list[list[str]] = []
    replay = RecordedStepGraph.replay

    def noting(graph: RecordedStepGraph) -> None:
        frames: list[str] = []
        frame: FrameType | None = sys._getframe()
        while frame is not None and (not frames or frames[-1] != "generate"):
            frames.append(frame.f_code.co_name)
            frame = frame.f_back
        crossed.append(frames)
        replay(graph)

    monkeypatch.setattr(RecordedStepGraph, "replay", noting)
    with LLM("demo", config=CONFIG) as llm:
        llm.generate([[97, 98], [99]], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
    steady = crossed[-10:]
    assert all(frames[0] == "noting" and frames[-1] == "generate" for frames in steady)
    assert max(map(len, steady)) <= MOST_FRAMES, steady[-1]
