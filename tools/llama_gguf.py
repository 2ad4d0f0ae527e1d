"""llama.cpp through llama-cpp-python on one GGUF file, as a process that answers lines of JSON with seconds.

    python tools/llama_gguf.py FILE.gguf THREADS [plain]

Each line of standard input has `prompts`, lists of token ids of one length, and `new_tokens`; the answer has the
`seconds` up to the first tokens and `step_seconds` behind them, per token, all rows together. Decoding is greedy. With
`plain` the weights stay as the file has them: for processors on which llama.cpp's repacked ones crash. It imports
llama_cpp and NumPy, and nothing of this project.
"""

import json
import sys
import time
from typing import Any

import numpy as np


class Sequences:
    """A context for some sequences.

    Args:
        api: llama_cpp.
        model: loaded.
        count: of the sequences.
        length: that each may have.
        threads: to use.
    """

    def __init__(self, api: Any, model: Any, count: int, length: int, threads: int) -> None:
        self._api, self._count = api, count
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = count * length, count
        params.n_threads = params.n_threads_batch = threads
        self._context = api.llama_init_from_model(model, params)
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def decode(self, tokens: np.ndarray, position: int) -> np.ndarray:
        """Append tokens [sequences, new] from a position on, and return the greedy next ones."""
        total = tokens.size
        batch = self._api.llama_batch_init(total, 0, 1)
        batch.n_tokens = total
        for index in range(total):
            sequence, place = divmod(index, tokens.shape[1])
            batch.token[index], batch.pos[index] = int(tokens[sequence, place]), position + place
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = place == tokens.shape[1] - 1
        status = self._api.llama_decode(self._context, batch)
        self._api.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode gives {status}")
        logits = np.ctypeslib.as_array(self._api.llama_get_logits(self._context), (self._count, self._vocab_size))
        return logits.argmax(axis=1)

    def timed(self, prompts: np.ndarray, new_tokens: int) -> dict[str, float]:
        """Return the seconds of a greedy answer."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)
        began = time.perf_counter()
        tokens = self.decode(prompts, 0)
        first = time.perf_counter()
        for step in range(new_tokens - 1):
            tokens = self.decode(tokens[:, None], prompts.shape[1] + step)
        steps = max(new_tokens - 1, 1)
        return {"seconds": first - began, "step_seconds": (time.perf_counter() - first) / steps}

    def close(self) -> None:
        """Free it."""
        self._api.llama_free(self._context)


def main(file: str, threads: int, plain: str = "") -> None:
    """Answer until standard input ends."""
    import llama_cpp as api

    quiet = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(quiet, None)
    api.llama_backend_init()
    params = api.llama_model_default_params()
    params.use_extra_bufts = not plain
    model = api.llama_model_load_from_file(file.encode(), params)
    contexts: dict[tuple[int, int], Sequences] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = np.array(asked["prompts"])
        key = (len(prompts), prompts.shape[1] + asked["new_tokens"])
        if key not in contexts:
            contexts[key] = Sequences(api, model, *key, threads)
        print(json.dumps(contexts[key].timed(prompts, asked["new_tokens"])), flush=True)
    for context in contexts.values():
        context.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
