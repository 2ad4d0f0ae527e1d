"""Several steps in one launch: every answer is what single launches give, whatever happens in the middle of a loop."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.buckets import StepShape
from graphdecode.engine.runner import LaunchPlan
from graphdecode.engine.steps import SequenceMemory
from graphdecode.graphs import cuda_loop
from graphdecode.text.outputs import CompletionOutput

MakeLLM = Callable[..., LLM]
LENGTHS = [1, 2, 3, 8, 64]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def random_prompts(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(97, 123) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def random_params(rng: random.Random) -> SamplingParams:
    """Greedy or seeded, with any of what ends an answer, changes logits, or is reported."""
    asked: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 5, 13, 40]), "ignore_eos": rng.random() < 0.5}
    asked |= {"temperature": 0.0} if rng.random() < 0.4 else {"temperature": 0.9, "seed": rng.randrange(1000)}
    if rng.random() < 0.3:
        asked["stop"] = [chr(rng.randrange(97, 123)), "zq"]
    if rng.random() < 0.3:
        asked["stop_token_ids"] = [rng.randrange(97, 123) for _ in range(3)]
        asked["min_tokens"] = min(rng.randrange(4), asked["max_tokens"])
    if rng.random() < 0.3:
        asked |= {"frequency_penalty": 0.7, "repetition_penalty": 1.2}
    if rng.random() < 0.5:
        asked["logprobs"] = rng.randrange(4)
    return SamplingParams(**asked)


def requests(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = random_prompts(rng, rng.randint(5, 10))
    return prompts, [random_params(rng) for _ in prompts]


def answers(llm: LLM, seed: int) -> list[CompletionOutput]:
    return [output.outputs[0] for output in llm.generate(*requests(seed))]


def assert_same(given: list[CompletionOutput], expected: list[CompletionOutput], hint: str) -> None:
    """Tokens, text and reasons are equal; log-probabilities up to what the batch's size does to their last bits."""
    for mine, theirs in zip(given, expected, strict=True):
        assert mine.token_ids == theirs.token_ids, hint
        assert mine.text == theirs.text, hint
        assert (mine.finish_reason, mine.stop_reason) == (theirs.finish_reason, theirs.stop_reason), hint
        assert (mine.logprobs is None) == (theirs.logprobs is None), hint
        for one, other in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
            assert one.keys() == other.keys(), hint
            for token, entry in one.items():
                assert entry.logprob == pytest.approx(other[token].logprob, abs=1e-3), hint
                assert entry.rank == other[token].rank, hint


def assert_nothing_held(llm: LLM) -> None:
    assert llm.cache.pool.used == 0
    assert not llm.cache.ledger.pages


def looping(llm: LLM, lookahead: int) -> LLM:
    """Let a launch be read while the next is under way, as on a GPU, or at once, as on a CPU."""
    llm.engine.loop.lookahead = lookahead
    return llm


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], list[tuple[int, int]]]:
    """Start to note, for each launch of an engine, how many steps it was asked for, and how many it ran."""

    def watch(llm: LLM) -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []
        table = llm.engine.runner.graphs
        run = table.run

        def noting(wanted: StepShape, *, steps: int | None = None, **options: Any) -> StepShape | None:
            shape = run(wanted, steps=steps, **options)
            if steps is not None:
                seen.append((steps, int(llm.engine.runner.buffers.loop_count)))
            return shape

        monkeypatch.setattr(table, "run", noting)
        return seen

    return watch


@pytest.fixture(scope="module")
def expected() -> Iterator[Callable[[int], list[CompletionOutput]]]:
    """What single launches give."""
    known: dict[int, list[CompletionOutput]] = {}
    config = BucketConfig(max_batch_size=4, max_sequence_length=128, page_size=16)
    with LLM("demo", config=config, dtype="float32") as llm:

        def of(seed: int) -> list[CompletionOutput]:
            if seed not in known:
                known[seed] = answers(llm, seed)
            return known[seed]

        yield of


@pytest.mark.parametrize("steps_per_launch", LENGTHS)
@pytest.mark.parametrize("lookahead", [0, 1])
def test_steps_per_launch_change_no_output(make_llm: MakeLLM, expected, steps_per_launch: int, lookahead: int) -> None:
    llm = looping(make_llm(steps_per_launch=steps_per_launch), lookahead)
    for seed in range(16):
        assert_same(answers(llm, seed), expected(seed), f"{seed=}")
        assert_nothing_held(llm)


@pytest.mark.parametrize("steps_per_launch", LENGTHS)
@pytest.mark.parametrize("lookahead", [0, 1])
def test_preemption_changes_no_output(make_llm, expected, steps_per_launch, lookahead):
    preemptions = 0
    for prefix_cache in (True, False):
        tight = make_llm(steps_per_launch=steps_per_launch, page_size=4, total_num_pages=24, prefix_cache=prefix_cache)
        looping(tight, lookahead)
        for seed in range(8):
            assert_same(answers(tight, seed), expected(seed), f"{seed=}")
            assert_nothing_held(tight)
        preemptions += tight.num_preemptions
    assert preemptions > 0


@pytest.mark.parametrize("backend", ["recorded", "eager"])
def test_a_loop_ends_with_its_last_row(make_llm: MakeLLM, launched, backend: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("of the loops that the host runs")
    llm = make_llm(steps_per_launch=64, backend=backend)
    seen = launched(llm)
    lengths = [5, 17, 3, 9]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate([[97 + i] for i in range(4)], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert seen == [(64, 17)]
    assert llm.stats.generated_tokens == sum(lengths)
    assert len(llm.stats.step_seconds) == 1


def test_a_row_that_ends_on_a_stop_id_ends_the_loop(make_llm: MakeLLM, launched) -> None:
    if torch.cuda.is_available():
        pytest.skip("of the loops that the host runs")
    llm = make_llm(steps_per_launch=64)
    seen = launched(llm)
    output = llm.generate("12+30=", SamplingParams(temperature=0.0, max_tokens=50))[0].outputs[0]
    assert (output.text, output.finish_reason) == ("42", "stop")
    assert seen == [(64, len(output.token_ids))]


def test_ring_entries_of_launches_that_ended_early_are_skipped(make_llm: MakeLLM) -> None:
    llm = make_llm(steps_per_launch=8)
    buffers = llm.engine.runner.buffers
    steps = []
    for max_tokens in (3, 8, 1, 11, 20, 7):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        assert len(llm.generate([[97]], params)[0].outputs[0].token_ids) == max_tokens
        steps.append(int(buffers.step_index))
        assert llm.engine.runner.steps_launched == steps[-1]
    assert steps == [8, 16, 24, 40, 64, 72]
    if not torch.cuda.is_available():
        tokens = llm.engine.runner.step.rings.tokens[:, 0]
        last = [int(tokens[step % len(tokens)]) for step in range(64, 72)]
        assert [token >= 0 for token in last] == [True] * 7 + [False], "older launches left their tokens there"


def test_launches_are_shortened_before_a_request_is_preempted(make_llm: MakeLLM, launched) -> None:
    llm = make_llm(steps_per_launch=64, page_size=4, total_num_pages=10, max_batch_size=2, prefix_cache=False)
    seen = launched(llm)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (30, 9)]
    outputs = llm.generate([[97, 98], [99, 100]], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [30, 9]
    assert llm.num_preemptions == 0
    asked = [steps for steps, _ in seen]
    assert min(asked) < 64
    assert asked[-1] == 64
    roomy = make_llm(max_batch_size=2).generate([[97, 98], [99, 100]], params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in roomy]


def test_a_launch_runs_as_many_steps_as_the_scheduler_has_pages_for(make_llm: MakeLLM) -> None:
    llm = make_llm(steps_per_launch=64, page_size=4, total_num_pages=8, max_batch_size=2, prefix_cache=False)
    scheduler = llm.engine.scheduler
    streams = [llm.stream([97] * 5, GREEDY), llm.stream([98] * 3, GREEDY)]
    scheduler.prefilled(chunks := scheduler.next_chunks(512))
    assert [chunk.end for _, chunk in chunks] == [4, 2]
    # 4 and 2 tokens are cached; 8 pages hold 16 tokens of each, or 20 and 12
    assert scheduler.make_room(64) == 12
    assert sum(len(llm.cache.pages_of(s.request_id)) for s in scheduler.decoding) == 8
    assert scheduler.make_room(3) == 3
    assert llm.num_preemptions == 0
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("steps_per_launch", [2, 8, 64])
def test_a_row_past_its_pages_writes_to_no_other_pages(make_llm: MakeLLM, steps_per_launch: int) -> None:
    llm = make_llm(steps_per_launch=steps_per_launch, page_size=4, total_num_pages=64, prefix_cache=False)
    runner = llm.engine.runner
    streams = [llm.stream([97 + i] * (3 + 2 * i), GREEDY) for i in range(4)]
    scheduler = llm.engine.scheduler
    chunks = scheduler.next_chunks(512)
    inputs = [chunk for _, chunk in chunks]
    runner.stage(chunks=inputs)
    runner.launch(LaunchPlan.of_chunks(inputs))
    scheduler.prefilled(chunks)
    rows = list(scheduler.decoding)
    for sequence in rows:  # what a launch of one step needs, and no more
        llm.cache.truncate(sequence.request_id, sequence.cached_length)
        llm.cache.reserve(sequence.request_id, len(sequence.token_ids))
    runner.stage([sequence.row_inputs(SequenceMemory(llm.cache.pages_of(sequence.request_id))) for sequence in rows])
    owned = {page for sequence in rows for page in llm.cache.pages_of(sequence.request_id)}
    others = [page for page in range(64) if page not in owned]
    caches = [cache for pair in llm.cache.layers for cache in pair]
    for cache in caches:
        cache[others] = 7.5
    runner.read(runner.launch(LaunchPlan(StepShape(len(rows)), steps_per_launch)))
    assert int(runner.buffers.loop_count) == min(steps_per_launch, GREEDY.max_tokens)
    for cache in caches:
        assert (cache[others] == 7.5).all()
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("steps_per_launch", [2, 3, 8, 64])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_requests_that_join_and_leave_change_no_other_output(
    make_llm: MakeLLM, expected, steps_per_launch: int, lookahead: int
) -> None:
    llm = looping(make_llm(steps_per_launch=steps_per_launch), lookahead)
    for seed in range(4):
        rng = random.Random(seed)
        prompts, params = requests(seed)
        leavers = set(rng.sample(range(len(prompts)), len(prompts) // 3))
        streams = []
        with ExitStack() as stack:
            for prompt, asked in zip(prompts, params, strict=True):
                streams.append(stack.enter_context(llm.stream(prompt, asked)))
                for _ in range(rng.randrange(3)):
                    llm.step()
                for leaver in [i for i in leavers if i < len(streams) and rng.random() < 0.3]:
                    streams[leaver].close()
            for leaver in leavers:
                streams[leaver].close()
            while llm.engine.has_work:
                llm.step()
        for index, stream in enumerate(streams):
            given, alone = stream.request.outputs[0], expected(seed)[index]
            if index not in leavers:
                assert_same([given], [alone], f"{seed=} {index=}")
            elif given.finish_reason == "abort":
                assert given.token_ids == alone.token_ids[: len(given.token_ids)]
        assert_nothing_held(llm)


def test_a_stop_string_cuts_the_tokens_of_later_steps(make_llm: MakeLLM) -> None:
    llm = make_llm(steps_per_launch=64)
    full = make_llm().generate("rev abcdefgh=", SamplingParams(temperature=0.0, max_tokens=16))[0].outputs[0].text
    params = SamplingParams(temperature=0.0, max_tokens=16, stop=full[3:5])
    output = llm.generate("rev abcdefgh=", params)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (full[:3], "stop", full[3:5])
    assert len(output.token_ids) == 5
    assert_nothing_held(llm)


@pytest.mark.parametrize("steps_per_launch", [3, 8])
def test_a_loop_over_buckets_captured_at_first_use_gives_the_same(make_llm, expected, steps_per_launch):
    lazy = make_llm(steps_per_launch=steps_per_launch, capture_when="first-use", warmup_steps=5)
    for lookahead in (0, 1):
        looping(lazy, lookahead)
        for seed in range(3):
            assert_same(answers(lazy, seed), expected(seed), f"{seed=}")


def test_the_report_names_the_loop(make_llm: MakeLLM) -> None:
    llm = make_llm(steps_per_launch=8)
    kinds = {bucket.loop for bucket in llm.graphs.report().buckets}
    assert kinds <= ({"while", "single"} if torch.cuda.is_available() else {"host"})
    assert {bucket.loop for bucket in make_llm().graphs.report().buckets} == {None}


@pytest.mark.gpu
@pytest.mark.usefixtures("of_whatever_speed")
def test_a_cuda_loop_ends_with_its_last_row(make_llm: MakeLLM) -> None:
    llm = make_llm(steps_per_launch=64)
    assert {bucket.loop for bucket in llm.graphs.report().buckets} == {"while"}
    llm.generate([[97]], SamplingParams(temperature=0.0, max_tokens=11, ignore_eos=True))
    torch.cuda.synchronize()
    assert int(llm.engine.runner.buffers.loop_count) == 11


@pytest.mark.gpu
@pytest.mark.parametrize("is_missing", [True, False])
def test_without_while_nodes_steps_are_launched_one_by_one(make_llm, expected, monkeypatch, is_missing):
    monkeypatch.setattr(cuda_loop, *(("driver", None) if is_missing else ("WHILE_NODES_SINCE", 10**6)))
    llm = make_llm(steps_per_launch=8)
    assert {bucket.loop for bucket in llm.graphs.report().buckets} == {"single"}
    for seed in range(3):
        assert_same(answers(llm, seed), expected(seed), f"{seed=}")
