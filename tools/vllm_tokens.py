"""vLLM on one checkpoint in bf16, as a process that answers lines of JSON with seconds.

    python tools/vllm_tokens.py FOLDER

Each line of standard input has `prompts`, lists of token ids of one length, and `new_tokens`; the answer has the
`seconds` up to the first tokens and `step_seconds` behind them, per token, all rows together. Decoding is greedy. A
step's time is the difference of a whole answer and of one that ends with its first tokens. It imports vllm, and nothing
of this project.
"""

import json
import os
import sys
import time

MOST_TOKENS, MOST_ROWS = 4096, 32


def main(folder: str) -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM says is no answer
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype="bfloat16",
        max_model_len=MOST_TOKENS,
        max_num_seqs=MOST_ROWS,
        max_num_batched_tokens=MOST_TOKENS,
        enable_prefix_caching=False,
    )

    def seconds(prompts: list[list[int]], new_tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return time.perf_counter() - began

    for line in sys.stdin:
        asked = json.loads(line)
        first, new_tokens = seconds(asked["prompts"], 1), asked["new_tokens"]
        behind = seconds(asked["prompts"], new_tokens) - first if new_tokens > 1 else 0.0
        print(json.dumps({"seconds": first, "step_seconds": behind / max(new_tokens - 1, 1)}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
