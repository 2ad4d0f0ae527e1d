"""Measure what `pre_step` costs the host: microseconds and copies, for growing batches.

    python tools/bench_cache.py                        # this machine's device
    python tools/bench_cache.py --device cpu --json cache.json

Four kinds of step, over both caches: every row advances by a token and no page changes; every row takes a page; one
sequence leaves and one enters in its row; all rows change places. Beside them a stand-in for the way that the first
caches of this kind worked, written for this benchmark: cumulative sums by summing a growing slice for each row, and
one tensor built and copied for each of the lengths, both sums and the page table. It does no checks and frees no
pages; where the page table is left out, three copies remain.
"""

import argparse
import gc
import json
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from graphdecode import InferenceParams

PAGE_SIZE = 16
MAX_LENGTH = 4096
CONTEXT = 1024
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TARGET_US, TARGET_BATCH = 60.0, 64
REPEATS = 15  # steps without a page change between two page boundaries


class CopyCounter(TorchDispatchMode):
    """Counts the copies into tensors that a call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.copies += func.overloadpacket is torch.ops.aten.copy_
        return func(*args, **(kwargs or {}))


class SumInALoop:
    """The stand-in: lengths summed slice by slice, a tensor made and copied for each piece of metadata."""

    def __init__(self, batch_size: int, device: str, with_page_table: bool) -> None:
        self.max_batch_size = batch_size
        self.sequences: OrderedDict[int, int] = OrderedDict()
        self.pages: dict[int, list[int]] = {}
        self.next_page = 0
        self.with_page_table = with_page_table
        self.pre_step_seqlens = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.cu_seqlens_q = torch.zeros(batch_size + 1, dtype=torch.int32, device=device)
        self.cu_seqlens_kv = torch.zeros(batch_size + 1, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(batch_size, MAX_LENGTH // PAGE_SIZE, dtype=torch.int32, device=device)

    def pre_step(self, step_dict: OrderedDict[int, int]) -> None:
        """Advance every sequence, and copy all metadata."""
        self._copy(self.pre_step_seqlens, [self.sequences.get(i, 0) for i in step_dict])
        self.sequences = OrderedDict((i, self.sequences.get(i, 0) + n) for i, n in step_dict.items())
        self._copy(self.cu_seqlens_q, self._sums(list(step_dict.values())))
        self._copy(self.cu_seqlens_kv, self._sums(list(self.sequences.values())))
        for i, length in self.sequences.items():
            pages = self.pages.setdefault(i, [])
            while len(pages) * PAGE_SIZE < length:
                pages.append(self.next_page)
                self.next_page += 1
        if self.with_page_table:
            width = self.page_table.shape[1]
            self._copy(self.page_table, [self.pages[i] + [0] * (width - len(self.pages[i])) for i in self.sequences])

    def _sums(self, lengths: list[int]) -> list[int]:
        sums = [0] + [sum(lengths[:i]) for i in range(1, len(lengths) + 1)]
        return sums + [sums[-1]] * (self.max_batch_size - len(lengths))

    @staticmethod
    def _copy(target: torch.Tensor, values: list) -> None:
        target.copy_(torch.tensor(values, dtype=torch.int32))


def median_us(call: Callable[[], None], repeats: int) -> float:
    """Return the median duration of a call in microseconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times)


def make_params(batch_size: int, paged: bool, device: str) -> InferenceParams:
    """Return a cache whose rows all hold `CONTEXT` tokens; no layer is allocated, pre_step needs none."""
    pages = {"page_size": PAGE_SIZE, "total_num_pages": batch_size * MAX_LENGTH // PAGE_SIZE} if paged else {}
    params = InferenceParams(batch_size, MAX_LENGTH, 8, 128, torch.float16, is_paged=paged, device=device, **pages)
    params.pre_step(OrderedDict((i, CONTEXT) for i in range(batch_size)))
    return params


def measure(params: InferenceParams | SumInALoop, batch_size: int, rounds: int) -> dict[str, float]:
    """Return microseconds of each kind of step, and the copies of a steady one."""
    steady = OrderedDict((i, 1) for i in range(batch_size))
    page = OrderedDict((i, 1) for i in range(batch_size))
    found: dict[str, list[float]] = {"page": [], "steady": [], "join": [], "shuffle": []}
    for _ in range(rounds):  # every row stands at a page boundary here
        found["page"].append(median_us(lambda: params.pre_step(page), 1))
        found["steady"].append(median_us(lambda: params.pre_step(steady), REPEATS))
    with CopyCounter() as counter:
        params.pre_step(steady)
    if not isinstance(params, SumInALoop):
        ids = list(steady)
        for new in range(rounds):
            ids[new % batch_size] = 10**6 + new
            step = OrderedDict((i, 1) for i in ids)
            found["join"].append(median_us(lambda step=step: params.pre_step(step), 1))  # type: ignore[misc]
        for _ in range(rounds):
            ids.reverse()
            step = OrderedDict((i, 1) for i in ids)
            found["shuffle"].append(median_us(lambda step=step: params.pre_step(step), 1))  # type: ignore[misc]
    return {kind: statistics.median(times) for kind, times in found.items() if times} | {"copies": counter.copies}


def main() -> None:
    """Measure, print the tables and say whether the target is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=20, help="page boundaries to cross, joins and shuffles to make")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()

    rows = []
    for batch in BATCHES:
        measured = {
            "paged": measure(make_params(batch, True, options.device), batch, options.rounds),
            "contiguous": measure(make_params(batch, False, options.device), batch, options.rounds),
        }
        for name, with_table in (("four copies", True), ("three copies", False)):
            stand_in = SumInALoop(batch, options.device, with_table)
            stand_in.pre_step(OrderedDict((i, CONTEXT) for i in range(batch)))
            measured[name] = measure(stand_in, batch, max(options.rounds // 4, 2))
        rows.append({"batch": batch, **measured})
        gc.collect()

    table = Table(title=f"pre_step on {options.device}: host microseconds (median)")
    for column in (
        "batch",
        "paged",
        "a row",
        "new page",
        "join+leave",
        "shuffle",
        "copies",
        "contiguous",
        "shuffle",
    ):
        table.add_column(column, justify="right")
    for column in ("four copies", "ratio", "three copies", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        paged, contiguous = row["paged"], row["contiguous"]
        table.add_row(
            str(row["batch"]),
            *(f"{x:.1f}" for x in (paged["steady"], paged["steady"] / row["batch"], paged["page"], paged["join"])),
            f"{paged['shuffle']:.1f}",
            str(paged["copies"]),
            f"{contiguous['steady']:.1f}",
            f"{contiguous['shuffle']:.1f}",
            *(
                text
                for name in ("four copies", "three copies")
                for text in (f"{row[name]['steady']:.1f}", f"{row[name]['steady'] / paged['steady']:.1f}x")
            ),
        )
    Console(width=150).print(table)
    at_target = next(row for row in rows if row["batch"] == TARGET_BATCH)["paged"]["steady"]
    print(f"batch {TARGET_BATCH}, no page change: {at_target:.1f} us, target {TARGET_US:.0f} us")
    if options.json:
        options.json.write_text(json.dumps({"device": options.device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
