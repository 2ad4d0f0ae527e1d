"""llama.cpp through llama-cpp-python, on a CPU: the same weights, one sequence of a batch for each row."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

import numpy as np

from elsewhere import Sequences, llama_cpp_of, llama_model
from graphdecode.models import describe_model
from peers.gguf_file import gguf_type, why_not_gguf, write_gguf
from peers.peer import Peer, Tokens, Workload


class LlamaCpp(Peer):
    """`llama_decode` on batches of token ids, and the largest logit of each row; as many threads as torch has.

    Weights and cache have the workload's dtype. Each batch size has a context of its own, for that many sequences.
    """

    name = "llama-cpp"
    requires: ClassVar = {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}
    devices = ("cpu",)

    def why_not(self, folder: Path, workload: Workload) -> str:
        """Return why not; the checkpoint may be one that is not written as GGUF."""
        return super().why_not(folder, workload) or why_not_gguf(describe_model(folder))

    def open(self, folder: Path, workload: Workload) -> None:
        """Write the checkpoint as GGUF, load it, and make a context for each batch size."""
        self._api = llama_cpp_of()
        self._scratch = tempfile.TemporaryDirectory()
        file = Path(self._scratch.name) / "model.gguf"
        write_gguf(folder, file, workload.dtype)
        self._model = llama_model(self._api, str(file))
        sizes = (workload.capacity, workload.threads, gguf_type(workload.dtype))
        self._contexts = {size: Sequences(self._api, self._model, size, *sizes) for size in workload.batch_sizes}

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        """Return greedy tokens."""
        answers, _ = self._contexts[len(prompts)].answer(np.array(prompts), new_tokens)
        return np.stack(answers, axis=1).tolist()

    def close(self) -> None:
        """Free contexts, model and file."""
        for context in self._contexts.values():
            context.close()
        self._api.llama_model_free(self._model)
        self._scratch.cleanup()
