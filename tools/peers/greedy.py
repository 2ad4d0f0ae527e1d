"""Whether tokens are the greedy ones: by the logits of a reference in float32, not by whom they agree with.

Two correct engines may differ: where two logits lie closer together than their rounding, either token is right, and all
that follows differs. So an answer is judged token by token, given the tokens before it: by how far the logit of the
token that was chosen lies below the largest one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from peers.peer import Tokens, Workload

TOLERANCE = {"float32": 0.005, "float16": 0.05, "bfloat16": 0.25}
"""What rounding may cost, in standard deviations of the logits; another model's tokens lie whole deviations below."""


class Reference:
    """The checkpoint in transformers: its weights rounded to the workload's dtype, its arithmetic in float32."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, workload.dtype))
        self._model = model.float().to(workload.device).eval()
        self._device = workload.device
        self.tolerance = TOLERANCE[workload.dtype]
        self.vocab_size: int = model.config.vocab_size

    def judge(self, prompts: Tokens, answers: Tokens, new_tokens: int) -> tuple[float | None, str]:
        """Return how far an engine's answers fall short of the greedy ones, and what is wrong with them.

        Args:
            prompts: token ids.
            answers: token ids that the engine chose after each of them.
            new_tokens: that each answer should have.

        Returns:
            How far, at worst, a chosen token's logit lies below the best one, in standard deviations of the logits
            (None where it cannot be said), and what is wrong, for people; "" when all are greedy up to rounding.
        """
        lengths = [len(answer) for answer in answers]
        if lengths != [new_tokens] * len(prompts):
            return None, f"gives {lengths} tokens, not {new_tokens} for each of {len(prompts)} prompts"
        if not all(0 <= token < self.vocab_size for answer in answers for token in answer):
            return None, f"gives tokens outside the vocabulary of {self.vocab_size}"
        shortfall = max(self._row_shortfall(*row) for row in zip(prompts, answers, strict=True))
        if shortfall <= self.tolerance:
            return shortfall, ""
        return shortfall, (
            f"gives other tokens: at worst {shortfall:.2g} standard deviations of the logits below the best, "
            f"tolerance {self.tolerance:g}"
        )

    def _row_shortfall(self, prompt: list[int], answer: list[int]) -> float:
        ids = torch.tensor([[*prompt, *answer]], device=self._device)
        with torch.no_grad():
            logits = self._model(ids).logits[0, len(prompt) - 1 : -1].double()  # [len(answer), vocab_size]
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        return ((logits.amax(1) - chosen) / logits.std(1)).max().item()
