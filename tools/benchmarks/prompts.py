"""Prompts and decode steps on a CPU, alternating with peers, compared with the machine's limits.

    tools/bench prompts FOLDER --vllm-python PYTHON --out FILE        bf16 weights beside transformers and vLLM
    tools/bench prompts FILE.gguf --llama-python PYTHON --out FILE    GGUF blocks beside bf16 weights and llama.cpp

A round is a prompt up to its first token, or greedy steps after prompts of 32 tokens. Peers in other environments run
with as many threads. The floor of a step is the time to read its weights at the bandwidth measured in the same run. For
a folder, prompts stand beside the peak of the bf16 dot instructions, and steps after 8,100 tokens beside the time to
read weights, keys and values.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from graphdecode import LLM, SamplingParams
from graphdecode.kernels.native.compiler import Compiler
from graphdecode.models import resolve_model_path
from graphdecode.profiling.environment import read_bandwidth
from harness import (
    JsonProcess,
    LlamaPython,
    Out,
    Rounds,
    alternated,
    elsewhere,
    record,
    request_times,
    seconds_of,
    warn_if_slower,
    write,
)
from peers.peer import Transformers, Workload

STEP = (32, 33)  # tokens of the prompt, and new ones
# rows, tokens of a prompt, new tokens; with one new token the prompt is timed, else a step
GGUF_WORKLOADS = {"prompt": (1, 1024, 1), "batch_1": (1, *STEP), "batch_8": (8, *STEP)}
WORKLOADS = {"prompt_1024": (1, 1024, 1), "prompt_3900": (1, 3900, 1), "batch_1": (1, *STEP), "batch_32": (32, *STEP)}
_OF_BF16 = ("pair_peak", "tile_peak")
LONG_ROWS, LONG_TOKENS, LONG_STEPS = (1, 8), 8100, 65
Turn = Callable[[list[list[int]], int], dict[str, float]]


def engine_of(model: Path, batch_sizes: list[int], max_sequence_length: int, **options: Any) -> LLM:
    options |= {"batch_sizes": batch_sizes, "max_batch_size": max(batch_sizes), "skip_tokenizer_init": True}
    return LLM(model, dtype="bfloat16", device="cpu", max_sequence_length=max_sequence_length, **options)


def timed(llm: LLM, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    """Return the seconds up to the last first token, and those of a step after it."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    began, first, ended = request_times(outputs)
    return {"seconds": first - began, "step_seconds": (ended - first) / max(new_tokens - 1, 1)}


def by_transformers(folder: Path) -> Turn:
    peer = Transformers()
    peer.open(folder, Workload("cpu", "bfloat16", (1, 32), 4096, 33, torch.get_num_threads()))

    def turn(prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
        first = seconds_of(lambda: peer.generate(prompts, 1))
        steps = seconds_of(lambda: peer.generate(prompts, new_tokens)) - first if new_tokens > 1 else 0.0
        return {"seconds": first, "step_seconds": steps / max(new_tokens - 1, 1)}

    return turn


@contextmanager
def by_process(command: list[str]) -> Iterator[Turn]:
    process = JsonProcess(command)
    yield lambda prompts, new_tokens: process.ask({"prompts": prompts, "new_tokens": new_tokens})
    process.close()


def random_tokens(rng: random.Random, rows: int, length: int, vocab_size: int) -> list[list[int]]:
    return [[rng.randrange(10, vocab_size - 10) for _ in range(length)] for _ in range(rows)]


def measure(
    engines: dict[str, Turn], workloads: dict[str, tuple[int, int, int]], rounds: int, vocab_size: int
) -> dict[str, Any]:
    """Return milliseconds by workload and engine: the median, and all rounds but the first."""
    rng = random.Random(7)
    found: dict[str, Any] = {}
    for name, (rows, length, new_tokens) in workloads.items():
        prompts = random_tokens(rng, rows, length, vocab_size)
        kind = "seconds" if new_tokens == 1 else "step_seconds"
        seconds = alternated(
            {name: partial(turn, prompts, new_tokens) for name, turn in engines.items()}, rounds, warm=1
        )
        turns = {engine: [round(1e3 * turn[kind], 3) for turn in each] for engine, each in seconds.items()}
        found[name] = {engine: {"ms": statistics.median(each), "turns_ms": each} for engine, each in turns.items()}
        print(f"{name:12}", "  ".join(f"{engine} {each['ms']:.2f} ms" for engine, each in found[name].items()))
    return found


def floor_of(weight_bytes: int, step_ms: float) -> dict[str, Any]:
    """Return the bytes that a step reads, the bandwidth now, and a step of one row over its floor."""
    bandwidth = read_bandwidth("cpu")
    floor_ms = weight_bytes / bandwidth * 1e3
    times = round(step_ms / floor_ms, 3)
    print(f"floor        {floor_ms:.2f} ms, a step of one row takes {times} times that")
    facts = {"weight_bytes": weight_bytes, "read_bytes_per_second": round(bandwidth)}
    return facts | {"floor_ms": round(floor_ms, 3), "times_floor": times}


def measured_peaks(threads: int) -> dict[str, float]:
    """Return the operations per second of each kind of number, bf16 in pairs and in tiles; 0 if not available."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "peaks.so"
        Compiler.detect().compile({made: Path(__file__).with_name("peaks.c").read_text()}, [])
        library = ctypes.CDLL(str(made))
    peaks = {}
    for name in ("float_peak", "half_peak", *_OF_BF16, "byte_peak"):
        function = getattr(library, name)
        function.restype = ctypes.c_double
        peaks[name] = max(function(threads) for _ in range(3))
    return peaks


def beside_peaks(model: Any, workloads: dict[str, Any]) -> dict[str, float]:
    """Return the processor's peaks; give each prompt its operations per second, and its share of those of bf16."""
    config, peaks = model.config, measured_peaks(torch.get_num_threads())
    reached = {name: peaks[name] for name in _OF_BF16 if peaks[name]} or {"float_peak": peaks["float_peak"]}
    print("peaks       ", "  ".join(f"{name} {peak / 1e12:.2f} T/s" for name, peak in peaks.items()))
    head = config.vocab_size * config.hidden_size
    layers = model.weight_bytes // 2 - head  # two bytes a weight; the norms are a thousandth of them
    for name, (_, tokens, new_tokens) in WORKLOADS.items():
        if new_tokens > 1:
            continue
        attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * tokens * (tokens + 1)
        operations = 2 * (layers * tokens + attention + head)
        for figures in workloads[name].values():
            rate = operations / (figures["ms"] * 1e-3)
            figures["operations_per_second"] = round(rate)
            figures["of_peak"] = {peak: round(rate / most, 3) for peak, most in reached.items()}
    return {name: round(peak) for name, peak in peaks.items()}


def long_contexts(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Return the time of a step after long prompts, and its floor, in milliseconds, by number of rows."""
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
        print(f"batch {rows} after {LONG_TOKENS} tokens {step:.2f} ms, {over:.3f} times its floor")
    return found


def figures_of(result: Any) -> dict[str, float]:
    """Return times over their floors, and over those at the processor's peak."""
    found = {"batch_1": result["times_floor"]}
    found |= {f"long contexts, {name}": each["times_floor"] for name, each in result.get("long_contexts", {}).items()}
    for name, engines in result["workloads"].items():
        if shares := engines.get("graphdecode", {}).get("of_peak"):
            found[name] = 1 / max(shares.values())
    return found


def main(
    model: Annotated[str, typer.Argument(help="A checkpoint folder or a .gguf file, or a name that leads to one.")],
    llama_python: LlamaPython = None,
    plain_llama: Annotated[bool, typer.Option(help="Do not let llama.cpp repack its weights.")] = False,
    vllm_python: Annotated[Path | None, typer.Option(help="The interpreter that has vLLM.")] = None,
    beside: Annotated[bool, typer.Option(help="Measure transformers, or of a GGUF file bf16 weights, too.")] = True,
    rounds: Rounds = 5,
    out: Out = None,
) -> None:
    path = resolve_model_path(model)
    is_gguf = path.suffix == ".gguf"
    own, workloads = ("blocks", GGUF_WORKLOADS) if is_gguf else ("graphdecode", WORKLOADS)
    batch_sizes = sorted({rows for rows, _, _ in workloads.values()})
    longest = max(length + new_tokens for _, length, new_tokens in workloads.values())
    of_path = partial(engine_of, path, batch_sizes, longest, prefix_cache=False)
    with ExitStack() as stack:
        llm = stack.enter_context(of_path(quantize="gguf" if is_gguf else None))
        engines: dict[str, Turn] = {own: partial(timed, llm)}
        if beside and is_gguf:
            engines["undone"] = partial(timed, stack.enter_context(of_path(quantize="none")))
        elif beside:
            engines["transformers"] = by_transformers(path)
        if llama_python is not None and is_gguf:
            command = elsewhere(llama_python, "llama-gguf", path, torch.get_num_threads(), *["plain"] * plain_llama)
            engines["llama_cpp"] = stack.enter_context(by_process(command))
        if vllm_python is not None and not is_gguf:
            engines["vllm"] = stack.enter_context(by_process(elsewhere(vllm_python, "vllm-tokens", path)))
        figures = measure(engines, workloads, rounds, llm.model.config.vocab_size)
    result = record(schema=1, workloads=figures) | floor_of(llm.model.weight_bytes, figures["batch_1"][own]["ms"])
    if is_gguf:
        result |= {"file": path.name, "file_bytes": path.stat().st_size}
    else:
        result |= {"dtype": "bfloat16", "peaks": beside_peaks(llm.model, figures)}
        if llm.model.config.max_position_embeddings >= LONG_TOKENS + LONG_STEPS:
            result["long_contexts"] = long_contexts(path, rounds)
    if out is not None:
        warn_if_slower(out.name, result, figures_of)
    write(out, result)
