"""How much 16 bits lose beside float32 over the same weights: bounds that only ever go down.

What is rounded are activations that products take, keys, values and queries; neither logits nor the residual stream
are, nor what compiled products give. With all of these rounded the error is some 1.4 times as large.
"""

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy_tokens import greedy_tokens, reference_tokens
from test_against_transformers import STEPS, decoded_logits, texts
from torch import Tensor
from transformers import AutoModelForCausalLM

from graphdecode import LLM
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.instructions import instructions

BOUNDS = {  # mean |difference of log-probability|: with compiled kernels, and without
    ("llama-3.2", "bfloat16"): (0.0098, 0.0126),
    ("llama-3.2", "float16"): (0.00123, 0.0016),
    ("gemma2", "bfloat16"): (0.008, 0.0098),
    ("qwen3-moe", "bfloat16"): (0.0092, 0.0116),
}
# matrix tiles take a decode step's attention weights in one bf16, not two
IN_TILES = {("qwen3-moe", "bfloat16"): 0.0102}


def exact_logits(folder: Path, dtype: torch.dtype) -> list[Tensor]:
    """Return what transformers gives in float32 over weights that are rounded, as `expected_logits` does."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    for weight in model.parameters():
        if weight.dim() > 1:  # norms stay in float32
            weight.data = weight.data.to(dtype).float()
    with torch.no_grad():
        return [model(torch.tensor([text])).logits[0, -STEPS - 1 :] for text in texts()]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("name", "dtype"), BOUNDS)
def test_16_bits_lose_no_more_than_their_products_inputs_do(checkpoint, name, dtype, compiled):
    if compiled and native.library() is None:
        pytest.skip(f"no compiled kernels: {native.unavailable_reason()}")
    expected = exact_logits(checkpoint(name), getattr(torch, dtype))
    with nullcontext() if compiled else native.switched_off():
        actual = decoded_logits(checkpoint(name), "cpu", 256, dtype)
    errors = torch.cat([(a.log_softmax(-1) - b.log_softmax(-1)).abs() for a, b in zip(actual, expected, strict=True)])
    mean, bound = float(errors.mean()), BOUNDS[name, dtype][not compiled]
    if compiled and instructions().name == "amx":
        bound = IN_TILES.get((name, dtype), bound)
    assert mean <= bound, f"{mean:.5f} is more than {bound}"


NEW_TOKENS = 48
PROMPT_LENGTHS = (3, 9, 15, 16, 17, 33, 50, 70)
NEAR_TIE = 6 * 2**-8  # of the largest logit: six roundings to bfloat16, whose unit roundoff is 2^-8


def check_near_ties(exact: Any, prompt: list[int], ours: list[int], others: list[int]) -> tuple[Tensor, bool]:
    """Check that our tokens are nearly the best, and nearly another's where the texts part.

    Return how far apart the best two tokens are at each place, in near ties, and whether the texts part.
    """
    with torch.no_grad():
        logits = exact(torch.tensor([prompt + ours])).logits[0, len(prompt) - 1 : -1]
    tie, best = NEAR_TIE * float(logits.abs().max()), logits.topk(2).values
    lost = best[:, 0] - logits.gather(1, torch.tensor(ours)[:, None])[:, 0]
    assert lost.max() < tie, f"token {int(lost.argmax())} is {lost.max():.4f} below the best"
    split = next((at for at, pair in enumerate(zip(ours, others, strict=True)) if pair[0] != pair[1]), None)
    if split is not None:
        gap = abs(float(logits[split, ours[split]] - logits[split, others[split]]))
        assert gap < tie, f"texts part at {split}, where the tokens are {gap:.4f} apart"
    return (best[:, 0] - best[:, 1]) / tie, split is not None


@pytest.mark.parametrize("name", ["llama-3.2", "qwen3"])
def test_where_texts_part_from_transformers_the_two_tokens_are_near_ties(checkpoint, name):
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.float32).eval()
    rng = random.Random(7)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in PROMPT_LENGTHS]
    with LLM(checkpoint(name), dtype="bfloat16", max_batch_size=8, max_sequence_length=160, page_size=8) as llm:
        answers = greedy_tokens(llm, prompts, NEW_TOKENS)
    others = [reference_tokens(theirs, prompt, NEW_TOKENS) for prompt in prompts]
    checks = [check_near_ties(exact, *row) for row in zip(prompts, answers, others, strict=True)]
    assert any(parted for _, parted in checks), "no texts part: nothing was shown"
    assert min(gaps.median() for gaps, _ in checks) > 1, "most places must be no near-ties, or this shows nothing"


@pytest.mark.parametrize("settings", [{"num_tokens": 7}, {"num_tokens": "auto", "steps_per_launch": 3}], ids=str)
def test_where_texts_part_from_those_without_speculation_the_two_tokens_are_near_ties(checkpoint, settings):
    """A product of the rows' eight queries may round otherwise than one of a query each."""
    rng = random.Random(9)
    repeating = [[rng.randrange(256) for _ in range(rng.randrange(2, 6))] * rng.randrange(2, 6) for _ in range(8)]
    limits: dict[str, Any] = {"dtype": "bfloat16", "max_batch_size": 4, "max_sequence_length": 96, "page_size": 8}
    limits["steps_per_launch"] = settings.get("steps_per_launch", 1)
    drafting = {"method": "ngram", "num_tokens": settings["num_tokens"], "ngram_min": 1}
    answers = []
    for speculation in (None, drafting):
        with LLM(checkpoint("qwen3"), speculation=speculation, **limits) as llm:
            answers.append(greedy_tokens(llm, repeating, NEW_TOKENS))
            accepted = llm.stats.spec_decode_num_accepted_tokens
    assert accepted > NEW_TOKENS
    exact = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), dtype=torch.float32).eval()
    checks = [check_near_ties(exact, *row) for row in zip(repeating, *reversed(answers), strict=True)]
    assert torch.cat([gaps for gaps, _ in checks]).median() > 1, (
        "most places must be no near-ties, or this shows nothing"
    )
