"""Measure the collectives of a decode step on a CPU: microseconds a call, through shared memory and through gloo.

    python tools/bench_collectives.py [--ranks 2] [--hidden 768] [--vocabulary 32000] [--rows 1,8,32]

Each rank is a process with one thread. A call of `all_reduce` sums [rows, hidden] in fp32, as each attention and each
MLP of a layer ends with; one of `all_gather` puts [rows, vocabulary] together, once a step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from graphdecode.distributed import Collectives, GroupCollectives, SharedCollectives
from graphdecode.distributed.board_file import mapped_board, new_board

_LIMIT_SECONDS = 30.0
_REPEATS = 7
_SECONDS = 0.1  # of each repeat, about


def microseconds(collectives: Collectives, x: torch.Tensor, part: torch.Tensor | None) -> float:
    """Return the median time of a call; every rank makes as many of them."""

    def calls(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            if part is None:
                collectives.all_reduce(x, "here")
            else:
                collectives.all_gather(x, part, "here")
        return (time.perf_counter() - began) / count

    first = torch.tensor([[calls(50)]])
    collectives.all_reduce(first, "here")  # so that all take the same number
    count = max(int(_SECONDS * collectives.count / first.item()), 10)
    return 1e6 * statistics.median(calls(count) for _ in range(_REPEATS))


def rank_of(ranks: int) -> tuple[int, int]:
    """Fork the other ranks; return this one's number, and the descriptor of the board."""
    descriptor, _ = new_board(ranks, _LIMIT_SECONDS)
    for rank in range(1, ranks):
        if os.fork() == 0:
            return rank, descriptor
    return 0, descriptor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--rows", default="1,8,32")
    given = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, given.ranks, is_master=True, wait_for_workers=False)
    port = store.port
    torch.set_num_threads(1)
    rank, descriptor = rank_of(given.ranks)
    own = store if rank == 0 else dist.TCPStore("127.0.0.1", port, given.ranks, is_master=False)
    limit = timedelta(seconds=_LIMIT_SECONDS)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=given.ranks, timeout=limit)

    def agree(_: str) -> None:
        """Nothing is captured here."""

    shared = SharedCollectives(rank, given.ranks, agree, mapped_board(descriptor))
    gloo = GroupCollectives(rank, given.ranks, agree)
    for rows in map(int, given.rows.split(",")):
        x = torch.zeros(rows, given.hidden)
        logits = torch.zeros(rows, given.vocabulary)
        begin, end = (given.vocabulary * each // given.ranks for each in (rank, rank + 1))
        part = torch.zeros(rows, end - begin)
        for name, whole, own_part in (("all_reduce", x, None), ("all_gather", logits, part)):
            times = [microseconds(each, whole, own_part) for each in (shared, gloo)]
            if rank == 0:
                size = whole.numel() * whole.element_size() / 1024
                print(
                    f"{name} [{rows}, {whole.shape[1]}] fp32 ({size:.0f} KiB), {given.ranks} ranks: "
                    f"shared memory {times[0]:.1f} us, gloo {times[1]:.0f} us",
                    flush=True,
                )
    dist.barrier()
    dist.destroy_process_group()
    if rank:
        os._exit(0)
    for _ in range(given.ranks - 1):
        os.wait()
    sys.exit(0)


if __name__ == "__main__":
    main()
