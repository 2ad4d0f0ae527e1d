"""What the host tells a step of its rows: the tokens that penalties count, where a row ends, and who gets in."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from graphdecode import LLM, Request, SamplingParams
from graphdecode.cache import PagedKVCache
from graphdecode.engine.metrics import RequestMetrics
from graphdecode.engine.scheduler import Scheduler, Sequence
from graphdecode.engine.steps import RowInputs, RowSampling
from graphdecode.kernels.sampling.sampling_slots import PROMPT_BIT
from graphdecode.models import resolve_model_path

PAGE = 4  # tokens


@pytest.fixture(scope="module", params=[1, 16], ids=lambda steps: f"steps_per_launch={steps}")
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(
        "demo", max_batch_size=4, max_sequence_length=64, dtype="float32", steps_per_launch=request.param, device="cpu"
    ) as engine:
        yield engine


def staged_counts(llm: LLM, prompt: list[int], generated: list[int], sampling: RowSampling) -> np.ndarray:
    llm.engine.runner.stage([RowInputs(prompt + generated, len(prompt), (0,), sampling)])
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
def test_a_row_is_finished_on_the_device_by_the_last_token_that_it_may_have(
    llm: LLM, prompt_length: int, max_tokens: int, tokens: int
) -> None:
    """The host would not notice: it ends the answer by its own count, and forgets what came after."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    assert len(answer_of(llm, [97] * prompt_length, params)) == tokens
    buffers = llm.engine.runner.buffers
    assert buffers.finished[0] == 1
    # the position of the token that was fed last: one before that of the last token, whose keys nobody needs
    assert buffers.pre_step_seqlens[0] == prompt_length + tokens - 2


def test_what_was_found_in_the_prefix_cache_is_told(llm: LLM) -> None:
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


def test_closing_gives_up_what_runs_and_every_page() -> None:
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
    return Scheduler(cache, max_batch_size=3)


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


def test_who_enters_leaves_a_page_for_each_that_runs(scheduler: Scheduler) -> None:
    assert admitted(scheduler, 2 * PAGE, 2 * PAGE, PAGE) == [True, False, True]
    assert scheduler.cache.available_pages == 1


def test_with_two_at_work_two_pages_stay_free(scheduler: Scheduler) -> None:
    assert admitted(scheduler, PAGE, PAGE, PAGE) == [True, True, False]
    assert scheduler.cache.available_pages == 2


def test_alone_a_sequence_may_take_every_page(scheduler: Scheduler) -> None:
    assert admitted(scheduler, 4 * PAGE) == [True]
    assert scheduler.cache.available_pages == 0


@pytest.mark.parametrize("length", [2 * PAGE, 3 * PAGE], ids=["no spare page", "no page"])
def test_who_is_refused_leaves_the_cache_as_it_was(scheduler: Scheduler, length: int) -> None:
    admitted(scheduler, 2 * PAGE)
    before = scheduler.cache.available_pages, dict(scheduler.cache.ledger.pages)
    refused = waiting(9, length)
    scheduler.add(refused)
    assert scheduler.next_chunks(100) == []
    assert (scheduler.cache.available_pages, dict(scheduler.cache.ledger.pages)) == before
    assert list(scheduler.waiting) == [refused]
