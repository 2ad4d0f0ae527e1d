"""Greedy tokens equal transformers', up to near-ties of logits, for every family, in any company and with few pages."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from family_checkpoints import FAMILIES
from transformers import AutoModelForCausalLM

from graphdecode import LLM, BucketConfig, SamplingParams

NEAR_TIE = 1e-3
NEW_TOKENS = 24
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 33, 70, 100)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(256) for _ in range(length)] for length in PROMPT_LENGTHS]


def assert_greedy(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> None:
    """Check each token against the logits that transformers gives for all before it."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    margin = logits.max(-1).values - chosen
    assert margin.max() < NEAR_TIE, f"token {int(margin.argmax())} is {margin.max():.4f} below the best"


@pytest.mark.parametrize(("rows", "pages"), [(3, 40), (8, "auto"), (8, 26)])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(
    checkpoint: Callable[[str], Path], name: str, rows: int, pages: int | str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint(name), dtype=torch.float32, experts_implementation="eager"
    ).eval()
    config = BucketConfig(max_batch_size=rows, max_sequence_length=160, page_size=8, total_num_pages=pages)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    # so few that prompts take several chunks
    with LLM(checkpoint(name), config=config, dtype="float32", max_prefill_tokens=32) as llm:
        outputs = llm.generate(prompts(), params)
        assert (llm.num_preemptions > 0) == (pages == 26)
    for output in outputs:
        assert len(output.outputs[0].token_ids) == NEW_TOKENS
        assert_greedy(model, output.prompt_token_ids, output.outputs[0].token_ids)
