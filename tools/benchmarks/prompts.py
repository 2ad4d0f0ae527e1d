"""The speed of bf16 weights on a CPU: prompts and steps, in turns with peers, beside the processor's peak.

Each turn is one prompt of 1,024 or 3,900 tokens up to its first token, or greedy steps of 1 or 32 rows behind prompts
of 32. vLLM runs in another environment's Python with as many threads, transformers in this process. The peaks are those
of the bf16 dot instructions, from registers, on as many threads; the floor of a step is the time in which its weights
are read at the bandwidth that is measured in the same run. Behind long contexts steps of 1 and 8 rows stand beside the
time in which their weights, keys and values are read.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.gguf import Turn, by_process, engine_of, floor_of, measure, random_tokens, timed
from graphdecode.kernels.native.compiler import Compiler
from graphdecode.profiling.environment import read_bandwidth
from harness import Answering, Out, Rounds, elsewhere, record, seconds_of, write
from peers.peer import Workload
from peers.transformers_generate import Transformers

PROMPTS = {"prompt_1024": (1, 1024, 1), "prompt_3900": (1, 3900, 1)}
STEPS = {"batch_1": (1, 32, 33), "batch_32": (32, 32, 33)}
LONG_ROWS, LONG_TOKENS, LONG_STEPS = (1, 8), 8100, 65


def dot_peaks(threads: int) -> dict[str, float]:
    """Return the operations a second of AVX-512's pairs and of AMX's tiles of bf16; 0 where there are none."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "dot_peak.so"
        Compiler.found().compile({made: Path(__file__).with_name("dot_peak.c").read_text()}, [])
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
        llm = engine_of(folder, [rows], LONG_TOKENS + LONG_STEPS)
        config = llm.model.config
        of_token = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        nbytes = llm.model.weight_bytes + rows * (LONG_TOKENS + LONG_STEPS // 2) * of_token
        prompts = random_tokens(random.Random(rows), rows, LONG_TOKENS, config.vocab_size)
        turns, floors = [], []
        for _ in range(rounds + 1):  # after the first one prompts are found in the cache
            floors.append(nbytes / read_bandwidth("cpu") * 1e3)
            turns.append(timed(llm, prompts, LONG_STEPS)["step_seconds"] * 1e3)
        llm.close()
        step, floor = statistics.median(turns[1:]), statistics.median(floors[1:])
        over = statistics.median(turn / floor for turn, floor in zip(turns[1:], floors[1:], strict=True))
        found[f"batch_{rows}"] = {"ms": round(step, 3), "floor_ms": round(floor, 3), "times_floor": round(over, 3)}
        print(f"batch {rows} behind {LONG_TOKENS} tokens {step:.2f} ms, {over:.3f} times its floor")
    return found


def by_transformers(folder: Path) -> Turn:
    peer = Transformers()
    peer.open(folder, Workload("cpu", "bfloat16", (1, 32), 4096, 33, torch.get_num_threads()))

    def turn(prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
        first = seconds_of(lambda: peer.generate(prompts, 1))
        behind = seconds_of(lambda: peer.generate(prompts, new_tokens)) - first if new_tokens > 1 else 0.0
        return {"seconds": first, "step_seconds": behind / max(new_tokens - 1, 1)}

    return turn


def main(
    folder: Annotated[Path, typer.Argument(help="A checkpoint.")],
    vllm_python: Annotated[Path | None, typer.Option(help="The interpreter that has vLLM.")] = None,
    with_transformers: Annotated[bool, typer.Option(help="Measure transformers, too.")] = True,
    rounds: Rounds = 5,
    out: Out = None,
) -> None:
    vllm = None if vllm_python is None else Answering(elsewhere(vllm_python, "vllm-tokens", folder))
    llm = engine_of(folder, [1, 32], 4096, prefix_cache=False)
    engines: dict[str, Turn] = {"graphdecode": partial(timed, llm)}
    if with_transformers:
        engines["transformers"] = by_transformers(folder)
    if vllm is not None:
        engines["vllm"] = by_process(vllm)
    workloads = measure(engines, PROMPTS | STEPS, rounds, llm.model.config.vocab_size)
    if vllm is not None:
        vllm.close()
    llm.close()
    peaks = dot_peaks(torch.get_num_threads())
    print("peaks       ", "  ".join(f"{name} {peak / 1e12:.2f} T/s" for name, peak in peaks.items()))
    for name, (_, tokens, _) in PROMPTS.items():
        operations = prompt_operations(llm.model, tokens)
        for figures in workloads[name].values():
            rate = operations / (figures["ms"] * 1e-3)
            figures["operations_per_second"] = round(rate)
            figures["of_peak"] = {peak: round(rate / most, 3) for peak, most in peaks.items() if most}
    result = record(schema=1, dtype="bfloat16", workloads=workloads)
    result |= floor_of(llm.model.weight_bytes, workloads["batch_1"]["graphdecode"]["ms"])
    result["peaks"] = {name: round(peak) for name, peak in peaks.items()}
    result["long_contexts"] = long_contexts(folder, rounds)
    write(out, result)
