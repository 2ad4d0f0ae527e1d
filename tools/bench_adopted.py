"""A step of transformers' own modules in graphdecode's graphs, beside the same modules' `generate`, on a CPU.

    python tools/bench_adopted.py                           nine architectures of 20 million parameters, batch 1 and 8
    python tools/bench_adopted.py --architectures gpt2,opt --repeats 5

Both take turns in one run (A B A B ...), on one thread. A step's time is that of the processor: on a machine that
others use too, it says what a step costs where a clock says how long it had to wait.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from adopted_models import ADOPTED, SMALL, save_random
from graphdecode.profiling.environment import describe_environment
from peers.own import Graphdecode
from peers.peer import Peer, Tokens, Workload
from peers.transformers_generate import Transformers

PROMPT_TOKENS = 32
_FIRST_TOKEN = 3


def cpu_ms_per_step(engine: Peer, prompts: Tokens, new_tokens: int) -> float:
    """Return what a decode step costs: a long answer less a short one, so that prefill does not count."""
    began = time.process_time()
    engine.generate(prompts, 1)
    middle = time.process_time()
    engine.generate(prompts, new_tokens + 1)
    return 1000 * (time.process_time() - middle - (middle - began)) / new_tokens


def measure(name: str, folder: Path, workload: Workload, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each batch size: turns and medians of both, and whether their tokens are the same."""
    save_random(ADOPTED[name](SMALL), folder)
    engines: tuple[Peer, ...] = (Graphdecode(), Transformers())
    rows = []
    for engine in engines:
        engine.open(folder, workload)
    for size in workload.batch_sizes:
        generator = torch.Generator().manual_seed(size)
        shape = (size, workload.prompt_tokens)
        prompts = torch.randint(_FIRST_TOKEN, SMALL.vocab_size, shape, generator=generator).tolist()
        own, other = ([list(answer) for answer in engine.generate(prompts, workload.new_tokens)] for engine in engines)
        turns: dict[str, list[float]] = {engine.name: [] for engine in engines}
        for _ in range(repeats):
            for engine in engines:
                turns[engine.name].append(cpu_ms_per_step(engine, prompts, workload.new_tokens))
        medians = {engine: statistics.median(each) for engine, each in turns.items()}
        rows.append(
            {
                "architecture": name,
                "batch_size": size,
                "cpu_ms_per_step": medians,
                "turns_cpu_ms": turns,
                "times_faster_than": {"transformers": medians["transformers"] / medians["graphdecode"]},
                "same_tokens": own == other,
            }
        )
    for engine in engines:
        engine.close()
    return rows


def main(
    architectures: Annotated[str, typer.Option(help=f"Of {', '.join(ADOPTED)}; by commas.")] = ",".join(ADOPTED),
    batch_sizes: Annotated[str, typer.Option(help="Separated by commas.")] = "1,8",
    new_tokens: Annotated[int, typer.Option(help="Decode steps of one measurement.")] = 16,
    repeats: Annotated[int, typer.Option(help="Turns of each engine.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.", dir_okay=False)] = None,
) -> None:
    """Compare captured modules with `generate`."""
    names = architectures.split(",")
    unknown = [name for name in names if name not in ADOPTED]
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}", param_hint="--architectures")
    disable_progress_bar()
    torch.set_num_threads(1)
    sizes = tuple(int(size) for size in batch_sizes.split(","))
    workload = Workload("cpu", "float32", sizes, PROMPT_TOKENS, new_tokens, 1)
    environment = describe_environment("cpu")
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            rows += measure(name, Path(scratch), workload, repeats)
    table = Table("architecture", "batch", "graphdecode ms", "generate ms", "times faster", "same tokens")
    for row in rows:
        ms = row["cpu_ms_per_step"]
        figures = (
            f"{ms['graphdecode']:.2f}",
            f"{ms['transformers']:.2f}",
            f"{ms['transformers'] / ms['graphdecode']:.2f}",
        )
        table.add_row(row["architecture"], str(row["batch_size"]), *figures, "yes" if row["same_tokens"] else "no")
    Console(width=100).print(table)
    if out is not None:
        record = {"schema": 1, "dtype": "float32", "threads": 1, "environment": environment, "rows": rows}
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
