"""Decode steps that take prompts along: the same answers in fewer passes, wherever chunks, buckets and pages end."""

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from lazy_device import installed, lazy_runner

from graphdecode import LLM, BucketConfig, Engine, EngineConfig, Request, SamplingParams, Slot, StepBuffers
from graphdecode.buckets import BucketLadder, ShapeLadder, StepShape
from graphdecode.buffers import Batch
from graphdecode.engine import runner as runner_module
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.prompts import PromptChunk
from graphdecode.engine.runner import Launch, LaunchPlan
from graphdecode.engine.steps import SequenceMemory
from graphdecode.engine.steps import step as step_module
from graphdecode.engine.steps.step import mixed_shapes, prompt_shapes
from graphdecode.graphs import GraphTable
from graphdecode.graphs.recorded import RecordedStepGraph
from graphdecode.models import Decoder, Model, load_model
from graphdecode.models import decoder as decoder_module
from graphdecode.models.forward_context import ForwardContext

ROWS = 12
BESIDE = ("prompts", "mixed")
ROOM = 63  # tokens of a prompt that the largest graph takes beside one row
CONFIG = BucketConfig(max_batch_size=ROWS, max_sequence_length=256, page_size=8, batch_sizes=(1, 8))


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("demo", device="cpu", dtype="float32")


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model that fits into a processor's caches have mixed steps."""
    monkeypatch.setattr(step_module, "CACHED_BYTES", 0)


class Arrival(NamedTuple):
    """A request, and the round that it comes in."""

    round: int
    request: Request


def engine_of(model: Model, *, config: BucketConfig = CONFIG, mixes: bool = True, **keywords: object) -> Engine:
    runner = make_runner(model, EngineConfig(config, **keywords))
    runner.graphs.capture(progress=False, kinds=["steps"])
    if mixes:
        runner.graphs.capture(progress=False, kinds=BESIDE)
    return Engine(runner)


def request(prompt_length: int, answer_length: int, number: int = 0, **options: object) -> Request:
    options = {"temperature": 0.0, "ignore_eos": True, **options}
    chosen = random.Random(number)
    prompt = [chosen.randrange(97, 123) for _ in range(prompt_length)]
    return Request(prompt, SamplingParams(max_tokens=answer_length, **options))


def served(engine: Engine, arrivals: list[Arrival]) -> list[list[int]]:
    """Let requests come in their rounds; return what each is answered with."""
    told, number = [[] for _ in arrivals], 0
    names: dict[int, int] = {}
    waiting = sorted(range(len(arrivals)), key=lambda index: arrivals[index].round)
    while waiting or engine.has_work:
        while waiting and arrivals[waiting[0]].round <= number:
            index = waiting.pop(0)
            names[engine.add(arrivals[index].request)] = index
        for event in engine.step():
            assert event.error is None, event.error
            told[names[event.request_id]] += event.token_ids
        number += 1
    return told


def arriving(count: int, seed: int, most: int = 100, most_new: int = 20) -> list[Arrival]:
    chosen, arrivals = random.Random(seed), []
    for number in range(count):
        options: dict[str, object] = {}
        if number % 3 == 1:
            options = {"temperature": 1.2, "seed": number, "top_p": 0.9}
        if number % 4 == 3:
            options |= {"repetition_penalty": 1.3}
        asked = request(chosen.randint(1, most), chosen.randint(1, most_new), number, **options)
        arrivals.append(Arrival(chosen.randrange(3 * count), asked))
    return arrivals


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"max_prefill_tokens": 20},  # chunks end within prompts
        {"max_prefill_tokens": 100, "prefix_cache": False},
        {"kv_cache_dtype": "fp8"},
        {"target_itl_ms": 0.5},
    ],
    ids=str,
)
def test_mixed_steps_change_no_output(model: Model, keywords: dict[str, object]) -> None:
    arrivals = arriving(20, seed=3)
    expected = served(engine_of(model, mixes=False, **keywords), arrivals)
    engine = engine_of(model, **keywords)
    told = served(engine, arrivals)
    assert told == expected
    assert engine.stats.mixed_steps > 10


def test_large_mixed_steps_are_captured_at_first_use_and_change_no_output(model: Model, monkeypatch) -> None:
    arrivals = arriving(20, seed=3, most=90)
    expected = served(engine_of(model, mixes=False), arrivals)
    monkeypatch.setitem(step_module.LARGE_PASSES, "cpu", (96,))
    monkeypatch.setattr(runner_module, "STARTUP_TOKENS", 64)
    engine = engine_of(model)
    states = {bucket.name: bucket.state for bucket in engine.runner.reports()["mixed"].buckets}
    assert {name for name, state in states.items() if state == "waiting"} == {"1+96", "12+96"}
    assert served(engine, arrivals) == expected
    states = {bucket.name: bucket.state for bucket in engine.runner.reports()["mixed"].buckets}
    assert states["12+96"] == "captured"


@pytest.mark.parametrize(("steps", "pages"), [(1, 33), (4, 25)])
def test_preemption_in_mixed_steps_changes_no_output(model: Model, steps: int, pages: int) -> None:
    config = replace(CONFIG, total_num_pages=pages, steps_per_launch=steps)
    arrivals = arriving(20, seed=5, most=40, most_new=90)
    expected = served(engine_of(model, mixes=False), arrivals)
    engine = engine_of(model, config=config)
    told = served(engine, arrivals)
    assert told == expected
    assert engine.scheduler.num_preemptions > 0
    assert engine.stats.mixed_steps > 10


def test_a_preempted_chunk_writes_to_no_other_pages(model, monkeypatch):
    """Its chunk is computed before its pages are taken."""
    arrivals = [Arrival(0, request(9, 60)), Arrival(0, request(13, 60, 1)), Arrival(2, request(60, 5, 2))]
    config = replace(CONFIG, total_num_pages=17)
    engine = engine_of(model, config=config, max_prefill_tokens=2, prefix_cache=False)
    launch, scheduler = engine.runner.launch, engine.scheduler

    def checked(plan: LaunchPlan, meanwhile: Callable[[], None] | None = None) -> Launch:
        served_now = [*scheduler.decoding, *scheduler.prefilling]
        held = {page for sequence in served_now for page in scheduler.cache.pages_of(sequence.request_id)}
        assert all(held.issuperset(chunk.memory.pages) for chunk in plan.chunks)
        return launch(plan, meanwhile)

    monkeypatch.setattr(engine.runner, "launch", checked)
    served(engine, arrivals)
    assert scheduler.num_preemptions > 0
    assert engine.stats.mixed_steps > 10


@pytest.mark.parametrize("length", [2, 15, 16, 17, 31, 32, 33, ROOM, ROOM + 1])
def test_the_first_token_of_a_lone_prompt_comes_from_the_pass_over_it(model: Model, length: int) -> None:
    """All tokens but the last one are its chunk; the last one is fed beside them."""
    engine = engine_of(model)
    runner = engine.runner
    (expected,) = served(engine_of(model, mixes=False), [Arrival(0, request(length, 3))])
    engine.add(request(length, 3))
    events = engine.step()
    assert [token for event in events for token in event.token_ids] == expected[:1]
    mixed = runner.reports()["mixed"].buckets
    assert [bucket.replays for bucket in mixed if bucket.replays] == [1]
    (ran,) = (bucket for bucket in mixed if bucket.replays)
    assert (ran.bucket, ran.along) == (1, min(tokens - 1 for tokens in (16, 32, 64) if tokens >= length))
    assert engine.step()[0].token_ids == expected[1:2]
    assert engine.stats.mixed_steps == 1
    assert sum(bucket.replays for bucket in runner.graphs.report().buckets) == 1


def test_a_step_with_prompts_is_one_pass(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also operator by operator, with more tokens than any graph takes; fewer beside too many rows go by themselves."""
    passes: list[str] = []

    def noting(name: str) -> Callable[..., object]:
        as_it_is = getattr(Decoder, name)

        def noted(*arguments: object, **options: object) -> object:
            passes.append(name)
            return as_it_is(*arguments, **options)

        return noted

    for name in ("mix", "prefill", "decode"):
        monkeypatch.setattr(Decoder, name, noting(name))
    engine = engine_of(model)
    for number in range(4):
        engine.add(request(5, 200, number))
    engine.step()
    engine.add(request(100, 5, 9))
    passes.clear()
    engine.step()
    assert passes == ["mix"]
    for number in range(4, 10):
        engine.add(request(2, 150, number))
    engine.step()
    engine.add(request(56, 5, 20))  # 12 rows then, beside which the largest graph takes 52 tokens
    passes.clear()
    before = engine.stats.mixed_steps
    engine.step()
    assert set(passes) == {"prefill"}, "as it is, in its warm-up and recorded: it had no graph yet"
    assert engine.stats.mixed_steps == before


def test_a_chunked_prompt_mixes_with_rows_that_end_meanwhile(model: Model) -> None:
    arrivals = [Arrival(0, request(4, 3)), Arrival(0, request(9, 30, 1)), Arrival(1, request(90, 4, 2))]
    keywords = {"max_prefill_tokens": 12}
    expected = served(engine_of(model, mixes=False, **keywords), arrivals)
    engine = engine_of(model, **keywords)
    told = served(engine, arrivals)
    assert told == expected
    assert engine.stats.mixed_steps == 1 + 8  # the first two prompts together; 89 tokens, 12 in a round


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_abort_between_chunks_changes_no_other_output(model: Model, number: int) -> None:
    """A row that decodes, or the prompt itself, whose pages are somebody else's then."""
    requests = [request(5, 40), request(30, 40, 1), request(100, 40, 2), request(60, 9, 3)]
    expected = [served(engine_of(model, mixes=False), [Arrival(0, each)])[0] for each in requests]
    engine = engine_of(model, config=replace(CONFIG, total_num_pages=34), max_prefill_tokens=16)
    names = {engine.add(each): index for index, each in enumerate(requests[:2])}
    told: list[list[int]] = [[] for _ in requests]
    for round_ in range(200):
        if round_ == 1:
            names[engine.add(requests[2])] = 2
        for event in engine.step():
            told[names[event.request_id]] += event.token_ids
        if round_ == 3:
            engine.abort(next(name for name, index in names.items() if index == number))
            names[engine.add(requests[3])] = 3
    assert not engine.has_work
    assert told[number] == expected[number][: len(told[number])]
    assert [told[index] for index in range(4) if index != number] == expected[:number] + expected[number + 1 :]


def test_hostile_padding_changes_no_bit_of_a_row_or_a_page(model: Model) -> None:
    """Law 4, of rows and of chunks: behind three rows in a bucket of eight, and ten tokens among 24."""
    kept: list[list[torch.Tensor]] = []
    for poisoned in (False, True):
        engine = engine_of(model)
        runner = engine.runner
        for number in range(3):
            engine.add(request(6, 50, number))
        engine.step()
        engine.step()
        assert runner.reports()["mixed"].buckets
        sequence = engine.scheduler.decoding[0]
        pages = engine.scheduler.cache.pages_of(sequence.request_id)
        chunk = PromptChunk(sequence.token_ids[2:5], 2, SequenceMemory(pages))  # what it computes is there already
        runner.stage(chunks=[chunk])
        if poisoned:
            runner.buffers.poison(3)
            for name in ("tokens", "rows", "positions"):
                tail = getattr(runner.prompts.buffers, name)[3:]
                tail.fill_(torch.iinfo(tail.dtype).max)
            runner.prompts.buffers.page_table[1:].fill_(2**31 - 1)
        assert runner.launch(LaunchPlan.of_chunks([chunk], 3)).bucket == 8
        pages = [tensor[:-1] for layer in runner.cache.layers for tensor in layer]
        kept.append([*pages, runner.buffers.sampled[:3], runner.buffers.sampled_logprob[:3], runner.buffers.tokens[:3]])
    for clean, hostile in zip(*kept, strict=True):
        assert torch.equal(clean, hostile)


def test_a_scored_prompt_is_prefilled_separately(model: Model) -> None:
    arrivals = [Arrival(0, request(5, 20)), Arrival(2, request(40, 3, 1, prompt_logprobs=1))]
    engine = engine_of(model)
    served(engine, arrivals)
    assert engine.stats.mixed_steps == 1


@pytest.mark.parametrize("keywords", [{"batch_invariant": True}, {"speculation": "ngram"}, {"backend": "eager"}])
def test_some_engines_have_no_mixed_steps(model: Model, keywords: dict[str, object]) -> None:
    of_buckets = {name: value for name, value in keywords.items() if name == "backend"}
    others = {name: value for name, value in keywords.items() if name not in of_buckets}
    invariant = load_model("demo", device="cpu", dtype="float32", batch_invariant=True) if others else model
    engine = engine_of(invariant, config=replace(CONFIG, **of_buckets), **others)
    served(engine, [Arrival(0, request(20, 4))])
    assert engine.stats.mixed_steps == 0
    assert "mixed" not in engine.runner.reports()


def test_mixed_steps_are_captured_at_their_first_use(model: Model) -> None:
    arrivals = arriving(20, seed=3)
    expected = served(engine_of(model, mixes=False), arrivals)
    engine = engine_of(model, config=replace(CONFIG, capture_when="first-use"))
    assert {bucket.state for bucket in engine.runner.reports()["mixed"].buckets} == {"waiting"}
    assert served(engine, arrivals) == expected
    mixed = engine.runner.reports()["mixed"].buckets
    assert engine.stats.mixed_steps == sum(bucket.replays + bucket.eager_runs for bucket in mixed) > 10
    assert {bucket.state for bucket in mixed if bucket.replays} == {"captured"}


def test_a_cpu_has_no_mixed_steps_if_its_caches_hold_the_weights(model, monkeypatch):
    monkeypatch.setattr(step_module, "CACHED_BYTES", model.weight_bytes)
    assert "mixed" not in engine_of(model).runner.reports()
    monkeypatch.setattr(step_module, "CACHED_BYTES", model.weight_bytes - 1)
    assert "mixed" in engine_of(model).runner.reports()


@pytest.mark.parametrize("capture_when", ["startup", "idle", "first-use"])
def test_prompts_of_a_model_that_cannot_mix_are_prefilled_separately(model, capture_when, monkeypatch):
    assert isinstance(model, Decoder)
    arrivals = arriving(6, seed=8)
    expected = served(engine_of(model, mixes=False), arrivals)

    def looked_at(*args):
        context = ForwardContext(*args)
        assert context.tokens.ids.ndim == 1
        return context

    monkeypatch.setattr(decoder_module, "ForwardContext", looked_at)
    with pytest.warns(RuntimeWarning, match="prompts .*mixed step"):
        engine = engine_of(model, config=replace(CONFIG, capture_when=capture_when))
    assert served(engine, arrivals) == expected
    assert engine.stats.mixed_steps == 0


def test_capturing_again_writes_no_pages(model: Model) -> None:
    """The last chunks' pages may be somebody else's by then."""
    engine = engine_of(model)
    runner = engine.runner
    served(engine, arriving(8, seed=2))
    pages = [tensor[:-1].fill_(0.5) for layer in runner.cache.layers for tensor in layer]
    runner.graphs.capture(progress=False, kinds=BESIDE)
    assert all(bool((tensor == 0.5).all()) for tensor in pages)


def test_the_report_names_rows_and_tokens(model: Model) -> None:
    names = [bucket.name for bucket in engine_of(model).runner.reports()["mixed"].buckets]
    assert names == ["1+15", "8+8", "1+31", "8+24", "12+20", "1+63", "8+56", "12+52"]


MOST_FRAMES = 9
TABLE_CONFIG = BucketConfig(max_batch_size=8, max_sequence_length=128, page_size=8, batch_sizes=(1, 4))


def test_a_device_has_one_stream_and_one_pool_for_all_shapes(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, mixed steps, prompts and halves, captured at startup and at a first use."""
    made: list[str] = []

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            made.append(name)
            return call(*arguments)

        return noted

    monkeypatch.setitem(step_module.MIXED_TOKENS, "cuda", (8, 16))
    with (
        installed(3) as streams,
        monkeypatch.context() as patch,  # undone before `installed` puts the real functions back
        lazy_runner(streams, model, EngineConfig(TABLE_CONFIG)) as runner,
    ):
        for name in ("Stream", "graph_pool_handle"):
            patch.setattr(torch.cuda, name, counted(name, getattr(torch.cuda, name)))
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
    runner = make_runner(model, EngineConfig(TABLE_CONFIG))
    runner.graphs.capture(progress=False)
    found = {(kind, bucket.name): bucket for kind, report in runner.reports().items() for bucket in report.buckets}
    added = {key: bucket.pool_bytes for key, bucket in found.items() if bucket.state == "captured"}
    assert len(added) > 6
    assert max(added.values()) == added["mixed", "8+56"] > 0
    assert sum(added.values()) < 1.5 * added["mixed", "8+56"]
    alone = make_runner(model, EngineConfig(TABLE_CONFIG))
    alone.graphs.capture(progress=False, kinds=["steps"])
    assert sum(bucket.pool_bytes for bucket in alone.reports()["steps"].buckets) > sum(
        nbytes for (kind, _), nbytes in added.items() if kind == "steps"
    )
    runner.close()
    alone.close()


def ladder_of(rows: int, max_tokens: int, widths: tuple[int, ...], device_type: str) -> ShapeLadder:
    buckets = BucketLadder.auto(rows, 5)
    steps = [StepShape(bucket, width) for bucket in buckets for width in (1, *widths)]
    beside = [*prompt_shapes(device_type, max_tokens, 1024), *mixed_shapes(device_type, max_tokens, buckets, 1024)]
    return ShapeLadder([*steps, *beside], rows)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize(("rows", "max_tokens"), [(1, 1), (3, 20), (12, 70), (70, 300)])
def test_law_3_every_step_within_capacity_fits_a_shape_or_is_beyond_all_prompts(rows, max_tokens, device_type):
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
def test_every_step_is_counted_once(capture_when: str, backend: str, device: str) -> None:
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
    with LLM("demo", config=TABLE_CONFIG) as llm:
        llm.generate([[97, 98], [99]], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
    steady = crossed[-10:]
    assert all(frames[0] == "noting" and frames[-1] == "generate" for frames in steady)
    assert max(map(len, steady)) <= MOST_FRAMES, steady[-1]
