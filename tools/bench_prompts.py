"""The speed of bf16 weights on a CPU: prompts and steps, in turns with peers, beside the processor's peak.

    python tools/bench_prompts.py FOLDER --vllm-python ENV/bin/python --out FILE

Each turn is one prompt of 1,024 or 3,900 tokens up to its first token, or greedy steps of 1 or 32 rows behind prompts
of 32. vLLM runs in another environment's Python with as many threads, transformers in this process. The peaks are those
of the bf16 dot instructions, from registers, on as many threads; the floor of a step is the time in which its weights
are read at the bandwidth that is measured in the same run. Behind long contexts steps of 1 and 8 rows stand beside the
time in which their weights, keys and values are read.
"""

from __future__ import annotations

import ctypes
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

from bench_gguf import Elsewhere, Turn, measure, timed
from graphdecode import LLM
from graphdecode.kernels.native.compiler import Compiler
from graphdecode.profiling.bandwidth import read_bandwidth
from graphdecode.profiling.environment import describe_environment

HERE = Path(__file__).parent
PROMPTS = {"prompt_1024": (1, 1024, 1), "prompt_3900": (1, 3900, 1)}
STEPS = {"batch_1": (1, 32, 33), "batch_32": (32, 32, 33)}
LONG_ROWS, LONG_TOKENS, LONG_STEPS = (1, 8), 8100, 65


def dot_peaks(threads: int) -> dict[str, float]:
    """Return the operations a second of AVX-512's pairs and of AMX's tiles of bf16; 0 where there are none."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "dot_peak.so"
        Compiler.found().compile((HERE / "dot_peak.c").read_text(), [], made)
        library = ctypes.CDLL(str(made))
    peaks = {}
    for name in ("pair_peak", "tile_peak"):
        function = getattr(library, name)
        function.restype = ctypes.c_double
        peaks[name] = max(function(threads) for _ in range(3))
    return peaks


def prompt_operations(model: Any, tokens: int) -> int:
    """Return the operations of a prompt: its layers' products, attention over what it sees, and one row of logits."""
    config = model.config
    heads, head_dim = config.num_attention_heads, config.head_dim
    head = config.vocab_size * config.hidden_size
    layers = model.weight_bytes // 2 - head  # two bytes a weight; the norms are a thousandth of them
    attention = config.num_hidden_layers * heads * head_dim * tokens * (tokens + 1)
    return 2 * (layers * tokens + attention + head)


def long_contexts(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Return for each number of rows the time of a step behind long prompts, and its floor, in milliseconds."""
    found = {}
    for rows in LONG_ROWS:
        llm = LLM(
            folder,
            dtype="bfloat16",
            device="cpu",
            batch_sizes=[rows],
            max_batch_size=rows,
            max_sequence_length=LONG_TOKENS + LONG_STEPS,
            skip_tokenizer_init=True,
        )
        config, rng = llm.model.config, random.Random(rows)
        of_token = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        read = llm.model.weight_bytes + rows * (LONG_TOKENS + LONG_STEPS // 2) * of_token
        prompts = [[rng.randrange(10, config.vocab_size) for _ in range(LONG_TOKENS)] for _ in range(rows)]
        turns, floors = [], []
        for _ in range(rounds + 1):  # after the first one prompts are found in the cache
            floors.append(read / read_bandwidth("cpu") * 1e3)
            turns.append(timed(llm, prompts, LONG_STEPS)["step_seconds"] * 1e3)
        llm.close()
        step, floor = statistics.median(turns[1:]), statistics.median(floors[1:])
        over = statistics.median(turn / floor for turn, floor in zip(turns[1:], floors[1:], strict=True))
        found[f"batch_{rows}"] = {"ms": round(step, 3), "floor_ms": round(floor, 3), "times_floor": round(over, 3)}
    return found


def by_transformers(folder: Path) -> Turn:
    """Return turns of transformers' `generate`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    def seconds(prompts: list[list[int]], new_tokens: int) -> float:
        began = time.perf_counter()
        model.generate(
            torch.tensor(prompts), min_new_tokens=new_tokens, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
        )
        return time.perf_counter() - began

    def turn(prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
        first = seconds(prompts, 1)
        behind = seconds(prompts, new_tokens) - first if new_tokens > 1 else 0.0
        return {"seconds": first, "step_seconds": behind / max(new_tokens - 1, 1)}

    return turn


def main(
    folder: Annotated[Path, typer.Argument(help="A checkpoint.")],
    vllm_python: Annotated[Path | None, typer.Option(help="The interpreter that has vLLM.")] = None,
    with_transformers: Annotated[bool, typer.Option(help="Measure transformers, too.")] = True,
    rounds: Annotated[int, typer.Option(help="Turns of each that count.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
) -> None:
    """Compare the speed of a checkpoint in bf16 with peers, and with the processor's peaks."""
    threads = torch.get_num_threads()
    vllm = None if vllm_python is None else Elsewhere([str(vllm_python), str(HERE / "vllm_tokens.py"), str(folder)])
    llm = LLM(
        folder,
        dtype="bfloat16",
        device="cpu",
        batch_sizes=[1, 32],
        max_batch_size=32,
        max_sequence_length=4096,
        prefix_cache=False,
        skip_tokenizer_init=True,
    )
    engines: dict[str, Turn] = {"graphdecode": lambda prompts, count: timed(llm, prompts, count)}
    if with_transformers:
        engines["transformers"] = by_transformers(folder)
    if vllm is not None:
        engines["vllm"] = vllm.timed
    workloads = measure(engines, PROMPTS | STEPS, rounds, llm.model.config.vocab_size)
    if vllm is not None:
        vllm.close()
    llm.close()
    peaks, bandwidth = dot_peaks(threads), read_bandwidth("cpu")
    floor_ms = llm.model.weight_bytes / bandwidth * 1e3
    for name, (_, tokens, _) in PROMPTS.items():
        operations = prompt_operations(llm.model, tokens)
        for figures in workloads[name].values():
            rate = operations / (figures["ms"] * 1e-3)
            figures["operations_per_second"] = round(rate)
            figures["of_peak"] = {peak: round(rate / most, 3) for peak, most in peaks.items() if most}
    result = {
        "schema": 1,
        "environment": describe_environment(torch.device("cpu")),
        "dtype": "bfloat16",
        "weight_bytes": llm.model.weight_bytes,
        "read_bytes_per_second": round(bandwidth),
        "floor_ms": round(floor_ms, 3),
        "times_floor": round(workloads["batch_1"]["graphdecode"]["ms"] / floor_ms, 3),
        "peaks": {name: round(peak) for name, peak in peaks.items()},
        "workloads": workloads,
        "long_contexts": long_contexts(folder, rounds),
    }
    for name, found in workloads.items():
        print(f"{name:12}", "  ".join(f"{engine} {each['ms']:.2f} ms" for engine, each in found.items()))
    print(f"floor        {floor_ms:.2f} ms, a step of one row takes {result['times_floor']} times that")
    print("peaks       ", "  ".join(f"{name} {peak / 1e12:.2f} T/s" for name, peak in peaks.items()))
    for name, behind in result["long_contexts"].items():
        print(f"{name:12} behind {LONG_TOKENS} tokens {behind['ms']:.2f} ms, {behind['times_floor']} times its floor")
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
