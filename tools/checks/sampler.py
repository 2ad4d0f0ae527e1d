"""Compares the sampler's interpreted kernels with the torch version: tokens must be the same.

Rows have every kind of logits (flat, sharp, tied, huge, infinite, NaN) and of sampling parameters, over a vocabulary of
several blocks, with candidate lists that are long enough or too short.
"""

from __future__ import annotations

import time
from typing import Annotated

import torch
import typer
from hostile_rows import hostile_rows, quick_interpreter
from sampling_rows import ended_step

from graphdecode.kernels.native.registration import versions

ROWS = 50


def main(
    rows: Annotated[int, typer.Option(help="That are compared.", min=1)] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the first batch.")] = 0,
) -> None:
    torch.set_num_threads(1)
    began, different, done = time.perf_counter(), 0, 0
    with quick_interpreter():
        for batch in range(seed, seed + -(-rows // ROWS)):
            logits, positions, slots, counts, recent, sizes = hostile_rows(ROWS, batch)
            live = torch.tensor([ROWS - 1], dtype=torch.int32)
            expected = torch.zeros(ROWS, dtype=torch.int64)
            versions("sample").torch(expected, logits, positions, live, *slots, counts, recent)
            found = ended_step(logits, positions, live, slots, counts, recent, *sizes)
            wrong = (expected != found).nonzero().flatten().tolist()
            different, done = different + len(wrong), done + ROWS
            for row in wrong:
                print(f"seed {batch} row {row}: {found[row]} instead of {expected[row]}", flush=True)
    print(f"{done} rows, {different} different, {time.perf_counter() - began:.0f} s")
    raise typer.Exit(different > 0)
