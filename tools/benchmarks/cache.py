"""What `pre_step` of a key-value cache costs the host: microseconds and copies, for growing batches.

Four kinds of step, over both caches: every row advances by a token and no page changes; every row takes a page; one
sequence leaves and one enters in its row; all rows change places.
"""

from __future__ import annotations

import gc
import statistics
from collections import OrderedDict
from collections.abc import Hashable
from typing import Annotated, Any

import torch
import typer
from torch.utils._python_dispatch import TorchDispatchMode

from graphdecode import InferenceParams
from graphdecode.models import resolve_device
from harness import Device, Out, seconds_of, show, write

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += func.overloadpacket is torch.ops.aten.copy_
        return func(*args, **(kwargs or {}))


def make_params(batch_size: int, paged: bool, device: str) -> InferenceParams:
    """Return a cache whose rows all hold `CONTEXT` tokens; no layer is allocated, pre_step needs none."""
    pages: dict[str, Any] = (
        {"page_size": PAGE_SIZE, "total_num_pages": batch_size * MAX_LENGTH // PAGE_SIZE} if paged else {}
    )
    params = InferenceParams(batch_size, MAX_LENGTH, 8, 128, torch.float16, is_paged=paged, device=device, **pages)
    params.pre_step(OrderedDict((i, CONTEXT) for i in range(batch_size)))
    return params


def measure(params: InferenceParams, batch_size: int, rounds: int) -> dict[str, float]:
    """Return microseconds of each kind of step, and the copies of a steady one."""
    found: dict[str, list[float]] = {"page": [], "steady": [], "join": [], "shuffle": []}

    def timed(kind: str, ids: list[int], repeats: int = 1) -> None:
        step: OrderedDict[Hashable, int] = OrderedDict((i, 1) for i in ids)
        found[kind].append(1e6 * statistics.median(seconds_of(lambda: params.pre_step(step)) for _ in range(repeats)))

    ids = list(range(batch_size))
    for _ in range(rounds):  # every row stands at a page boundary here
        timed("page", ids)
        timed("steady", ids, REPEATS)
    with CopyCounter() as counter:
        params.pre_step(OrderedDict((i, 1) for i in ids))
    for new in range(rounds):
        ids[new % batch_size] = 10**6 + new
        timed("join", ids)
    for _ in range(rounds):
        ids.reverse()
        timed("shuffle", ids)
    return {kind: statistics.median(times) for kind, times in found.items()} | {"copies": counter.copies}


def main(
    device: Device = "auto",
    rounds: Annotated[int, typer.Option(help="Page boundaries to cross, joins and shuffles to make.", min=1)] = 20,
    out: Out = None,
) -> None:
    """Measure, print the table and say whether the target is met."""
    place = str(resolve_device(device))
    torch.set_num_threads(1)
    gc.disable()
    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        kinds = {"paged": True, "contiguous": False}
        measured = {name: measure(make_params(batch, paged, place), batch, rounds) for name, paged in kinds.items()}
        rows.append({"batch": batch, **measured})
        gc.collect()
    columns = {"batch": "{batch}", "paged": "{paged[steady]:.1f}", "a row": "{of_row:.1f}"}
    columns |= {"new page": "{paged[page]:.1f}", "join+leave": "{paged[join]:.1f}", "shuffle": "{paged[shuffle]:.1f}"}
    columns |= {"copies": "{paged[copies]}", "contiguous": "{contiguous[steady]:.1f}"}
    columns |= {"contiguous shuffle": "{contiguous[shuffle]:.1f}"}
    with_shares = (row | {"of_row": row["paged"]["steady"] / row["batch"]} for row in rows)
    show(columns, with_shares, f"pre_step on {place}: host microseconds (median)")
    at_target = next(row for row in rows if row["batch"] == TARGET_BATCH)["paged"]["steady"]
    print(f"batch {TARGET_BATCH}, no page change: {at_target:.1f} us, target {TARGET_US:.0f} us")
    write(out, {"device": place, "rows": rows})
