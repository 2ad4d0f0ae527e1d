"""transformers' `generate`: with the cache it takes by default, with a static one, and with that one compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from peers.peer import Peer, Tokens, Workload


class Transformers(Peer):
    """`generate` with the dynamic cache, which is what a person gets who sets nothing."""

    name = "transformers"
    requires: ClassVar = {"transformers": "transformers"}
    cache: str | None = None
    compiled = False

    def open(self, folder: Path, workload: Workload) -> None:
        """Load the checkpoint; what is compiled, is compiled by the first call of each shape."""
        from transformers import AutoModelForCausalLM

        self._device = workload.device
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, workload.dtype))
        self._model = model.to(workload.device).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        if self.compiled and workload.device == "cpu":
            # `generate` compiles a static cache's step by itself, but not on a CPU; a graph that would be broken, or
            # left to the interpreter after too many shapes, has to fail here rather than be slow
            self._model.forward = torch.compile(self._model.forward, fullgraph=True, dynamic=False)

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        """Return greedy tokens."""
        ids = torch.tensor(prompts, device=self._device)
        with torch.no_grad():
            result = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                cache_implementation=self.cache,
                disable_compile=not self.compiled,
            )
        return result[:, ids.shape[1] :].tolist()

    def close(self) -> None:
        """Drop the weights."""
        del self._model


class TransformersStatic(Transformers):
    """`generate` with a static cache, and nothing compiled."""

    name = "transformers-static"
    cache = "static"


class TransformersCompiled(Transformers):
    """`generate` with a static cache and the forward pass through `torch.compile`."""

    name = "transformers-compiled"
    cache = "static"
    compiled = True
