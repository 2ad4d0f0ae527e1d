"""What a request may not generate, and how much it may ask for: against brute force, alone and in any company."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiled_kernels import compiled_or_gpu
from transformers import AutoModelForCausalLM

from graphdecode import LLM, ArgumentError, Request, SamplingParams
from graphdecode.engine import RequestError
from graphdecode.models import resolve_model_path

MakeLLM = Callable[..., LLM]
NextLogits = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def next_logits() -> NextLogits:
    """The demo model's logits behind some tokens, by transformers, in float64."""
    model = AutoModelForCausalLM.from_pretrained(resolve_model_path("demo"), dtype=torch.float64).eval()

    def of(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0, -1]

    return of


@pytest.fixture(scope="module", params=[1, 5], ids=lambda steps: f"steps_per_launch={steps}")
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(
        "demo", dtype="float32", max_batch_size=4, max_sequence_length=128, steps_per_launch=request.param
    ) as engine:
        yield engine


def greedy(next_logits: NextLogits, prompt: list[int], allowed: list[int] | None, words: list[list[int]]) -> list[int]:
    """Twelve tokens by brute force: the definition of bad words as it is written."""
    generated: list[int] = []
    for _ in range(12):
        logits = next_logits(prompt + generated)
        for word in words:
            *before, last = word
            if len(before) <= len(generated) and generated[len(generated) - len(before) :] == before:
                logits[last] = -torch.inf
        if allowed is not None:
            kept = torch.full_like(logits, -torch.inf)
            kept[allowed] = logits[allowed]
            logits = kept
        generated.append(int(logits.argmax()))
    return generated


def test_bad_words_and_allowed_tokens_match_brute_force(llm: LLM, next_logits: NextLogits) -> None:
    rng = random.Random(3)
    prompts = [list(text.encode()) for text in ("rev oceanic=", "sort zebra=", "417+385=", "rev banana=", "abab", "x")]
    plain = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    free = [output.outputs[0].token_ids for output in llm.generate(prompts, plain, use_tqdm=False)]
    ids, expected = [], []
    for prompt, answer in zip(prompts, free, strict=True):
        # pieces of what would be said, so that they bite, and of what would be said instead
        places = [(rng.randrange(8), rng.randint(1, 4)) for _ in range(3)]
        words = [answer[at : at + length] for at, length in places]
        words += [[*word[:-1], rng.randrange(97, 123)] for word in words]
        allowed = rng.sample(range(259), 150) if rng.random() < 0.5 else None
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, allowed_token_ids=allowed)
        ids.append(llm.engine.add(Request(prompt, params, bad_words_token_ids=words)))
        expected.append(greedy(next_logits, prompt, allowed, words))
    found: dict[int, list[int]] = {request_id: [] for request_id in ids}
    while llm.engine.has_work:
        for event in llm.engine.step():
            found[event.request_id] += event.token_ids
    assert list(found.values()) == expected
    assert sum(answer != other for answer, other in zip(free, expected, strict=True)) > 3


def test_bad_words_do_not_match_the_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    plain = llm.generate("rev oceanic=", params, use_tqdm=False)[0].outputs[0].text
    behind_prompt = SamplingParams(temperature=0.0, max_tokens=8, bad_words=["=c"])
    assert llm.generate("rev oceanic=", behind_prompt, use_tqdm=False)[0].outputs[0].text == plain == "cinaeco"


def test_bad_words_match_at_the_start_and_after_a_space(llm: LLM) -> None:
    def answered(prompt: str, *words: str) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=8, bad_words=words)
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text

    assert "cin" not in answered("rev oceanic=", "cin")
    assert "ae" not in answered("rev oceanic=", "ae", "zz")
    assert answered("rev oceanic=", "zz") == "cinaeco"


def test_allowed_token_ids_may_be_any_collection(llm: LLM) -> None:
    kinds: list[Any] = [{100, 101}, frozenset({101, 100}), [101, 100], range(100, 102)]
    params = [SamplingParams(temperature=0.0, allowed_token_ids=allowed) for allowed in kinds]
    first, *others = (output.outputs[0].token_ids for output in llm.generate([[97, 98]] * 4, params, use_tqdm=False))
    assert set(first) <= {100, 101}
    assert others == [first] * 3


def test_a_row_without_an_allowed_token_fails_alone(llm: LLM) -> None:
    limited = SamplingParams(temperature=0.0, max_tokens=6, allowed_token_ids=[97], ignore_eos=True)
    ids = [
        llm.engine.add(Request([97, 98], limited, bad_words_token_ids=[[97, 97]])),
        llm.engine.add(Request([97, 98], limited)),
    ]
    tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
    errors = {}
    while llm.engine.has_work:
        for event in llm.engine.step():
            tokens[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                errors[event.request_id] = event.error
    assert list(tokens.values()) == [[97], [97] * 6]
    assert errors[ids[0]]
    assert errors[ids[1]] is None


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([97], SamplingParams(logprobs=21)), "logprobs.* max_logprobs=20 .*21"),
        (Request([97], SamplingParams(logprobs=-1)), "logprobs.* max_logprobs=20 .*259"),
        (Request([97], SamplingParams(prompt_logprobs=21)), "prompt_logprobs.* max_logprobs=20"),
        (Request([97], SamplingParams(stop_token_ids=range(128))), "stop_token_ids .*max_stop_token_ids=128.*129"),
        (Request([97], SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))), "logit_bias.* max_logit_biases="),
        (Request([97], bad_words_token_ids=[[1]] * 129), "bad_words.* max_bad_words=128"),
        (Request([97], bad_words_token_ids=[[1] * 17]), r"bad_words.* 1\.\.16 .*17"),
        (Request([97], bad_words_token_ids=[[1, 259]]), "bad_words .*259"),
        (Request([97], SamplingParams(allowed_token_ids=[5, 259])), "allowed_token_ids .*259"),
        (Request([97], SamplingParams(allowed_token_ids=[257], min_tokens=2)), "allowed_token_ids"),
        (Request([97], SamplingParams(allowed_token_ids=[5]), bad_words_token_ids=[[5]]), "allowed_token_ids"),
        (Request([97], SamplingParams(bad_words=["a"])), "bad_words .*'a'"),
        (Request([97], SamplingParams(truncate_prompt_tokens=3)), "truncate_prompt_tokens .*3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parameters_beyond_the_capacity_name_its_key(llm, request_, words):
    with pytest.raises(RequestError, match=words):
        llm.engine.add(request_)
    assert not llm.engine.has_work


def test_a_raised_capacity_takes_effect(next_logits: NextLogits) -> None:
    sizes = {"max_logprobs": 1000, "max_stop_token_ids": 300, "max_logit_biases": 259, "max_bad_words": 3}
    with LLM("demo", dtype="float32", max_batch_size=2, max_sequence_length=64, **sizes) as llm:
        prompt = llm.tokenizer("12+30=").input_ids
        params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=-1, prompt_logprobs=200)
        output, other = llm.generate(["12+30=", "rev abc="], [params, SamplingParams(logprobs=1)], use_tqdm=False)
        for place, entries in enumerate(output.outputs[0].logprobs):
            expected = next_logits(prompt + output.outputs[0].token_ids[:place]).log_softmax(-1)
            assert sorted(entry.rank for entry in entries.values()) == list(range(1, 260))
            found = torch.tensor([entries[token].logprob for token in range(259)], dtype=torch.float64)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
        assert {len(place) for place in output.prompt_logprobs[1:]} <= {200, 201}
        assert {len(place) for place in other.outputs[0].logprobs} <= {1, 2}
        stops = [token for token in range(259) if token != ord("2")]
        answer = llm.generate("12+30=", SamplingParams(temperature=0.0, stop_token_ids=stops))[0].outputs[0]
        assert (answer.stop_reason, answer.token_ids) == (ord("4"), [ord("4")])
        stops.remove(ord("4"))
        answer = llm.generate("12+30=", SamplingParams(temperature=0.0, stop_token_ids=stops))[0].outputs[0]
        assert answer.text == "42"
        bias = {token: -50.0 for token in range(259) if token != ord("q")}
        answer = llm.generate("12+30=", SamplingParams(temperature=0.0, max_tokens=4, logit_bias=bias))[0].outputs[0]
        assert answer.text == "qqqq"
        with pytest.raises(ArgumentError, match="bad_words.* max_bad_words=3"):
            llm.stream("a", SamplingParams(bad_words=["q", "r", "s", "t"]))


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts with a random half of everything that this file is about, and what it stands beside."""
    rng = random.Random(seed)

    def maybe(value: Any, otherwise: Any = None) -> Any:
        return value if rng.random() < 0.5 else otherwise

    return [
        (
            [rng.randrange(97, 123) for _ in range(rng.choice([1, 15, 16, 17, 40]))],
            SamplingParams(
                temperature=rng.choice([0.0, 0.9]),
                top_p=maybe(0.9, 1.0),
                seed=index,
                max_tokens=rng.randint(1, 24),
                min_tokens=maybe(1, 0),
                ignore_eos=maybe(True, False),
                allowed_token_ids=maybe(sorted(rng.sample(range(97, 123), 12))),
                bad_words=maybe(["".join(rng.choices("abcdefghij", k=rng.randint(1, 3))) for _ in range(20)]),
                logit_bias=maybe({rng.randrange(97, 123): rng.uniform(-3, 3) for _ in range(70)}),
                stop_token_ids=maybe(rng.sample(range(97, 123), 9)),
                repetition_penalty=maybe(1.2, 1.0),
                logprobs=maybe(rng.randint(0, 30)),
                prompt_logprobs=maybe(rng.randint(0, 30)),
            ),
        )
        for index in range(24)
    ]


@compiled_or_gpu
def test_law_9_sampling_parameters_give_the_same_bits_in_any_batch() -> None:
    def answers(llm: LLM, given: list[tuple[list[int], SamplingParams]], priority: list[int] | None = None) -> list:
        prompts, params = [prompt for prompt, _ in given], [params for _, params in given]
        outputs = llm.generate(prompts, params, use_tqdm=False, priority=priority)
        return [(output.outputs[0], output.prompt_logprobs, output.error) for output in outputs]

    rng, given = random.Random(1), requests(seed=5)
    common = {"max_sequence_length": 64, "max_logprobs": 30, "batch_invariant": True}
    with LLM("demo", max_batch_size=1, **common) as llm:
        expected = [answers(llm, [request])[0] for request in given]
    assert sum(output.finish_reason == "stop" for output, _, _ in expected) > 3
    order = list(range(len(given)))
    rng.shuffle(order)
    for settings in (
        {"max_batch_size": 12},
        {"max_batch_size": 6, "batch_sizes": [3], "max_prefill_tokens": 7, "steps_per_launch": 3},
        {"max_batch_size": 8, "page_size": 4, "total_num_pages": 40, "prefix_cache": False},
    ):
        with LLM("demo", **common, **settings) as llm:
            priority = [rng.randint(-1, 1) for _ in order]
            found = answers(llm, [given[index] for index in order], priority)
            for index, answer in zip(order, found, strict=True):
                assert answer == expected[index], (settings, index)
            assert bool(llm.num_preemptions) == ("total_num_pages" in settings)
            assert llm.cache.pool.used == 0


def test_a_batch_without_masks_uploads_no_masks(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not constrained pay nothing: what is read of constrained rows alone is uploaded for them alone."""
    llm = make_llm()
    seen: list[str] = []
    upload = type(llm.engine.runner.buffers).upload
    monkeypatch.setattr(
        type(llm.engine.runner.buffers),
        "upload",
        lambda self, block, rows: (seen.append(block), upload(self, block, rows)),
    )
    llm.generate(["a", "b"], SamplingParams(temperature=0.9, max_tokens=3, logprobs=2), use_tqdm=False)
    assert set(seen) <= {"rows", "pages", "chunks"}
    seen.clear()
    params = SamplingParams(max_tokens=3, allowed_token_ids=[97, 98], bad_words=["aba"], logit_bias={97: 1.0})
    llm.generate(["a", "b"], params, use_tqdm=False)
    assert len(set(seen)) > 3
    assert len(seen) < 12
