"""A step of transformers' own modules in graphdecode's graphs, beside the same modules' `generate`, on a CPU.

Nine architectures of 20 million parameters without a family. Both take turns, on one thread. A step's time is that of
the processor: on a machine that others use too, it says what a step costs where a clock says how long it had to wait.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers.utils.logging import disable_progress_bar

from adopted_models import ADOPTED, SMALL, save_random
from harness import Out, Rounds, Sizes, in_turn, medians, names, numbers, record, show, step_seconds, write
from peers.peer import Graphdecode, Peer, Workload, random_prompts
from peers.transformers_generate import Transformers

PROMPT_TOKENS = 32


def measure(name: str, folder: Path, workload: Workload, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each batch size: turns and medians of both, and whether their tokens are the same."""
    save_random(ADOPTED[name](SMALL), folder)
    engines: tuple[Peer, ...] = (Graphdecode(), Transformers())
    rows = []
    for engine in engines:
        engine.open(folder, workload)
    for size in workload.batch_sizes:
        prompts = random_prompts(size, workload.prompt_tokens, SMALL.vocab_size)
        answers = [[list(each) for each in engine.generate(prompts, workload.new_tokens)] for engine in engines]

        def cpu_ms(engine: Peer, prompts: list[list[int]] = prompts) -> float:
            return 1000 * step_seconds(partial(engine.generate, prompts), workload.new_tokens, time.process_time)

        turns = in_turn({engine.name: partial(cpu_ms, engine) for engine in engines}, repeats)
        of_step = medians(turns)
        rows.append(
            {
                "architecture": name,
                "batch_size": size,
                "cpu_ms_per_step": of_step,
                "turns_cpu_ms": turns,
                "times_faster_than": {"transformers": of_step["transformers"] / of_step["graphdecode"]},
                "same_tokens": answers[0] == answers[1],
            }
        )
    for engine in engines:
        engine.close()
    return rows


def main(
    architectures: Annotated[str, typer.Option(help="With commas between.")] = ",".join(ADOPTED),
    batch_sizes: Sizes = "1,8",
    new_tokens: Annotated[int, typer.Option(help="Decode steps of one measurement.")] = 16,
    repeats: Rounds = 4,
    out: Out = None,
) -> None:
    chosen = names(architectures, ADOPTED, "--architectures")
    disable_progress_bar()
    torch.set_num_threads(1)
    workload = Workload("cpu", "float32", tuple(numbers(batch_sizes)), PROMPT_TOKENS, new_tokens, 1)
    found = record(schema=1, dtype="float32", threads=1, rows=[])
    for name in chosen:
        with tempfile.TemporaryDirectory() as scratch:
            found["rows"] += measure(name, Path(scratch), workload, repeats)
    columns = {
        "architecture": "{architecture}",
        "batch": "{batch_size}",
        "graphdecode ms": "{cpu_ms_per_step[graphdecode]:.2f}",
        "generate ms": "{cpu_ms_per_step[transformers]:.2f}",
        "times faster": "{times_faster_than[transformers]:.2f}",
        "same tokens": "{same_tokens}",
    }
    show(columns, found["rows"])
    write(out, found)
