"""llama.cpp through llama-cpp-python with its prompt lookup, as a process that answers lines of JSON.

    python tools/llama_lookup.py FILE.gguf DRAFTS THREADS [plain]

Each line of standard input has `prompts`, lists of token ids, and `new_tokens`; the answer has the greedy `tokens` of
each, and `tokens_per_second` behind the first token, over all. With `plain` the weights stay as the file has them: for
processors on which llama.cpp's repacked ones crash. It imports llama_cpp and nothing of this project.
"""

import json
import sys
import time
from typing import Any


def answered(llama: Any, prompt: list[int], new_tokens: int) -> tuple[list[int], float]:
    """Return the tokens of one answer, and the seconds behind the first."""
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


def main(file: str, drafts: int, threads: int, plain: str = "") -> None:
    """Answer until standard input ends."""
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    if plain:
        defaults = llama_cpp.llama_cpp.llama_model_default_params

        def without_repacking() -> Any:
            params = defaults()
            params.use_extra_bufts = False
            return params

        llama_cpp.llama_cpp.llama_model_default_params = without_repacking
    draft = LlamaPromptLookupDecoding(num_pred_tokens=drafts) if drafts else None
    llama = llama_cpp.Llama(
        file, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False, draft_model=draft
    )
    for line in sys.stdin:
        asked = json.loads(line)
        answers = [answered(llama, prompt, asked["new_tokens"]) for prompt in asked["prompts"]]
        tokens, seconds = [found for found, _ in answers], sum(each for _, each in answers)
        speed = sum(len(found) - 1 for found in tokens) / seconds
        print(json.dumps({"tokens": tokens, "tokens_per_second": speed}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
