"""Greedy tokens equal transformers', up to near-ties of logits, for every family, in any company and with few pages."""

import random
from functools import cache, lru_cache
from pathlib import Path

import pytest
import torch
from driven_decoder import DrivenDecoder
from family_checkpoints import FAMILIES
from torch import Tensor
from transformers import AutoModelForCausalLM

from graphdecode import LLM, SamplingParams
from graphdecode.engine.steps import step as step_module
from graphdecode.models import load_model

NEAR_TIE = 1e-3
NEW_TOKENS = 48  # so that the first of nine prompts still decodes when the last has come in chunks of 7
PROMPT_LENGTHS = (100, 70, 33, 17, 16, 15, 7, 2, 1)
PARAMS = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@lru_cache(maxsize=1)
def reference(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(256) for _ in range(length)] for length in PROMPT_LENGTHS]


def assert_greedy(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> None:
    """Check each token against the logits that transformers gives for all before it."""
    _assert_greedy(model, tuple(prompt), tuple(answer))


@lru_cache(maxsize=2 * len(PROMPT_LENGTHS))  # engines agree: the oracle runs once for all of them
@torch.no_grad()
def _assert_greedy(model: torch.nn.Module, prompt: tuple[int, ...], answer: tuple[int, ...]) -> None:
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    margin = logits.max(-1).values - chosen
    assert margin.max() < NEAR_TIE, f"token {int(margin.argmax())} is {margin.max():.4f} below the best"


@pytest.mark.parametrize(
    ("rows", "pages", "chunk"),
    [([1, 2, 3], 45, 32), pytest.param([9], "auto", 32, marks=pytest.mark.slow), ([1, 4, 9], 60, 7)],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(checkpoint, monkeypatch, name, rows, pages, chunk):
    """In chunks of 7, steps take prompts along, and pages run out; then each prompt goes alone."""
    if chunk == 7:
        monkeypatch.setattr(step_module, "CACHED_BYTES", 0)  # else small models have no mixed steps
    sizes = {"max_batch_size": rows[-1], "batch_sizes": rows, "max_sequence_length": 160, "page_size": 8}
    with LLM(checkpoint(name), dtype="float32", max_prefill_tokens=chunk, total_num_pages=pages, **sizes) as llm:
        outputs = llm.generate(prompts(), PARAMS)
        assert llm.stats.batch_sizes[rows[-1]] > 0
        assert (llm.num_preemptions > 0) == (llm.stats.mixed_steps > 0) == (chunk == 7)
        if chunk == 7:
            llm.cache.reset()  # of prefixes
            outputs += [llm.generate(prompt, PARAMS)[0] for prompt in prompts()]
    for output in outputs:
        assert len(output.outputs[0].token_ids) == NEW_TOKENS
        assert_greedy(reference(checkpoint(name)), output.prompt_token_ids, output.outputs[0].token_ids)


TOLERANCE = 1e-4
# mixed, at and around the borders of pages, windows and the contexts that yarn and llama3 stretch (32 and 64)
LENGTHS = (1, 2, 8, 9, 20, 33, 64, 65, 130)
STEPS = 12


def texts() -> list[list[int]]:
    """Return each row's tokens: a prompt, and what is fed to it after."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 256, (length + STEPS,), generator=generator).tolist() for length in LENGTHS]


@cache
def expected_logits(folder: Path, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return what transformers gives for each row's last `STEPS + 1` tokens, [STEPS + 1, vocab]."""
    model = reference(folder, dtype)
    with torch.no_grad():
        return [model(torch.tensor([text])).logits[0, -STEPS - 1 :].float() for text in texts()]


def decoded_logits(folder: Path, device: str, chunk: int, dtype: str = "float32") -> list[Tensor]:
    """Return the same from the decoder: prompts but their last token in chunks, the rest by decode steps."""
    model = load_model(folder, device=device, dtype=dtype)
    rows = texts()
    driven = DrivenDecoder(model, len(rows))
    prompts = [text[: length - 1] for text, length in zip(rows, LENGTHS, strict=True)]
    for start in range(0, max(LENGTHS), chunk):
        parts = [prompt[start : start + chunk] for prompt in prompts]
        driven.prefill(parts, [min(start, len(prompt)) for prompt in prompts])
    steps = []
    for step in range(STEPS + 1):
        positions = [length - 1 + step for length in LENGTHS]
        steps.append(driven.decode([text[at] for text, at in zip(rows, positions, strict=True)], positions))
    return list(torch.stack(steps, dim=1).float().cpu())


@pytest.mark.parametrize("chunk", [256, 13])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(checkpoint, device, name, chunk):
    expected = expected_logits(checkpoint(name))
    for length, actual, exact in zip(LENGTHS, decoded_logits(checkpoint(name), device, chunk), expected, strict=True):
        error = (actual - exact).abs().amax(-1)
        assert error.max() < TOLERANCE, f"prompt of {length}: step {int(error.argmax())} is off by {error.max():.2e}"
        best, second = exact.topk(2).values.unbind(-1)
        clear = best - second > 2 * TOLERANCE
        assert torch.equal(actual.argmax(-1)[clear], exact.argmax(-1)[clear])


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize("name", ["llama-biases", "qwen2.5-yarn-tied"])
def test_packed_weights_give_the_logits_of_transformers(checkpoint, monkeypatch, name):
    monkeypatch.setattr("graphdecode.linear.unquantized.can_panel", lambda weight: False)
    for actual, exact in zip(
        decoded_logits(checkpoint(name), "cpu", 256), expected_logits(checkpoint(name)), strict=True
    ):
        assert (actual - exact).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama-3.1", "qwen2-window", "qwen3-tied"])
def test_bf16_logits_are_as_close_to_fp32_as_those_of_transformers(checkpoint, device, name):
    exact = torch.stack(expected_logits(checkpoint(name)))
    theirs = torch.stack(expected_logits(checkpoint(name), torch.bfloat16))
    ours = torch.stack(decoded_logits(checkpoint(name), device, 256, "bfloat16"))
    assert (ours - exact).square().mean() < 1.5 * (theirs - exact).square().mean()


@pytest.mark.parametrize("name", FAMILIES)
def test_fp16_logits_are_nearer_to_those_of_fp32_than_bf16_could_be(checkpoint, device, name):
    """Four of five steps: where two experts are nearly as good as each other, another one gives other logits."""
    exact = torch.stack(expected_logits(checkpoint(name)))
    ours = torch.stack(decoded_logits(checkpoint(name), device, 256, "float16"))
    errors = (ours - exact).square().mean(-1).sqrt() / exact.std(-1)
    assert errors.flatten().quantile(0.8) < 12 * 2**-11  # roundings to fp16; in bf16 it is 14 to 157 of these
