"""Decode attention: bytes of keys and values read a second, next to what this device reads at most, and to peers.

On a GPU: batch x context x head shapes, next to torch's SDPA, flex_attention and FlashInfer, whichever of them is
installed, all in one run, over caches that are rotated so that the L2 cache holds none of them. On a CPU: the torch
version next to SDPA over keys that were gathered before, and over keys that are gathered every time. Outputs are
compared with attention in float64 first; a peer that is absent, fails or gives another output is listed with the
reason. Every figure is the median of rounds taken in turn; the read bandwidth is measured at every point. Writes
attention.json after every point.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from graphdecode.models import resolve_device
from graphdecode.profiling.bandwidth import read_bandwidth
from harness import Device, names, numbers, record, write
from peers.attention import (
    ATTENTION_PEERS,
    PAGE_SIZE,
    SHAPES,
    AttentionProblem,
    compare_attention,
    parse_attention_peers,
    plan_us,
    suitable_peers,
)

GPU_GRID = ("1,8,32,128", "512,4096,32768")
CPU_GRID = ("1,8", "512,4096")
_SHAPES = {shape.name: shape for shape in SHAPES}


def main(
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="A folder for attention.json.")] = Path("attention"),
    peers: Annotated[
        str, typer.Option(help=f"all, or of {', '.join(ATTENTION_PEERS)}; none: those that suit the device.")
    ] = "",
    batches: Annotated[str, typer.Option(help=f"None: {GPU_GRID[0]} on a GPU, {CPU_GRID[0]} on a CPU.")] = "",
    contexts: Annotated[str, typer.Option(help=f"None: {GPU_GRID[1]} on a GPU, {CPU_GRID[1]} on a CPU.")] = "",
    shapes: Annotated[str, typer.Option(help="With commas between.")] = ",".join(_SHAPES),
) -> None:
    """Compare decode attention with its peers at all points."""
    place = resolve_device(device)
    cuda = place.type == "cuda"
    chosen = parse_attention_peers(peers) if peers else suitable_peers(place)
    grid = GPU_GRID if cuda else CPU_GRID
    torch.manual_seed(0)
    bandwidth = read_bandwidth(place)
    report = record(place, schema=3, read_bandwidth=bandwidth, page_size=PAGE_SIZE, plans=[], rows=[])
    report["tolerance"] = {shape.name: shape.tolerance for shape in SHAPES}
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s")
    points = [
        (_SHAPES[name], context, batch)
        for name in names(shapes, _SHAPES, "--shapes")
        for context in numbers(contexts or grid[1])
        for batch in numbers(batches or grid[0])
    ]
    with torch.no_grad():
        for shape, context, batch in points:
            try:
                problem = AttentionProblem(shape, batch, context, place)
            except torch.OutOfMemoryError as error:
                where = {"shape": shape.name, "batch": batch, "context": context}
                report["rows"].append(where | {"peer": "all", "kv_bytes": 0, "note": str(error)[:80]})
                continue
            for row in compare_attention(chosen, problem):
                report["rows"].append(row)
                print(line(row))
            if cuda:
                overhead = {"shape": shape.name, "batch": batch, "context": context}
                report["plans"].append(overhead | {"plan_us": plan_us(problem)})
            del problem
            write(out / "attention.json", report)
    if any(row["peer"] == "graphdecode" and row["us"] is None for row in report["rows"]):
        raise SystemExit("graphdecode itself was left out of a point")


def line(row: dict[str, Any]) -> str:
    where = f"{row['shape']:14} {row['batch']:4} x {row['context']:6}  {row['peer']:14}"
    if row["us"] is None:
        return f"{where} left out: {row['note']}"
    ratio = "" if row["times_graphdecode"] is None else f"{row['times_graphdecode']:6.2f} x graphdecode"
    speed = f"{row['bytes_per_s'] / 1e9:8.1f} GB/s  {row['of_read_bandwidth']:5.2f} of what the device reads"
    return f"{where} {row['us']:10.1f} us {ratio} {speed}"
