"""llama.cpp through llama-cpp-python, on a CPU: the same weights, one sequence of a batch for each row."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

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
        import llama_cpp

        self._api, self._workload = llama_cpp, workload
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        self._scratch = tempfile.TemporaryDirectory()
        file = Path(self._scratch.name) / "model.gguf"
        write_gguf(folder, file, workload.dtype)
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
        if not self._model:
            raise RuntimeError("llama.cpp does not load the GGUF file that was written from the checkpoint")
        vocab_size = describe_model(folder).vocab_size
        self._contexts = {
            size: _Context(llama_cpp, self._model, size, vocab_size, workload) for size in workload.batch_sizes
        }

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        """Return greedy tokens."""
        return self._contexts[len(prompts)].generate(prompts, new_tokens)

    def close(self) -> None:
        """Free contexts, model and file."""
        for context in self._contexts.values():
            context.free()
        self._api.llama_model_free(self._model)
        self._scratch.cleanup()


class _Context:
    """A cache for the sequences of one batch size, with the batch of a prefill and that of a step."""

    def __init__(self, api: Any, model: Any, batch_size: int, vocab_size: int, workload: Workload) -> None:
        self._api = api
        params = api.llama_context_default_params()
        params.n_ctx = batch_size * workload.capacity
        params.n_seq_max = batch_size
        params.n_batch = params.n_ubatch = batch_size * workload.prompt_tokens
        params.n_threads = params.n_threads_batch = workload.threads
        params.type_k = params.type_v = gguf_type(workload.dtype)
        self._context = api.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context for {batch_size} sequences of {workload.capacity} tokens")
        self._memory = api.llama_get_memory(self._context)
        self._prefill = _Batch(api, batch_size, workload.prompt_tokens, vocab_size)
        self._step = _Batch(api, batch_size, 1, vocab_size)

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        """Return greedy tokens: the prompts in one call, then one call for each further token."""
        self._api.llama_memory_clear(self._memory, False)
        answers = np.empty((len(prompts), new_tokens), dtype=np.int64)
        answers[:, 0] = self._prefill.decode(self._context, np.array(prompts), 0)
        for step in range(1, new_tokens):
            position = len(prompts[0]) + step - 1
            answers[:, step] = self._step.decode(self._context, answers[:, step - 1 : step], position)
        return answers.tolist()

    def free(self) -> None:
        """Free the batches and the cache."""
        self._prefill.free()
        self._step.free()
        self._api.llama_free(self._context)


class _Batch:
    """The next tokens of each sequence, in llama.cpp's own memory; logits are asked for after the last of each."""

    def __init__(self, api: Any, batch_size: int, tokens_each: int, vocab_size: int) -> None:
        self._api = api
        self._shape = (batch_size, tokens_each)
        self._logits_shape = (batch_size, vocab_size)
        total = batch_size * tokens_each
        self._batch = api.llama_batch_init(total, 0, 1)
        self._batch.n_tokens = total
        self._tokens = np.ctypeslib.as_array(self._batch.token, (total,)).reshape(self._shape)
        self._positions = np.ctypeslib.as_array(self._batch.pos, (total,)).reshape(self._shape)
        for index in range(total):
            self._batch.n_seq_id[index] = 1
            self._batch.seq_id[index][0] = index // tokens_each
            self._batch.logits[index] = index % tokens_each == tokens_each - 1

    def decode(self, context: Any, tokens: np.ndarray, first_position: int) -> np.ndarray:
        """Append tokens [batch_size, tokens_each] from a position on, and return the greedy ones [batch_size]."""
        self._tokens[:] = tokens
        self._positions[:] = first_position + np.arange(self._shape[1])
        status = self._api.llama_decode(context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode gives {status}")
        logits = np.ctypeslib.as_array(self._api.llama_get_logits(context), self._logits_shape)
        return logits.argmax(axis=1)

    def free(self) -> None:
        """Free the memory that the arrays are views of."""
        self._api.llama_batch_free(self._batch)
