"""Greedy tokens and log-probabilities of prompts: an engine's, and transformers'."""

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


@torch.no_grad()
def assert_prompt_logprobs(llm: LLM, model: Any, prompt: list[int], **options: Any) -> None:
    """Check the log-probabilities of a prompt's tokens against transformers' model."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False, **options)
    actual = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
    torch.testing.assert_close(torch.tensor(actual), expected, rtol=1e-4, atol=1e-4)
