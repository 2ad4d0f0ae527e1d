"""The speed of GGUF files whose blocks are multiplied as they are, in turns: undone to bf16, as they are, llama.cpp.

    python tools/bench_gguf.py smollm2 --llama-python ENV/bin/python --out FILE

Each turn is one prompt of 1,024 tokens up to its first token, then greedy steps of 1 and 8 rows behind prompts of 32.
llama.cpp runs in another environment's Python on the same file, with as many threads. A step stands beside the time in
which its weights are read at the bandwidth that is measured in the same run.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from graphdecode import LLM, SamplingParams
from graphdecode.models import resolve_model_path
from graphdecode.profiling.bandwidth import read_bandwidth
from graphdecode.profiling.environment import describe_environment

LLAMA = Path(__file__).parent / "llama_gguf.py"
PROMPT_TOKENS, SHORT_TOKENS, NEW_TOKENS = 1024, 32, 33
WORKLOADS = {
    "prompt": (1, PROMPT_TOKENS, 1),
    "batch_1": (1, SHORT_TOKENS, NEW_TOKENS),
    "batch_8": (8, SHORT_TOKENS, NEW_TOKENS),
}
Turn = Callable[[list[list[int]], int], dict[str, float]]


def ours(model: Path, quantize: str | None) -> LLM:
    """Return an engine with a step for each number of rows; no tokenizer, for prompts are tokens."""
    return LLM(
        model,
        dtype="bfloat16",
        device="cpu",
        quantize=quantize,
        batch_sizes=[1, 8],
        max_batch_size=8,
        max_sequence_length=PROMPT_TOKENS + NEW_TOKENS,
        prefix_cache=False,
        skip_tokenizer_init=True,
    )


def timed(llm: LLM, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    """Return the seconds up to the last first token, and those of a step behind it."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    metrics = [output.metrics for output in outputs]
    first = max(each.first_token_time for each in metrics)
    begun = min(each.arrival_time for each in metrics)
    finished = max(each.finished_time for each in metrics)
    return {"seconds": first - begun, "step_seconds": (finished - first) / max(new_tokens - 1, 1)}


class Elsewhere:
    """A peer in a process of its own, which answers lines of JSON: see `llama_gguf.py`.

    Args:
        command: starts it.
    """

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def timed(self, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
        """Return the seconds of a turn."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process has no pipes")
        print(json.dumps({"prompts": prompts, "new_tokens": new_tokens}), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def measure(
    engines: dict[str, Turn], workloads: dict[str, tuple[int, int, int]], rounds: int, vocab_size: int
) -> dict[str, Any]:
    """Let the engines take turns, and return milliseconds by workload and engine: the median turn, and all of them.

    Args:
        engines: by name.
        workloads: rows, tokens of a prompt and new ones, by name; of one new token, the time up to it is taken.
        rounds: turns of each that count.
        vocab_size: of the model.
    """
    rng = random.Random(7)
    found: dict[str, Any] = {}
    for name, (rows, length, new_tokens) in workloads.items():
        prompts = [[rng.randrange(10, vocab_size - 10) for _ in range(length)] for _ in range(rows)]
        turns: dict[str, list[float]] = {engine: [] for engine in engines}
        for turn in range(rounds + 1):  # the first does not count
            for engine, timed_by in engines.items():
                seconds = timed_by(prompts, new_tokens)["seconds" if new_tokens == 1 else "step_seconds"]
                turns[engine] += [round(seconds * 1e3, 3)] * (turn > 0)
        found[name] = {engine: {"ms": statistics.median(each), "turns_ms": each} for engine, each in turns.items()}
    return found


def main(
    model: Annotated[str, typer.Argument(help="A .gguf file, or a name that leads to one.")] = "smollm2",
    llama_python: Annotated[Path | None, typer.Option(help="The interpreter that has llama-cpp-python.")] = None,
    plain_llama: Annotated[bool, typer.Option(help="Do not let llama.cpp repack its weights.")] = False,
    undone: Annotated[bool, typer.Option(help="Measure the weights undone to bf16, too.")] = True,
    rounds: Annotated[int, typer.Option(help="Turns of each that count.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
) -> None:
    """Compare the speed of a GGUF file's blocks with that of the undone weights and of llama.cpp."""
    file = resolve_model_path(model)
    blocks = ours(file, "gguf")
    engines: dict[str, Turn] = {"blocks": lambda prompts, count: timed(blocks, prompts, count)}
    if undone:
        plain = ours(file, None)
        engines["undone"] = lambda prompts, count: timed(plain, prompts, count)
    llama = None
    if llama_python is not None:
        command = [str(llama_python), str(LLAMA), str(file), str(torch.get_num_threads())]
        llama = Elsewhere(command + ["plain"] * plain_llama)
        engines["llama_cpp"] = llama.timed
    bandwidth = read_bandwidth("cpu")
    workloads = measure(engines, WORKLOADS, rounds, blocks.model.config.vocab_size)
    if llama is not None:
        llama.close()
    weight_bytes = blocks.model.weight_bytes
    floor_ms = weight_bytes / bandwidth * 1e3
    result = {
        "schema": 1,
        "environment": describe_environment(torch.device("cpu")),
        "file": file.name,
        "file_bytes": file.stat().st_size,
        "weight_bytes": weight_bytes,
        "read_bytes_per_second": round(bandwidth),
        "floor_ms": round(floor_ms, 3),
        "times_floor": round(workloads["batch_1"]["blocks"]["ms"] / floor_ms, 3),
        "workloads": workloads,
    }
    for name, found in workloads.items():
        print(f"{name:8}", "  ".join(f"{engine} {each['ms']:.2f} ms" for engine, each in found.items()))
    print(f"floor    {floor_ms:.2f} ms, a step of one row takes {result['times_floor']} times that")
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
