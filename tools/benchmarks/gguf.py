"""The speed of GGUF files whose blocks are multiplied as they are, in turns: undone to bf16, as they are, llama.cpp.

Each turn is one prompt of 1,024 tokens up to its first token, then greedy steps of 1 and 8 rows behind prompts of 32.
llama.cpp runs in another environment's Python on the same file, with as many threads. A step stands beside the time in
which its weights are read at the bandwidth that is measured in the same run.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from graphdecode import LLM, SamplingParams
from graphdecode.models import resolve_model_path
from graphdecode.profiling.environment import read_bandwidth
from harness import Answering, LlamaPython, Out, Rounds, elsewhere, in_turn, moments, record, write

PROMPT_TOKENS, SHORT_TOKENS, NEW_TOKENS = 1024, 32, 33
WORKLOADS = {
    "prompt": (1, PROMPT_TOKENS, 1),
    "batch_1": (1, SHORT_TOKENS, NEW_TOKENS),
    "batch_8": (8, SHORT_TOKENS, NEW_TOKENS),
}
Turn = Callable[[list[list[int]], int], dict[str, float]]


def engine_of(model: Path, batch_sizes: list[int], max_sequence_length: int, **options: Any) -> LLM:
    """Return an engine in bf16 with a step for each number of rows; no tokenizer, for prompts are tokens."""
    return LLM(
        model,
        dtype="bfloat16",
        device="cpu",
        batch_sizes=batch_sizes,
        max_batch_size=max(batch_sizes),
        max_sequence_length=max_sequence_length,
        skip_tokenizer_init=True,
        **options,
    )


def timed(llm: LLM, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    """Return the seconds up to the last first token, and those of a step behind it."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    began, first, ended = moments(outputs)
    return {"seconds": first - began, "step_seconds": (ended - first) / max(new_tokens - 1, 1)}


def by_process(process: Answering) -> Turn:
    return lambda prompts, new_tokens: process.ask({"prompts": prompts, "new_tokens": new_tokens})


def random_tokens(rng: random.Random, rows: int, length: int, vocab_size: int) -> list[list[int]]:
    return [[rng.randrange(10, vocab_size - 10) for _ in range(length)] for _ in range(rows)]


def measure(
    engines: dict[str, Turn], workloads: dict[str, tuple[int, int, int]], rounds: int, vocab_size: int
) -> dict[str, Any]:
    """Let the engines take turns, and return milliseconds by workload and engine: the median turn, and all of them.

    Args:
        engines: by name.
        workloads: rows, tokens of a prompt and new ones, by name; of one new token, the time up to it is taken.
        rounds: turns of each that count; one before them does not.
        vocab_size: of the model.
    """
    rng = random.Random(7)
    found: dict[str, Any] = {}
    for name, (rows, length, new_tokens) in workloads.items():
        prompts = random_tokens(rng, rows, length, vocab_size)
        kind = "seconds" if new_tokens == 1 else "step_seconds"
        seconds = in_turn({name: partial(turn, prompts, new_tokens) for name, turn in engines.items()}, rounds, warm=1)
        turns = {engine: [round(1e3 * turn[kind], 3) for turn in each] for engine, each in seconds.items()}
        found[name] = {engine: {"ms": statistics.median(each), "turns_ms": each} for engine, each in turns.items()}
        print(f"{name:12}", "  ".join(f"{engine} {each['ms']:.2f} ms" for engine, each in found[name].items()))
    return found


def floor_of(weight_bytes: int, step_ms: float) -> dict[str, Any]:
    """Return what a step reads, how fast that is to be had now, and how many times so long a step of one row takes."""
    bandwidth = read_bandwidth("cpu")
    floor_ms = weight_bytes / bandwidth * 1e3
    times = round(step_ms / floor_ms, 3)
    print(f"floor        {floor_ms:.2f} ms, a step of one row takes {times} times that")
    facts = {"weight_bytes": weight_bytes, "read_bytes_per_second": round(bandwidth)}
    return facts | {"floor_ms": round(floor_ms, 3), "times_floor": times}


def main(
    model: Annotated[str, typer.Argument(help="A .gguf file, or a name that leads to one.")] = "smollm2",
    llama_python: LlamaPython = None,
    plain_llama: Annotated[bool, typer.Option(help="Do not let llama.cpp repack its weights.")] = False,
    undone: Annotated[bool, typer.Option(help="Measure the weights undone to bf16, too.")] = True,
    rounds: Rounds = 5,
    out: Out = None,
) -> None:
    file = resolve_model_path(model)
    of_file = partial(engine_of, file, [1, 8], PROMPT_TOKENS + NEW_TOKENS, prefix_cache=False)
    blocks = of_file(quantize="gguf")
    engines: dict[str, Turn] = {"blocks": partial(timed, blocks)}
    if undone:
        engines["undone"] = partial(timed, of_file(quantize=None))
    llama = None
    if llama_python is not None:
        plain = ["plain"] * plain_llama
        llama = Answering(elsewhere(llama_python, "llama-gguf", file, torch.get_num_threads(), *plain))
        engines["llama_cpp"] = by_process(llama)
    workloads = measure(engines, WORKLOADS, rounds, blocks.model.config.vocab_size)
    if llama is not None:
        llama.close()
    result = record(schema=1, file=file.name, file_bytes=file.stat().st_size, workloads=workloads)
    write(out, result | floor_of(blocks.model.weight_bytes, workloads["batch_1"]["blocks"]["ms"]))
