"""Decode attention: bytes of keys and values per second, compared with the read bandwidth and peers.

Peers are torch's SDPA and flex_attention on a GPU, SDPA over gathered keys on a CPU. Outputs are compared with float64
first; a peer that fails or gives another output is listed with the reason. Calls rotate over more memory than the last
cache holds. Figures are medians of alternating rounds. Writes attention.json after every point.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from graphdecode.attention import PagedDecodeAttention
from graphdecode.models import resolve_device
from graphdecode.profiling.environment import read_bandwidth
from harness import Device, alternated, names, numbers, record, write
from peers.peer import attempt, choose

OWN = "graphdecode"
PAGE_SIZE = 16
ROUNDS = 9
GPU_GRID = ("1,8,32,128", "512,4096,32768")
CPU_GRID = ("1,8", "512,4096")
Calls = Sequence[Callable[[], Tensor]]
_COLD_BYTES = {"cuda": 256 << 20, "cpu": 128 << 20}  # of rotated caches at least: more than a last-level cache
_MOST_COPIES = 64
_FILLED_AT_ONCE = 4096  # pages
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 6e-3, torch.bfloat16: 5e-2}
_ROUND_SECONDS = 0.004
_MOST_REPEATS = 1024


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a model and dtypes of its queries and cache."""

    name: str
    qo_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        """The largest error of an output, relative to the RMS of the exact one."""
        return _TOLERANCE[self.dtype]


SHAPES = (
    AttentionShape("llama-8b", 32, 8, 128, torch.float16, torch.float16),
    AttentionShape("mha", 32, 32, 128, torch.float16, torch.float16),
    AttentionShape("qwen3", 32, 8, 128, torch.bfloat16, torch.bfloat16),
    AttentionShape("llama-8b-fp8", 32, 8, 128, torch.float16, torch.float8_e4m3fn),
)
_SHAPES = {shape.name: shape for shape in SHAPES}


class AttentionProblem:
    """A batch of one context over rotated caches [pages, page_size, kv_heads, head_dim]; pages in random order."""

    def __init__(self, shape: AttentionShape, batch: int, context: int, device: torch.device) -> None:
        self.shape, self.batch, self.context, self.device = shape, batch, context, device
        self.pages_of_row = -(-context // PAGE_SIZE)
        pages = batch * self.pages_of_row
        self.kv_bytes = 2 * batch * context * shape.kv_heads * shape.head_dim * shape.kv_dtype.itemsize
        copies = max(min(-(-_COLD_BYTES[device.type] // self.kv_bytes), _MOST_COPIES), 1)
        sizes = (pages + 1, PAGE_SIZE, shape.kv_heads, shape.head_dim)
        self.caches = [(self._random(sizes), self._random(sizes)) for _ in range(copies)]
        self.table = torch.randperm(pages, device=device).to(torch.int32).view(batch, self.pages_of_row)
        self.q = torch.randn(batch, shape.qo_heads, shape.head_dim, device=device).to(shape.dtype)
        self.out = torch.empty_like(self.q)

    def row(self, peer: str) -> dict[str, Any]:
        point = {"shape": self.shape.name, "batch": self.batch, "context": self.context, "peer": peer}
        unknown = ("error", "us", "rounds_us", "times_graphdecode", "bytes_per_s", "of_read_bandwidth")
        return point | {"kv_bytes": self.kv_bytes} | dict.fromkeys(unknown)

    def _random(self, sizes: tuple[int, ...]) -> Tensor:
        cache = torch.empty(sizes, dtype=self.shape.kv_dtype, device=self.device)
        for page in cache.split(_FILLED_AT_ONCE):  # in pieces, since fp8 is converted from a wider type
            page.copy_(torch.randn(page.shape, dtype=torch.float16, device=self.device))
        return cache

    def gathered(self, cache: tuple[Tensor, Tensor]) -> list[Tensor]:
        index = self.table.long()
        return [part[index].flatten(1, 2)[:, : self.context].transpose(1, 2) for part in cache]

    @cached_property
    def contiguous(self) -> list[list[Tensor]]:
        """All caches gathered and contiguous, for peers that read no pages."""
        return [[part.contiguous() for part in self.gathered(cache)] for cache in self.caches]

    def error(self, out: Tensor, copy: int) -> float:
        """Return the distance of an output from attention in float64, relative to the RMS of that one."""
        shape, group = self.shape, self.shape.qo_heads // self.shape.kv_heads
        out = out.reshape(self.q.shape)
        worst = 0.0
        for row in sorted({0, self.batch // 2, self.batch - 1}):  # all rows of a large batch would take gigabytes
            pages = self.table[row].long()
            k, v = (part[pages].flatten(0, 1)[: self.context].double() for part in self.caches[copy])
            q = self.q[row].double().view(shape.kv_heads, group, shape.head_dim)
            weights = torch.softmax(torch.einsum("hgd,chd->hgc", q, k) * shape.head_dim**-0.5, dim=-1)
            right = torch.einsum("hgc,chd->hgd", weights, v).view(shape.qo_heads, shape.head_dim)
            distance = (out[row].double() - right).abs().amax() / right.square().mean().sqrt()
            worst = max(worst, distance.nan_to_num(torch.inf).item())
        return worst


# each function returns one call per cache; work that depends only on lengths is done before, as in a step


def sdpa(problem: AttentionProblem) -> Calls:
    """SDPA over gathered keys and values: the cost of an engine without pages."""
    q = problem.q.unsqueeze(2)  # [batch, qo_heads, 1, head_dim]
    return [partial(scaled_dot_product_attention, q, k, v, enable_gqa=True) for k, v in problem.contiguous]


def gather_sdpa(problem: AttentionProblem) -> Calls:
    """SDPA over keys and values that each call gathers from their pages."""

    def attend(cache: tuple[Tensor, Tensor]) -> Tensor:
        k, v = problem.gathered(cache)
        return scaled_dot_product_attention(problem.q.unsqueeze(2), k, v, enable_gqa=True)

    return [partial(attend, cache) for cache in problem.caches]


def flex(problem: AttentionProblem) -> Calls:
    """flex_attention over gathered keys, compiled for the shape; on a CPU this takes a C++ compiler."""
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()  # a new shape at every point of a grid: past a few, they would run uncompiled
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    q = problem.q.unsqueeze(2)  # [batch, qo_heads, 1, head_dim]
    return [partial(attend, q, k, v, enable_gqa=True) for k, v in problem.contiguous]


def graphdecode(problem: AttentionProblem) -> Calls:
    """This runtime's attention, planned once, as in a step."""
    shape, device = problem.shape, problem.device
    attention = PagedDecodeAttention(
        max_batch_size=problem.batch,
        num_qo_heads=shape.qo_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        page_size=PAGE_SIZE,
        max_pages_per_row=problem.pages_of_row,
        dtype=shape.dtype,
        device=device,
    )
    before = torch.full((problem.batch,), problem.context - 1, dtype=torch.int32, device=device)
    attention.plan(before, torch.tensor([problem.batch], dtype=torch.int32, device=device))

    def run(cache: tuple[Tensor, Tensor]) -> Tensor:
        attention.run(problem.out, problem.q, *cache, problem.table)
        return problem.out

    return [partial(run, cache) for cache in problem.caches]


PEERS: dict[str, Callable[[AttentionProblem], Calls]] = {"sdpa": sdpa, "gather+sdpa": gather_sdpa, "flex": flex}


def compare_attention(
    peers: Mapping[str, Callable[[AttentionProblem], Calls]], problem: AttentionProblem
) -> list[dict[str, Any]]:
    """Return a row of `attention.json` for this attention and each peer, measured alternately."""
    bandwidth = read_bandwidth(problem.device, repeats=3)
    rows: list[dict[str, Any]] = []
    timed: dict[str, Callable[[], float]] = {}
    for name, calls_of in ({OWN: graphdecode} | dict(peers)).items():
        row = problem.row(name) | {"read_bandwidth": bandwidth}
        rows.append(row)
        checked, row["note"] = attempt(partial(_check, calls_of, problem))
        if checked is None:
            continue
        calls, row["error"] = checked
        if row["error"] > problem.shape.tolerance:
            row["note"] = (
                f"gives another output: {row['error']:.2g} root mean squares away from attention in float64, tolerance "
                f"{problem.shape.tolerance:g}"
            )
            continue
        ready, row["note"] = attempt(partial(prepared, calls, problem.device))
        if ready is not None:
            timed[name] = ready
    rounds = alternated(timed, ROUNDS)
    own = rounds.get(OWN)
    for row in rows:
        if row["peer"] in rounds:
            row["rounds_us"] = rounds[row["peer"]]
            row["us"] = statistics.median(row["rounds_us"])
            row["times_graphdecode"] = row["us"] / statistics.median(own) if own else None
            row["bytes_per_s"] = row["kv_bytes"] / (row["us"] * 1e-6)
            row["of_read_bandwidth"] = row["bytes_per_s"] / bandwidth
    return rows


def _check(calls_of: Callable[[AttentionProblem], Calls], problem: AttentionProblem) -> tuple[Calls, float]:
    """Return a peer's calls, and the larger error of its first and last output."""
    calls = calls_of(problem)
    error = problem.error(calls[0](), 0)
    return calls, max(error, problem.error(calls[-1](), len(calls) - 1))


def prepared(calls: Calls, device: torch.device) -> Callable[[], float]:
    """Return a function that times a round of calls, in microseconds of one; on a GPU they are one graph."""

    def each() -> None:
        for call in calls:
            call()

    each()
    rotate: Callable[[], object] = each
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            each()
        rotate = graph.replay
    repeats = 1
    while repeats < _MOST_REPEATS and _seconds(rotate, repeats, device) < _ROUND_SECONDS:
        repeats *= 2
    return lambda: 1e6 * _seconds(rotate, repeats, device) / (repeats * len(calls))


def _seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return time.perf_counter() - began


def main(
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="A folder for attention.json.")] = Path("attention"),
    peers: Annotated[str, typer.Option(help=f"all, or of {', '.join(PEERS)}; none: those that suit the device.")] = "",
    batches: Annotated[str, typer.Option(help=f"None: {GPU_GRID[0]} on a GPU, {CPU_GRID[0]} on a CPU.")] = "",
    contexts: Annotated[str, typer.Option(help=f"None: {GPU_GRID[1]} on a GPU, {CPU_GRID[1]} on a CPU.")] = "",
    shapes: Annotated[str, typer.Option(help="With commas between.")] = ",".join(_SHAPES),
) -> None:
    place = resolve_device(device)
    cuda = place.type == "cuda"
    by_default = "sdpa,flex" if cuda else "sdpa,gather+sdpa"  # on a CPU, peers that need no compiler
    chosen = choose(peers or by_default, PEERS)
    grid = GPU_GRID if cuda else CPU_GRID
    torch.manual_seed(0)
    bandwidth = read_bandwidth(place)
    report = record(place, schema=3, read_bandwidth=bandwidth, page_size=PAGE_SIZE, rows=[])
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
            del problem
            write(out / "attention.json", report)
    if any(row["peer"] == OWN and row["us"] is None for row in report["rows"]):
        raise SystemExit("graphdecode itself was left out of a point")


def line(row: dict[str, Any]) -> str:
    where = f"{row['shape']:14} {row['batch']:4} x {row['context']:6}  {row['peer']:14}"
    if row["us"] is None:
        return f"{where} left out: {row['note']}"
    ratio = "" if row["times_graphdecode"] is None else f"{row['times_graphdecode']:6.2f} x graphdecode"
    speed = f"{row['bytes_per_s'] / 1e9:8.1f} GB/s  {row['of_read_bandwidth']:5.2f} of what the device reads"
    return f"{where} {row['us']:10.1f} us {ratio} {speed}"
