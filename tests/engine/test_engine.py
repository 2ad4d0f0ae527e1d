"""The engine's public face: tokens in, events out, and nothing of text."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from graphdecode import LLM, ArgumentError, BucketConfig, Engine, Request, SamplingParams
from graphdecode.cache import PagedKVCache
from graphdecode.engine import RequestError
from graphdecode.engine.adapters import EngineAdapters
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.chunk_budget import ChunkBudget
from graphdecode.engine.metrics import RequestMetrics
from graphdecode.engine.prompts import PromptChunk
from graphdecode.engine.runner import Launch, LaunchPlan
from graphdecode.engine.scheduler import Scheduler, Sequence
from graphdecode.engine.steps import RowInputs, RowSampling, SequenceMemory
from graphdecode.kernels.sampling.sampling_slots import PROMPT_BIT
from graphdecode.models import load_model, resolve_model_path

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = BucketConfig(max_batch_size=4, max_sequence_length=64)
    made = Engine(make_runner(load_model("demo", device="cpu"), config))
    made.graphs.capture(progress=False, kinds=["steps"])
    yield made
    made.close()


def run(engine: Engine) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
    return tokens


def assert_idle(engine: Engine) -> None:
    assert not engine.has_work
    assert engine.cache.pool.used == 0
    assert not engine.cache.ledger.pages
    assert engine.num_waiting == 0


def test_events_have_each_token_once_and_a_finish_reason(engine: Engine) -> None:
    first = engine.add(Request([97, 98], GREEDY))
    second = engine.add(Request([99] * 5, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)))
    events = []
    while engine.has_work:
        events += engine.step()
    reasons = [(event.request_id, event.finish_reason) for event in events if event.finish_reason]
    assert sorted(reasons) == [(first, "length"), (second, "length")]
    counts = {i: sum(len(event.token_ids) for event in events if event.request_id == i) for i in (first, second)}
    assert counts == {first: 12, second: 3}
    assert_idle(engine)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([]), "empty"),
        (Request([97] * 64), "prompt .*64.* 63 "),
        (Request([97, 259]), r"0\.\.258, got \[259\]"),
        (Request([-1]), r"0\.\.258, got \[-1\]"),
        (Request([97], SamplingParams(stop="x")), "stop .*'x'"),
        (Request([97], SamplingParams(n=2)), "n .*2$"),
        (Request([97], SamplingParams(stop_token_ids=[259])), "stop_token_ids .*259"),
        (Request([97], SamplingParams(logit_bias={10**6: 1.0})), "logit_bias .*1000000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_requests_are_refused_before_anything_changed(engine, request_, words):
    running = engine.add(Request([97, 98], GREEDY))
    alone = run(engine)[running]
    running = engine.add(Request([97, 98], GREEDY))
    tokens = [token for event in engine.step() for token in event.token_ids]
    with pytest.raises(RequestError, match=words):
        engine.add(request_)
    assert tokens + run(engine)[running] == alone
    assert_idle(engine)


def test_an_aborted_request_has_no_more_events(engine: Engine) -> None:
    alone = run_one(engine, [97, 98])
    kept, gone = engine.add(Request([97, 98], GREEDY)), engine.add(Request([99], GREEDY))
    before = [event for _ in range(3) for event in engine.step()]
    assert {event.request_id for event in before} == {kept, gone}
    taken = sum(len(event.token_ids) for event in before if event.request_id == kept)
    used = engine.cache.pool.used
    engine.abort(gone)
    assert engine.cache.pool.used < used, "between two steps its pages are free at once"
    engine.abort(gone)
    engine.abort(10**9)
    events = []
    while engine.has_work:
        events += engine.step()
    assert {event.request_id for event in events} == {kept}
    assert sum(len(event.token_ids) for event in events) == len(alone) - taken
    assert_idle(engine)


@pytest.mark.parametrize("steps_per_launch", [1, 8])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_only_steps_with_a_token_are_counted(
    monkeypatch: pytest.MonkeyPatch, lookahead: int, steps_per_launch: int
) -> None:
    config = BucketConfig(max_batch_size=4, max_sequence_length=64, steps_per_launch=steps_per_launch)
    engine = Engine(make_runner(load_model("demo", device="cpu"), config))
    engine.graphs.capture(progress=False, kinds=["steps"])
    engine.loop.lookahead = lookahead
    launches: list[int] = []
    launch = engine.runner.launch

    def noted(plan: LaunchPlan, meanwhile: Any = None) -> Launch:
        if plan.shape.rows:
            launches.append(plan.shape.rows)
        return launch(plan, meanwhile)

    monkeypatch.setattr(engine.runner, "launch", noted)

    def counted(params: SamplingParams) -> tuple[int, int]:
        """Tokens, and steps of the batch record."""
        launches.clear()
        engine.stats.batch_sizes.clear()
        tokens = run_one(engine, list(b"rev oceanic="), params)
        assert set(engine.stats.batch_sizes) == {1}
        return len(tokens), engine.stats.batch_sizes[1]

    assert counted(SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)) == (30, 30)
    assert len(launches) == -(-30 // steps_per_launch)
    answer = run_one(engine, list(b"rev oceanic="), GREEDY)
    stop = next(token for place, token in enumerate(answer) if place and token not in answer[:place])
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
    assert counted(params) == (answer.index(stop) + 1,) * 2, "a step that only the stop made useless was counted"
    engine.close()


def run_one(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    request_id = engine.add(Request(prompt, params))
    return run(engine)[request_id]


def test_tokens_after_a_stop_text_are_not_counted() -> None:
    config = BucketConfig(max_batch_size=2, max_sequence_length=128, steps_per_launch=64)
    with LLM("demo", config=config) as llm:
        full = llm.generate("rev abcdefgh=", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0].outputs[
            0
        ]
        before = llm.stats.generated_tokens, llm.stats.finished_outputs
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, stop=full.text[3:5])
        output = llm.generate("rev abcdefgh=", params)[0].outputs[0]
        assert output.token_ids == full.token_ids[:5]
        assert llm.stats.generated_tokens - before[0] == 5
        assert llm.stats.finished_outputs - before[1] == 1
        assert llm.cache.pool.used == 0


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on(engine, monkeypatch):
    ids = [engine.add(Request([97 + n] * 20, GREEDY)) for n in range(6)]
    expected = {}
    for event in engine.step():
        expected.setdefault(event.request_id, []).extend(event.token_ids)
    launch = engine.runner.launch

    def failing(chunks: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(engine.runner, "launch", failing)
    ids.append(engine.add(Request([120], GREEDY)))
    monkeypatch.setattr(engine.scheduler, "next_chunks", failing)
    with pytest.raises(MemoryError):
        engine.step()
    monkeypatch.undo()
    assert engine.runner.launch == launch
    events = engine.step()
    assert {event.request_id for event in events} == set(ids)
    assert {event.finish_reason for event in events} == {"error"}
    assert all("MemoryError: no room" in (event.error or "") for event in events)
    assert_idle(engine)
    assert len(run_one(engine, [97, 98])) == 12


def test_seeds_of_requests_without_one_come_from_the_engines() -> None:
    def tokens(seed: int) -> list[list[int]]:
        config = BucketConfig(max_batch_size=2, max_sequence_length=64)
        made = Engine(make_runner(load_model("demo", device="cpu"), config), seed=seed)
        made.graphs.capture(progress=False, kinds=["steps"])
        params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
        for _ in range(2):
            made.add(Request([97], params))
        given = list(run(made).values())
        made.close()
        return given

    first, second = tokens(1), tokens(2)
    assert tokens(1) == first
    assert first != second
    assert first[0] != first[1]


def test_a_closed_engine_refuses_requests_and_steps() -> None:
    made = Engine(make_runner(load_model("demo", device="cpu"), BucketConfig(max_batch_size=1, max_sequence_length=64)))
    made.close()
    made.close()
    with pytest.raises(RuntimeError, match="closed"):
        made.add(Request([97], GREEDY))
    assert not made.has_work
    with pytest.raises(RuntimeError, match="closed"):
        made.step()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_an_error_while_a_request_is_removed_fails_all(engine, monkeypatch, lookahead):
    monkeypatch.setattr(engine.loop, "lookahead", lookahead)
    kept, gone = engine.add(Request([97, 98], GREEDY)), engine.add(Request([99], GREEDY))
    for _ in range(3):
        engine.step()

    def failing(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(engine.runner, "read", failing)
    monkeypatch.setattr(engine.scheduler, "remove", failing)
    engine.abort(gone)
    monkeypatch.undo()
    events = []
    for _ in range(20):
        events += engine.step() if engine.has_work else []
    assert [(event.request_id, event.finish_reason) for event in events if event.finish_reason] == [(kept, "error")]
    assert_idle(engine)
    assert len(run_one(engine, [97, 98])) == 12


MakeLLM = Callable[..., LLM]


def finishing_order(llm: LLM, priorities: list[int]) -> list[int]:
    """Hand in requests with room for one at a time; return the order in which they ended."""
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    ids = [
        llm.engine.add(Request([97 + place], params, priority=priority)) for place, priority in enumerate(priorities)
    ]
    ended = []
    while llm.engine.has_work:
        ended += [event.request_id for event in llm.engine.step() if event.finish_reason is not None]
    return [ids.index(request_id) for request_id in ended]


def test_requests_are_admitted_by_priority_then_arrival(make_llm: MakeLLM) -> None:
    llm = make_llm(max_batch_size=1)
    assert finishing_order(llm, [0, 0, 0]) == [0, 1, 2]
    assert finishing_order(llm, [3, 0, -1, 0, -(2**63), 2**63 - 1]) == [4, 2, 1, 3, 0, 5]


def test_the_lowest_priority_is_preempted_first(make_llm: MakeLLM) -> None:
    llm = make_llm(max_batch_size=3, page_size=4, total_num_pages=12, prefix_cache=False)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate([[97], [98], [99]], params, use_tqdm=False, priority=[5, 0, 0])
    gave_way = [output.metrics.num_preemptions for output in outputs]
    assert gave_way[0] > 0
    assert gave_way[1:] == [0, 0]
    outputs = llm.generate([[97], [98], [99]], params, use_tqdm=False)
    assert outputs[2].metrics.num_preemptions > 0
    assert outputs[0].metrics.num_preemptions == 0


def test_law_9_priorities_change_no_output(make_llm: MakeLLM) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(97, 123) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=20, ignore_eos=True) for i in range(12)]
    llm = make_llm(max_batch_size=6, page_size=4, total_num_pages=40)

    def tokens(priority: list[int] | None) -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False, priority=priority)
        return [output.outputs[0].token_ids for output in outputs]

    expected = tokens(None)
    for _ in range(3):
        assert tokens([rng.randint(-2, 2) for _ in prompts]) == expected
    assert llm.num_preemptions > 0


def test_a_stream_with_a_low_priority_overtakes(make_llm: MakeLLM) -> None:
    llm = make_llm(max_batch_size=1)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    slow, fast = llm.stream([97], params), llm.stream([98], params, priority=-1)
    "".join(fast)
    assert slow.request.outputs[0].finish_reason is None
    assert len("".join(slow)) == 3


@pytest.mark.parametrize("priority", [[1, 2], [1.5], ["a"], [True], [2**63]], ids=str)
def test_invalid_priorities_are_refused(make_llm: MakeLLM, priority: list) -> None:
    llm = make_llm(max_batch_size=1, backend="eager")
    with pytest.raises(ArgumentError, match="priority"):
        llm.generate("a", priority=priority)
    assert not llm.engine.has_work


def test_chunk_sizes_follow_the_target_latency() -> None:
    draw = random.Random(3)
    for _ in range(50):
        step, token, target = draw.uniform(0.1, 5), draw.uniform(0.001, 0.5), draw.uniform(1, 50)
        budget = ChunkBudget(2048, target)
        budget.record(0, step)
        for _ in range(30):
            tokens = budget.tokens(others_wait=True)
            took = step + tokens * token
            budget.record(tokens, took)
        assert took <= max(target * 1.01, step + 8 * token)
        assert took > target - token - 1e-6 or tokens in (8, 2048) or step > target
        assert budget.tokens(others_wait=False) == 2048


def test_without_a_target_chunks_have_the_largest_size() -> None:
    budget = ChunkBudget(512, 0.0)
    budget.record(0, 1.0)
    budget.record(512, 9.0)
    assert budget.tokens(others_wait=True) == 512


Chosen = list[tuple[Sequence, PromptChunk]]


def watched(choose: Callable[[int], Chosen], sizes: list[int]) -> Callable[[int], Chosen]:
    """Note how many tokens of prompts are chosen."""

    def chosen(budget: int) -> Chosen:
        chunks = choose(budget)
        sizes.extend([sum(len(chunk.token_ids) for _, chunk in chunks)] if chunks else [])
        return chunks

    return chosen


@pytest.mark.parametrize("target_itl_ms", [0.0, 0.3, 3.0])
def test_the_target_makes_chunks_smaller_and_changes_no_token(target_itl_ms, monkeypatch):
    long = list(range(1, 200))
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=60, ignore_eos=True)
    options = {"max_batch_size": 3, "max_sequence_length": 256, "prefix_cache": False, "batch_invariant": True}
    with LLM("demo", device="cpu", **options) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(["12+30=", long, long[::-1]], params)]
    with LLM("demo", device="cpu", target_itl_ms=target_itl_ms, **options) as llm:
        sizes = []  # of all chunks of a round
        monkeypatch.setattr(llm.engine.scheduler, "next_chunks", watched(llm.engine.scheduler.next_chunks, sizes))
        first = llm.stream("12+30=", params)
        next(first)
        others = [llm.stream(prompt, params) for prompt in (long, long[::-1])]
        for stream in (first, *others):
            list(stream)
        assert [stream.request.outputs[0].token_ids for stream in (first, *others)] == expected
    prompts = sizes[1:]  # behind that of the row that decodes
    assert sum(prompts) == 2 * (len(long) - 1)
    assert prompts[0] == (32 if target_itl_ms else sum(prompts))


PAGE = 4  # tokens


@pytest.fixture(scope="module", params=[1, 16], ids=lambda steps: f"steps_per_launch={steps}")
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(
        "demo", max_batch_size=4, max_sequence_length=64, dtype="float32", steps_per_launch=request.param, device="cpu"
    ) as engine:
        yield engine


def staged_counts(llm: LLM, prompt: list[int], generated: list[int], sampling: RowSampling) -> np.ndarray:
    llm.engine.runner.stage([RowInputs(prompt + generated, len(prompt), SequenceMemory((0,)), sampling)])
    return llm.engine.runner.buffers.token_counts[0].numpy()


def test_penalties_count_what_was_generated_and_mark_what_was_prompt(llm: LLM) -> None:
    prompt, generated = [97, 98, 98], [98, 99, 99]
    counts = staged_counts(llm, prompt, generated, RowSampling(repetition_penalty=2.0))
    expected = np.zeros_like(counts)
    expected[97] = PROMPT_BIT
    expected[98] = PROMPT_BIT + 1
    expected[99] = 2
    assert (counts == expected).all()


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_alone_has_its_tokens_counted(llm: LLM, field: str) -> None:
    staged_counts(llm, [3], [], RowSampling(repetition_penalty=2.0))
    assert staged_counts(llm, [97], [98], RowSampling(**{field: 1.5})).nonzero()[0].tolist() == [97, 98]


def test_repetition_penalty_falls_on_the_prompts_tokens_as_it_does_in_transformers(llm: LLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model_path("demo"), dtype=torch.float32).eval()
    changed = 0
    for prompt in (b"rev oceanic=", b"sort zebra=", b"417+385="):
        ids = torch.tensor([list(prompt)])
        with torch.no_grad():
            theirs = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                repetition_penalty=3.0,
                do_sample=False,
                max_new_tokens=12,
                eos_token_id=None,
                pad_token_id=0,
            )[0, ids.shape[1] :].tolist()
        plain, ours = (
            answer_of(llm, list(prompt), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, **penalty))
            for penalty in ({}, {"repetition_penalty": 3.0})
        )
        assert ours == theirs
        changed += ours[0] != plain[0]
    assert changed, "no first token was penalized: nothing was shown"


def answer_of(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    request_id = llm.engine.add(Request(prompt, params))
    tokens = []
    while llm.engine.has_work:
        tokens += [token for event in llm.engine.step() if event.request_id == request_id for token in event.token_ids]
    return tokens


@pytest.mark.parametrize(("prompt_length", "max_tokens", "tokens"), [(3, 5, 5), (1, 1, 1), (15, 1, 1), (60, 9, 4)])
def test_a_row_is_finished_on_the_device_by_the_last_token_that_it_may_have(llm, prompt_length, max_tokens, tokens):
    """The host would not notice: it ends the answer by its own count, and forgets what came after."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    assert len(answer_of(llm, [97] * prompt_length, params)) == tokens
    buffers = llm.engine.runner.buffers
    assert buffers.finished[0] == 1
    # the position of the token that was fed last: one before that of the last token, whose keys nobody needs
    assert buffers.pre_step_seqlens[0] == prompt_length + tokens - 2


def test_num_cached_tokens_counts_full_pages(llm: LLM) -> None:
    """Sixteen tokens are a page, and at least one token is left to compute."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    first, again, shorter = (
        llm.generate([[42] * length], params, use_tqdm=False)[0].metrics.num_cached_tokens for length in (33, 33, 32)
    )
    assert (first, again, shorter) == (0, 32, 16)


def test_the_time_of_a_step_is_its_share_of_its_launch(llm: LLM) -> None:
    llm.stats.step_seconds.clear()
    began = time.perf_counter()
    tokens = answer_of(llm, [97], SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))
    launches = -(-32 // llm.config.steps_per_launch)
    assert (len(tokens), len(llm.stats.step_seconds)) == (32, launches)
    assert 0 < sum(llm.stats.step_seconds) * llm.config.steps_per_launch <= time.perf_counter() - began


def test_closing_drops_requests_and_frees_all_pages() -> None:
    with LLM("demo", max_batch_size=1, max_sequence_length=64, backend="eager") as llm:
        for prompt in ([97], [98]):
            llm.engine.add(Request(prompt, SamplingParams(max_tokens=9)))
        llm.engine.step()
        assert llm.cache.pool.used
        assert llm.num_waiting == 1
    assert (llm.cache.pool.used, llm.num_waiting) == (0, 0)


def waiting(request_id: int, length: int) -> Sequence:
    """A sequence whose answer is so long that its pages are never taken at once."""
    params = SamplingParams(max_tokens=1000)
    sampling = RowSampling.of(params, seed=0, stop_ids=(), prompt_length=length, max_length=1000, vocab_size=64)
    tokens = [request_id] * length
    return Sequence(
        request_id,
        tokens,
        params,
        length,
        1000,
        (),
        (),
        sampling,
        RequestMetrics(0.0),
        service_order=(0, 0.0, request_id),
    )


@pytest.fixture
def scheduler() -> Scheduler:
    """Four pages for three rows."""
    cache = PagedKVCache(
        num_layers=1,
        total_num_pages=4,
        page_size=PAGE,
        max_pages_per_row=4,
        num_kv_heads=1,
        head_dim=8,
        dtype=torch.float32,
        device="cpu",
    )
    return Scheduler(cache, EngineAdapters(None), max_batch_size=3)


def admitted(scheduler: Scheduler, *lengths: int) -> list[bool]:
    """Hand sequences in one after another; return who got in."""
    entered = []
    for request_id, length in enumerate(lengths):
        sequence = waiting(request_id, length)
        scheduler.add(sequence)
        scheduler.prefilled(scheduler.next_chunks(100))
        entered.append(sequence not in scheduler.waiting)
        if not entered[-1]:
            scheduler.remove(sequence)
    return entered


@pytest.mark.parametrize(
    ("pages", "enters", "free"),
    [((2, 2, 1), [True, False, True], 1), ((1, 1, 1), [True, True, False], 2), ((4,), [True], 0)],
    ids=["one runs", "two run", "alone"],
)
def test_admission_leaves_a_page_for_each_running_sequence(scheduler, pages, enters, free) -> None:
    assert admitted(scheduler, *(PAGE * count for count in pages)) == enters
    assert scheduler.cache.available_pages == free


@pytest.mark.parametrize("length", [2 * PAGE, 3 * PAGE], ids=["no spare page", "no page"])
def test_a_refused_sequence_leaves_the_cache_unchanged(scheduler: Scheduler, length: int) -> None:
    admitted(scheduler, 2 * PAGE)
    before = scheduler.cache.available_pages, dict(scheduler.cache.ledger.pages)
    refused = waiting(9, length)
    scheduler.add(refused)
    assert scheduler.next_chunks(100) == []
    assert (scheduler.cache.available_pages, dict(scheduler.cache.ledger.pages)) == before
    assert list(scheduler.waiting) == [refused]
