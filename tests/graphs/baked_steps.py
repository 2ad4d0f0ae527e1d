"""Steps that do something else each time, of which a graph would repeat the first."""

import itertools
import random
import time

import torch
from bad_steps import bad

COUNTER = itertools.count(1)
CONTEXTS = iter(range(1, 100))


@bad("baked-value")
def counter(batch) -> None:
    batch.x.mul_(float(next(COUNTER)))


@bad("baked-value")
def clock(batch) -> None:
    batch.x.add_(time.perf_counter())


@bad("baked-value")
def growing_slice(batch) -> None:
    length = next(CONTEXTS)
    batch.y[:, : length % 8].add_(1.0)


@bad("baked-value")
def branch_on_python_state(batch) -> None:
    if next(COUNTER) % 2:
        batch.x.sin_()
    else:
        batch.x.cos_()


@bad("baked-value")
def loop_of_growing_length(batch) -> None:
    for _ in range(next(CONTEXTS)):
        batch.x.add_(1.0)


@bad("baked-value")
def position_in_arange(batch) -> None:
    start = next(CONTEXTS)
    batch.y.add_(torch.arange(start, start + 8))


@bad("baked-value")
def number_written_by_index(batch) -> None:
    batch.x[0] = float(next(COUNTER))


@bad("baked-value")
def host_random(batch) -> None:
    batch.x.mul_(random.random())


@bad("baked-value")
def fill_value(batch) -> None:
    batch.y.copy_(torch.full((8,), float(next(COUNTER))))


@bad("baked-value")
def chosen_row(batch) -> None:
    batch.y[next(COUNTER) % 4].add_(1.0)


@bad("baked-value")
def chosen_slot(batch) -> None:
    chosen = batch.x if next(COUNTER) % 2 else batch.y
    chosen.add_(1.0)


@bad("baked-value")
def skipped_step(batch) -> None:
    if next(COUNTER) % 2:
        return
    batch.x.add_(1.0)
