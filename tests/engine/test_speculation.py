"""Speculation: the same tokens, bit for bit; drafts counted exactly; nothing leaked, and nothing stale read."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from compiled_kernels import compiled_or_gpu

from graphdecode import LLM, Engine, EngineConfig, Request, SamplingParams
from graphdecode.buffers import Batch
from graphdecode.config import ConfigError
from graphdecode.engine.assembly import make_runner, step_of
from graphdecode.engine.draft_pace import DraftPace
from graphdecode.engine.steps import SpeculativeStep, StepDrafts, StepSetting
from graphdecode.engine.steps.speculative import DraftSource, ModelDrafts
from graphdecode.errors import ArgumentError
from graphdecode.models import load_model
from graphdecode.models.decoder import Decoder

VOCABULARY = 259
WIDTH = 96  # tokens of a sequence
TEXTS = {"max_sequence_length": WIDTH, "page_size": 8, "batch_invariant": True, "device": "cpu"}
Answer = tuple[list[int], list[Any]]


@pytest.fixture(scope="module")
def decoder() -> Any:
    return load_model("demo", device="cpu", dtype="float32", max_sequence_length=WIDTH, batch_invariant=True)


def make(decoder: Any, step: Callable[[StepSetting], Any] | None = None, **config: Any) -> Engine:
    defaults = {"max_batch_size": 4, "max_sequence_length": WIDTH, "page_size": 8, "batch_invariant": True}
    settings = EngineConfig.of(None, **{**defaults, **config})
    engine = Engine(make_runner(decoder, settings, step=step or step_of(settings)))
    engine.graphs.capture(progress=False, kinds=["steps"])
    return engine


def requests(seed: int, count: int) -> list[Request]:
    """Everything mixed: texts that repeat and texts that do not, greedy and sampled, and all that changes logits."""
    rng = random.Random(seed)
    common = [rng.randrange(97, 123) for _ in range(20)]
    found = []
    for index in range(count):
        piece = [rng.randrange(97, 123) for _ in range(rng.randrange(1, 5))]
        prompt = (common if rng.random() < 0.4 else []) + piece * rng.randrange(1, 5)
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.3, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 5]),
            seed=index,
            max_tokens=rng.randrange(1, 40),
            min_tokens=1 if rng.random() < 0.3 else 0,
            logprobs=rng.choice([None, 0, 3]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
            logit_bias={rng.randrange(97, 123): 3.0} if rng.random() < 0.3 else None,
            allowed_token_ids=list(range(48, 123)) if rng.random() < 0.2 else None,
            stop_token_ids=[rng.randrange(97, 123)] if rng.random() < 0.3 else None,
            ignore_eos=rng.random() < 0.8,
        )
        words = [[piece[0], piece[-1]]] if rng.random() < 0.2 else ()
        found.append(Request(prompt, params, words))
    return found


def answers(engine: Engine, given: Sequence[Request], rng: random.Random | None = None) -> list[Answer]:
    """Answer the requests, which come all at once or at random steps, among others that are given up."""
    waiting, strangers = list(enumerate(given)), []
    found: dict[int, Answer] = {}
    places: dict[int, int] = {}
    while waiting or engine.has_work:
        while waiting and (rng is None or rng.random() < 0.4):
            index, request = waiting.pop(0)
            places[engine.add(request)] = index
            found[index] = ([], [])
        if rng is not None and rng.random() < 0.1:
            strangers.append(engine.add(Request([97, 98] * 6, SamplingParams(max_tokens=30, ignore_eos=True))))
        if rng is not None and strangers and rng.random() < 0.1:
            engine.abort(strangers.pop())
        for event in engine.step():
            if event.request_id in places:
                assert event.error is None
                tokens, logprobs = found[places[event.request_id]]
                tokens += event.token_ids
                logprobs += event.logprobs or []
    return [found[index] for index in range(len(given))]


@pytest.fixture(scope="module")
def fuzz(decoder: Any) -> tuple[list[Request], list[Answer]]:
    """Requests, and what plain decoding answers, one after another."""
    given = requests(seed=11, count=24)
    engine = make(decoder, max_batch_size=1)
    expected = [answers(engine, [request])[0] for request in given]
    engine.close()
    return given, expected


@compiled_or_gpu
@pytest.mark.parametrize(
    "settings",
    [
        {"num_tokens": "auto"},
        {"num_tokens": 7, "ngram_min": 1},
        {"num_tokens": 2, "ngram_min": 1, "steps_per_launch": 3},
        {"num_tokens": 7, "ngram_min": 1, "total_num_pages": 15},
        {"num_tokens": 5, "ngram_min": 1, "steps_per_launch": 4, "total_num_pages": 14, "prefix_cache": False},
        {"num_tokens": 3, "ngram_min": 1, "batch_sizes": [3], "max_batch_size": 3, "max_prefill_tokens": 5},
    ],
    ids=str,
)
def test_law_9_speculation_changes_no_bit_of_an_output(decoder: Any, fuzz: Any, settings: dict[str, Any]) -> None:
    given, expected = fuzz
    engine = make(decoder, speculation="ngram", **settings)
    rng = random.Random(str(settings))
    for turn in (None, rng):
        found = answers(engine, given, turn)
        wrong = [index for index in range(len(given)) if found[index] != expected[index]]
        assert not wrong, (wrong[0], given[wrong[0]], found[wrong[0]], expected[wrong[0]])
    stats = engine.stats
    assert stats.spec_decode_num_accepted_tokens > 20
    drafted, accepted, by_position = stats.speculation
    assert drafted > accepted == stats.spec_decode_num_accepted_tokens == sum(by_position)
    if "total_num_pages" in settings:
        assert engine.num_preemptions > 0
    engine.close()


@pytest.fixture(scope="module")
def stopping() -> tuple[list[str], list[SamplingParams], list[Any]]:
    """Prompts with texts that stop their answers, and what plain decoding answers, one after another."""
    rng = random.Random(5)
    prompts, params = [], []
    with LLM("demo", max_batch_size=1, **TEXTS) as llm:
        for index in range(16):
            piece = "".join(rng.choice("abcde") for _ in range(rng.randrange(1, 4)))
            prompt = rng.choice(["", "rev ", "abcdeabcde"]) + piece * rng.randrange(1, 6)
            free = SamplingParams(
                temperature=rng.choice([0.0, 0.0, 0.7]),
                seed=index,
                max_tokens=rng.randrange(20, 40),
                logprobs=rng.choice([None, 2]),
                frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
                ignore_eos=True,
            )
            text = llm.generate(prompt, free, use_tqdm=False)[0].outputs[0].text
            begin = rng.randrange(3, len(text) - 3)  # in the middle of a run of drafts as often as not
            stop = [text[begin : begin + rng.randrange(1, 4)], "never there"]
            params.append(replace(free, stop=stop, include_stop_str_in_output=rng.random() < 0.5))
            prompts.append(prompt)
        expected = [llm.generate(*pair, use_tqdm=False)[0].outputs[0] for pair in zip(prompts, params, strict=True)]
    assert all(output.finish_reason == "stop" for output in expected)
    assert len({len(output.token_ids) for output in expected}) > 5
    return prompts, params, expected


@compiled_or_gpu
@pytest.mark.parametrize(
    "settings", [{"steps_per_launch": 1}, {"steps_per_launch": 3, "total_num_pages": 15}], ids=["one", "several"]
)
@pytest.mark.parametrize("num_tokens", [3, 7, "auto"])
def test_law_9_stop_strings_cut_at_the_same_character(stopping, num_tokens, settings):
    prompts, params, expected = stopping
    drafting = {"method": "ngram", "num_tokens": num_tokens, "ngram_min": 1}
    with LLM("demo", max_batch_size=4, speculation=drafting, **TEXTS, **settings) as llm:
        found = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        assert found == expected  # texts, tokens, log-probabilities, and the text that stopped
        assert llm.stats.spec_decode_num_accepted_tokens > 10


class Planted(DraftSource):
    """Drafts out of a table of what is known to come, some of them spoilt; a request is known by its first token.

    Args:
        table: int32 [first tokens, positions].
        most: drafts of a row.
    """

    def __init__(self, table: torch.Tensor, most: int) -> None:
        self.tensors = {"planted": table, "planted_offsets": torch.arange(1, most + 1)}

    def look(self, batch: Batch) -> None:
        places = (batch.pre_step_seqlens[:, None] + batch.planted_offsets).clamp(min=0, max=batch.planted.shape[1] - 1)
        lines = batch.planted[batch.history[:, 0].clamp(0, VOCABULARY - 1)]
        batch.drafts.copy_(torch.gather(lines, 1, places))
        batch.num_drafts.fill_(batch.planted_offsets.shape[0])
        batch.match_lengths.zero_()


def planted(known: dict[int, list[int]], is_right: Callable[[], bool]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a table of drafts, and which of them are right."""
    table = torch.zeros(VOCABULARY, WIDTH, dtype=torch.int32)
    right = torch.zeros(VOCABULARY, WIDTH, dtype=torch.bool)
    for first, tokens in known.items():
        for place, token in enumerate(tokens):
            right[first, place] = is_right()
            table[first, place] = token if right[first, place] else (token + 1) % VOCABULARY
    return table, right


def counted(right: list[bool], prompt: int, length: int, most: int) -> tuple[int, int, int]:
    """Return the steps, the verified and the accepted drafts of one answer, by the rule and nothing else."""
    steps = verified = accepted = 0
    position = prompt - 1  # of the token to feed
    while position < length - 1:
        drafts = min(most, length - 2 - position)
        taken = 0
        while taken < drafts and right[position + 1 + taken]:
            taken += 1
        steps, verified, accepted = steps + 1, verified + drafts, accepted + taken
        position += taken + 1
    return steps, verified, accepted


@pytest.fixture(scope="module")
def known(decoder: Any) -> tuple[list[Request], dict[int, list[int]]]:
    """Requests of different first tokens, and their whole texts."""
    rng = random.Random(3)
    given = []
    for index in range(6):
        prompt = [97 + index] + [rng.randrange(97, 123) for _ in range(rng.randrange(1, 20))]
        temperature = [0.0, 0.8][index % 2]
        params = SamplingParams(temperature=temperature, seed=index, max_tokens=20 + 5 * index, ignore_eos=True)
        given.append(Request(prompt, params))
    engine = make(decoder)
    found = answers(engine, given)
    engine.close()
    texts = [[*request.prompt_token_ids, *tokens] for request, (tokens, _) in zip(given, found, strict=True)]
    return given, {text[0]: text for text in texts}


@compiled_or_gpu
@pytest.mark.parametrize("steps_per_launch", [1, 3])
@pytest.mark.parametrize("most", [1, 4, 7])
@pytest.mark.parametrize("chance", [1.0, 0.0, 0.7])
def test_accepted_drafts_are_counted_exactly(decoder, known, chance, most, steps_per_launch):
    given, texts = known
    rng = random.Random(f"{chance} {most}")
    table, right = planted(texts, lambda: rng.random() < chance)
    step = partial(SpeculativeStep, source=lambda _: Planted(table, most), num_drafts=most, adapts=False)
    engine = make(decoder, step, prefix_cache=False, steps_per_launch=steps_per_launch)
    free = engine.cache.available_pages
    found = answers(engine, given)
    assert [[*request.prompt_token_ids, *tokens] for request, (tokens, _) in zip(given, found, strict=True)] == [
        *texts.values()
    ]
    rows = [
        counted(right[first].tolist(), len(request.prompt_token_ids), len(text), most)
        for request, (first, text) in zip(given, texts.items(), strict=True)
    ]
    stats = engine.stats
    assert stats.spec_decode_num_draft_tokens == sum(verified for _, verified, _ in rows)
    assert stats.spec_decode_num_accepted_tokens == sum(accepted for _, _, accepted in rows)
    assert engine.cache.available_pages == free
    engine.close()


@compiled_or_gpu
@pytest.mark.parametrize("chance", [0.0, 0.6])
def test_no_stale_key_is_read_after_rejected_drafts(decoder: Any, known: Any, chance: float) -> None:
    """Between the steps, all that stands behind a row's length becomes NaN: who read it would have no choice."""
    given, texts = known
    rng = random.Random(chance)
    table, _ = planted(texts, lambda: rng.random() < chance)
    step = partial(SpeculativeStep, source=lambda _: Planted(table, 7), num_drafts=7, adapts=False)
    engine = make(decoder, step, prefix_cache=False)
    ids = {engine.add(request): text for request, text in zip(given, texts.values(), strict=True)}
    found: dict[int, list[int]] = {request_id: [] for request_id in ids}
    poisoned = 0
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            found[event.request_id] += event.token_ids
        for sequence in engine.scheduler.decoding:
            pages = torch.tensor(engine.cache.pages_of(sequence.request_id))
            places = torch.arange(len(pages) * 8)[sequence.cached_length :]
            for cache in (tensor for layer in engine.cache.layers for tensor in layer):
                cache[pages[places // 8], places % 8] = torch.nan
            poisoned += len(places)
    assert poisoned > 100
    for request_id, text in ids.items():
        assert found[request_id] == text[-len(found[request_id]) :]
    engine.close()


@compiled_or_gpu
def test_law_4_hostile_padding_changes_no_verified_token(decoder: Any, known: Any) -> None:
    given, texts = known
    table, _ = planted(texts, lambda: True)
    step = partial(SpeculativeStep, source=lambda _: Planted(table, 3), num_drafts=3, adapts=False)
    engine = make(decoder, step, batch_sizes=[4])
    ids = {engine.add(request): text for request, text in zip(given[:3], texts.values(), strict=False)}
    found: dict[int, list[int]] = {request_id: [] for request_id in ids}
    while engine.has_work:
        for event in engine.step():
            found[event.request_id] += event.token_ids
        engine.runner.buffers.poison(engine.runner.buffers.live_row_count)
    for request_id, text in ids.items():
        assert found[request_id] == text[-len(found[request_id]) :]
    assert engine.stats.spec_decode_num_accepted_tokens > 0
    engine.close()


@compiled_or_gpu
def test_law_5_a_verification_replays_as_it_runs_eagerly(decoder: Any, fuzz: Any) -> None:
    given, expected = fuzz
    engine = make(decoder, speculation="ngram", num_tokens=7, ngram_min=1, backend="eager")
    assert answers(engine, given) == expected
    assert {report.queries for report in engine.graphs.report().buckets} >= {1, 8}
    engine.close()


def test_steps_with_drafts_are_captured_before_the_first_one_is_served(decoder: Any, fuzz: Any) -> None:
    given, _ = fuzz
    engine = make(decoder, speculation="ngram", ngram_min=1, num_tokens=7)
    before = {(report.name, report.state) for report in engine.graphs.report().buckets}
    widths = ("", "x2", "x4", "x8")
    assert before == {(f"{rows}{width}", "captured") for rows in engine.graphs.buckets for width in widths}
    answers(engine, given[:6])
    assert {(report.name, report.state) for report in engine.graphs.report().buckets} == before
    assert not any(report.eager_runs for report in engine.graphs.report().buckets)
    engine.close()


@compiled_or_gpu
def test_drafting_stops_when_it_does_not_pay_and_resumes(decoder: Any, known: Any) -> None:
    """Each verification is made to look dear, then cheap: the pace follows, and what is drafted meanwhile is free."""
    given, texts = known
    table, _ = planted(texts, lambda: True)
    step = partial(SpeculativeStep, source=lambda _: Planted(table, 7))
    engine = make(decoder, step)
    assert engine.loop.drafts is not None
    pace = engine.loop.drafts.pace
    seconds = {width: 1.0 + 10.0 * (width > 1) for width in pace.widths}
    pace.record_step = lambda bucket, width, _: None  # type: ignore[method-assign]
    pace.step_seconds = lambda bucket, width: seconds[width]  # type: ignore[method-assign]
    answers(engine, given)
    assert engine.stats.spec_decode_num_draft_tokens == 0
    assert pace.chance(0) > 0.95  # known from steps that fed no draft
    seconds |= dict.fromkeys(pace.widths, 1.0)
    found = answers(engine, given)
    assert engine.stats.spec_decode_num_accepted_tokens > 0.8 * sum(len(tokens) for tokens, _ in found) - 6
    engine.close()


@compiled_or_gpu
@pytest.mark.parametrize("settings", [{}, {"steps_per_launch": 3, "total_num_pages": 15}], ids=str)
def test_a_truncated_copy_of_the_model_drafts_for_it(decoder: Any, fuzz: Any, settings: dict[str, Any]) -> None:
    given, expected = fuzz
    for layers, adapts in ((len(decoder.layers), False), (2, True)):
        small = Decoder(decoder.config, decoder.stem, decoder.layers[:layers], decoder.head)
        source = partial(ModelDrafts, model=small, num_drafts=7)
        engine = make(decoder, partial(SpeculativeStep, source=source, adapts=adapts), **settings)
        assert answers(engine, given) == expected
        stats = engine.stats
        total = sum(len(tokens) for tokens, _ in expected)
        if layers == len(decoder.layers):  # the model itself: where greedy, right but for what penalties change
            assert stats.spec_decode_num_accepted_tokens > 0.3 * total
        assert stats.spec_decode_num_draft_tokens > 0
        engine.close()


@compiled_or_gpu
def test_a_draft_model_that_does_not_pay_is_left_out_of_the_step_and_catches_up(decoder: Any) -> None:
    """The model drafts for itself: where its keys are all there, each draft is right."""
    step = partial(SpeculativeStep, source=partial(ModelDrafts, model=decoder, num_drafts=7))
    engine, plain = make(decoder, step), make(decoder)
    nodes = [made.graphs.report().buckets[0].kernels for made in (engine, plain)]
    assert sum(nodes[0].values()) < 1.3 * sum(nodes[1].values())  # one model's pass, and not two
    assert engine.loop.drafts is not None
    seconds = {width: 1.0 + 100.0 * (width > 1) for width in engine.loop.drafts.pace.widths}
    engine.loop.drafts.pace.step_seconds = lambda bucket, width: seconds[width]  # type: ignore[method-assign]
    given = [
        Request([97 + index] * 5 + [61], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        for index in range(3)
    ]
    expected = [tokens for tokens, _ in answers(plain, given)]
    found: dict[int, list[int]] = {engine.add(request): [] for request in given}
    for turn in range(100):
        if turn == 25:
            assert engine.stats.spec_decode_num_draft_tokens == 0
            seconds |= dict.fromkeys(engine.loop.drafts.pace.widths, 1.0)
        for event in engine.step():
            found[event.request_id] += event.token_ids
    assert list(found.values()) == expected
    stats = engine.stats
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens > 60
    engine.close()
    plain.close()


def test_expensive_drafts_are_tried_rarely_until_they_are_accepted() -> None:
    pace = DraftPace((1, 2, 4, 8), is_cheap=False)

    def launch(is_right: bool) -> int:
        width = pace.choose(1, [(7, 0)], 8)
        pace.record_step(1, width, 1.0 + 0.2 * (width - 1))
        accepted = (width - 1) * is_right
        pace.record_drafts([(7, 0)], StepDrafts([width - 1], [accepted], [7], [0]))
        return width

    assert {launch(is_right=False) for _ in range(3)} == {1}  # or nobody knew what a plain step takes
    wide = [launch(is_right=False) > 1 for _ in range(5000)]
    assert 0 < sum(wide[1000:]) < 0.01 * 4000
    assert sum(wide[:1000]) < 0.05 * 1000
    widths = [launch(is_right=True) for _ in range(2100)]
    assert widths[-20:] == [8] * 20


def test_a_draft_model_slower_than_plain_steps_is_hardly_run() -> None:
    pace, wide = DraftPace((1, 2, 4, 8), is_cheap=False), []
    for _ in range(2000):
        width = pace.choose(1, [(7, 0)], 8)
        pace.record_step(1, width, 1.0 + 1.5 * (width - 1))
        pace.record_drafts([(7, 0)], StepDrafts([width - 1], [width - 1], [7], [0]))
        wide.append(width)
    assert max(wide) == 2
    assert sum(width > 1 for width in wide) < 30


@compiled_or_gpu
def test_a_draft_model_is_named_in_the_configuration() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    limits = {"max_batch_size": 2, "max_sequence_length": 64}
    with LLM("demo", **limits) as llm:
        expected = llm.generate("rev abcd=", params, use_tqdm=False)[0].outputs[0].token_ids
    small = {"method": "model", "model": "demo", "num_tokens": 7}
    for speculation in (small, {"method": "ngram", "num_tokens": 3}, "ngram", None):
        with LLM("demo", speculation=speculation, **limits) as llm:
            assert llm.generate("rev abcd=", params, use_tqdm=False)[0].outputs[0].token_ids == expected
            if speculation == small:
                assert llm.stats.spec_decode_num_accepted_tokens >= 8
    with pytest.raises(ConfigError, match="draft.model"):
        LLM("demo", speculation="model")
    with pytest.raises(ArgumentError, match="vocabulary"):
        LLM("demo", speculation={"method": "model", "model": "shape:llama-100m"}, **limits)
