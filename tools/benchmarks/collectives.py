"""Collectives of a decode step on a CPU: microseconds per call, through shared memory and through gloo.

Each rank is a process with one thread. `all_reduce` sums [rows, hidden] in fp32, `all_gather` collects [rows,
vocabulary]. With --on-one-core all ranks share a core. Rows are added to the file.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer

from graphdecode.distributed import Collectives, GroupCollectives
from graphdecode.distributed.started import mapped_board, new_board
from graphdecode.kernels.native.registration import bind
from harness import Out, Sizes, numbers, read, record, write

_LIMIT_SECONDS = 30.0
_TURNS = 7
_SECONDS = 0.1  # of each round, about


class Given(NamedTuple):
    """Ranks, channels of a sum and of a gathered row, rows, and whether all ranks share a core."""

    ranks: int
    hidden: int
    vocabulary: int
    rows: list[int]
    on_one_core: bool


def turns(call: Callable[[], Any], gloo: Collectives) -> list[float]:
    """Return the microseconds of a call in each turn; every rank makes the same number of calls."""

    def seconds(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - began) / count

    seconds(50)
    first = torch.tensor([[seconds(50)]])
    gloo.all_reduce(first, "here")  # so that all ranks make the same number
    count = max(int(_SECONDS * gloo.count / first.item()), 10)
    return [round(1e6 * seconds(count), 1) for _ in range(_TURNS)]


def measured(rank: int, descriptor: int, given: Given) -> list[dict[str, Any]]:
    """Return a row for each collective and size; every rank calls it."""

    def agree(_: str) -> None:
        """Do nothing: nothing is captured here."""

    board, ranks, found = mapped_board(descriptor), given.ranks, []
    gloo = GroupCollectives(rank, ranks, agree)
    ours = torch.ops.graphdecode
    for rows in given.rows:
        x, logits = torch.zeros(rows, given.hidden), torch.zeros(rows, given.vocabulary)
        begin, end = (given.vocabulary * each // ranks for each in (rank, rank + 1))
        part = torch.zeros(rows, end - begin)
        reduce = bind(ours.shared_all_reduce.default, x, board, rank, ranks)
        gather = bind(ours.shared_all_gather.default, logits, part, board, rank, ranks)
        assert reduce is not None
        assert gather is not None
        calls: dict[str, tuple[torch.Tensor, Callable[[], Any], Callable[[], Any]]] = {
            "all_reduce": (x, reduce, partial(gloo.all_reduce, x, "here")),
            "all_gather": (logits, gather, partial(gloo.all_gather, logits, part, "here")),
        }
        for name, (out, shared, over_gloo) in calls.items():
            row = {"collective": name, "rows": rows, "columns": out.shape[1], "bytes": out.nbytes, "ranks": ranks}
            row |= {"on_one_core": given.on_one_core}
            for how, call in (("shared", shared), ("gloo", over_gloo)):
                took = turns(call, gloo)
                row |= {f"{how}_us": statistics.median(took), f"{how}_turns_us": took}
            found.append(row)
            if rank == 0:
                print(*(f"{key}={value}" for key, value in row.items()), flush=True)
    return found


def rank_of(ranks: int) -> tuple[int, int]:
    """Fork the other ranks; return this one's number, and the descriptor of the shared board."""
    descriptor, _ = new_board(ranks, _LIMIT_SECONDS)
    for rank in range(1, ranks):
        if os.fork() == 0:
            return rank, descriptor
    return 0, descriptor


def main(
    ranks: Annotated[int, typer.Option(help="Processes.", min=2)] = 2,
    hidden: Annotated[int, typer.Option(help="Channels of a sum.")] = 768,
    vocabulary: Annotated[int, typer.Option(help="Channels of a gathered row.")] = 32000,
    rows: Sizes = "1,8,32",
    on_one_core: Annotated[bool, typer.Option("--on-one-core", help="All ranks share a core.")] = False,
    out: Out = None,
) -> None:
    given = Given(ranks, hidden, vocabulary, numbers(rows, "--rows"), on_one_core)
    store = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
    port = store.port
    torch.set_num_threads(1)
    if on_one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rank, descriptor = rank_of(ranks)
    own = store if rank == 0 else dist.TCPStore("127.0.0.1", port, ranks, is_master=False)
    limit = timedelta(seconds=_LIMIT_SECONDS)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=ranks, timeout=limit)
    found = measured(rank, descriptor, given)
    dist.barrier()
    dist.destroy_process_group()
    if rank:
        os._exit(0)
    for _ in range(ranks - 1):
        os.wait()
    whole = read(out, schema=1, rows=[])
    write(out, whole | record(rows=whole["rows"] + found))
