"""Greedy tokens: those that an engine gives, and those that transformers gives."""

from collections.abc import Sequence
from typing import Any

import torch

from graphdecode import LLM, SamplingParams


def greedy_tokens(llm: LLM, prompts: Sequence[list[int]], count: int, **options: Any) -> list[list[int]]:
    """Return an engine's tokens for each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False, **options)
    return [list(output.outputs[0].token_ids) for output in outputs]


@torch.no_grad()
def reference_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return the tokens of transformers' `generate`."""
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, max_new_tokens=count, **options)[0, len(prompt) :].tolist()
