"""How much 16 bits lose beside float32 over the same weights: bounds that only ever go down.

What is rounded are activations that products take, keys, values and queries; neither logits nor the residual stream
are, nor what compiled products give. With all of these rounded the error is some 1.4 times as large.
"""

import random
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from greedy_tokens import greedy_tokens, reference_tokens
from test_against_transformers import STEPS, decoded_logits, texts
from torch import Tensor
from transformers import AutoModelForCausalLM

from graphdecode import LLM, SamplingParams
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
        pytest.skip(f"no compiled kernels: {native.why_not()}")
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


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(256) for _ in range(length)] for length in PROMPT_LENGTHS]


@torch.no_grad()
def logits_along(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The logits from which each token of an answer was chosen, [tokens, vocabulary]."""
    return model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]


@pytest.mark.parametrize("name", ["llama-3.2", "qwen3"])
def test_where_texts_part_from_transformers_the_two_tokens_are_near_ties(checkpoint, name):
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.float32).eval()
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(checkpoint(name), dtype="bfloat16", max_batch_size=8, max_sequence_length=160, page_size=8) as llm:
        outputs = llm.generate(prompts(), params, use_tqdm=False)
    parted, gaps = 0, []
    for output in outputs:
        ours, other = output.outputs[0].token_ids, reference_tokens(theirs, output.prompt_token_ids, NEW_TOKENS)
        logits = logits_along(exact, output.prompt_token_ids, ours)
        tie = NEAR_TIE * float(logits.abs().max())
        best = logits.max(-1).values
        lost = best - logits.gather(1, torch.tensor(ours)[:, None])[:, 0]
        assert lost.max() < tie, f"token {int(lost.argmax())} is {lost.max():.4f} below the best"
        gaps.append(float((best - logits.topk(2).values[:, 1]).median()) / tie)
        splits = [at for at, pair in enumerate(zip(ours, other, strict=True)) if pair[0] != pair[1]]
        if splits:
            parted += 1
            gap = float(logits[splits[0], ours[splits[0]]] - logits[splits[0], other[splits[0]]])
            assert abs(gap) < tie, f"texts part at {splits[0]}, where the tokens are {abs(gap):.4f} apart"
    assert parted, "no texts part: nothing was shown"
    assert min(gaps) > 1, "most places must be no near-ties, or this shows nothing"


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
    gaps: list[float] = []
    for prompt, plain, fast in zip(repeating, *answers, strict=True):
        logits = logits_along(exact, prompt, fast)
        tie, best = NEAR_TIE * float(logits.abs().max()), logits.topk(2).values
        lost = best[:, 0] - logits.gather(1, torch.tensor(fast)[:, None])[:, 0]
        assert lost.max() < tie, f"token {int(lost.argmax())} is {lost.max():.4f} below the best"
        gaps += ((best[:, 0] - best[:, 1]) / tie).tolist()
        at = next((at for at, pair in enumerate(zip(plain, fast, strict=True)) if pair[0] != pair[1]), None)
        if at is not None:
            gap = float(logits[at, plain[at]] - logits[at, fast[at]])
            assert abs(gap) < tie, f"texts part at {at}, where the tokens are {abs(gap):.4f} apart"
    assert median(gaps) > 1, "most places must be no near-ties, or this shows nothing"
