"""Decode attention and its peers on the same keys and values: outputs are compared first, then times, in turn.

A point of the comparison has queries, caches that no other cache holds, and the right answer. Calls are short: a round
has many of them, each over other memory than the one before.
"""

from __future__ import annotations

import statistics
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from graphdecode.attention import PagedDecodeAttention
from graphdecode.profiling.bandwidth import read_bandwidth
from harness import in_turn
from peers.peer import Adapter, attempt, choose

PAGE_SIZE = 16
ROUNDS = 9
Calls = Sequence[Callable[[], object]]
_COLD_BYTES = {"cuda": 256 << 20, "cpu": 128 << 20}  # of rotated caches, at least: more than a last-level cache
_MOST_COPIES = 64
_FILLED_AT_ONCE = 4096  # pages
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 6e-3, torch.bfloat16: 5e-2}
_WORKSPACE_BYTES = 256 << 20  # of FlashInfer
_ROUND_SECONDS = 0.004
_MOST_REPEATS = 1024
_PLANS = 32  # that are timed together


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
        """How far an output may be from the right one, in root mean squares of that one."""
        return _TOLERANCE[self.dtype]


SHAPES = (
    AttentionShape("llama-8b", 32, 8, 128, torch.float16, torch.float16),
    AttentionShape("mha", 32, 32, 128, torch.float16, torch.float16),
    AttentionShape("qwen3", 32, 8, 128, torch.bfloat16, torch.bfloat16),
    AttentionShape("llama-8b-fp8", 32, 8, 128, torch.float16, torch.float8_e4m3fn),
)


class AttentionProblem:
    """A batch of one context over rotated caches; pages in random order.

    Attributes:
        shape: heads and dtypes.
        batch: rows, each with one query.
        context: keys that each query sees.
        device: where.
        pages_of_row: that a row's keys take.
        kv_bytes: that one call has to read.
        caches: keys and values, each [pages, page_size, kv_heads, head_dim].
        table: [batch, pages_of_row], int32: the pages of each row.
        q: [batch, qo_heads, head_dim].
        out: the same; for those that write where they are told.
    """

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
        """Return what a row of the comparison begins with."""
        point = {"shape": self.shape.name, "batch": self.batch, "context": self.context, "peer": peer}
        unknown = ("error", "us", "rounds_us", "times_graphdecode", "bytes_per_s", "of_read_bandwidth")
        return point | {"kv_bytes": self.kv_bytes} | dict.fromkeys(unknown)

    def _random(self, sizes: tuple[int, ...]) -> Tensor:
        cache = torch.empty(sizes, dtype=self.shape.kv_dtype, device=self.device)
        for page in cache.split(_FILLED_AT_ONCE):  # a piece at a time: fp8 has to be made from something wider
            page.copy_(torch.randn(page.shape, dtype=torch.float16, device=self.device))
        return cache

    def gathered(self, cache: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Return a cache's keys and values, each [batch, kv_heads, context, head_dim]."""
        index = self.table.long()
        return [part[index].flatten(1, 2)[:, : self.context].transpose(1, 2) for part in cache]

    @cached_property
    def contiguous(self) -> list[list[Tensor]]:
        """All caches gathered, [batch, kv_heads, context, head_dim] in memory too; for those that read no pages."""
        return [[part.contiguous() for part in self.gathered(cache)] for cache in self.caches]

    def error(self, out: Tensor, copy: int) -> float:
        """Return how far an output is from attention in float64, in root mean squares of that one.

        Args:
            out: of the size of `q`, in any view of it.
            copy: the cache that it was computed from.
        """
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


class AttentionPeer(Adapter):
    """A way to compute decode attention. Nothing of it is imported before `calls`."""

    def why_not(self, device: torch.device) -> str:
        """Return why this peer cannot take part, for people; "" when it can be tried."""
        return self.why_not_on(device.type, "runs")

    @abstractmethod
    def calls(self, problem: AttentionProblem) -> list[Callable[[], Tensor]]:
        """Return one call for each cache of the problem, which attends over it and returns the output.

        What depends on lengths alone is done here, as engines do it once for all layers of a step.

        Raises:
            Exception: whatever the peer raises when it cannot.
        """


class Sdpa(AttentionPeer):
    """torch's SDPA over keys and values that were gathered before: what an engine without pages pays."""

    name = "sdpa"

    def calls(self, problem: AttentionProblem) -> list[Callable[[], Tensor]]:
        """Return the calls."""
        q = problem.q.unsqueeze(2)  # [batch, qo_heads, 1, head_dim]
        return [partial(scaled_dot_product_attention, q, k, v, enable_gqa=True) for k, v in problem.contiguous]


class GatherSdpa(AttentionPeer):
    """The same over keys and values that are gathered from their pages in every call."""

    name = "gather+sdpa"

    def calls(self, problem: AttentionProblem) -> list[Callable[[], Tensor]]:
        """Return the calls."""
        return [partial(_gather_and_attend, problem, cache) for cache in problem.caches]


def _gather_and_attend(problem: AttentionProblem, cache: tuple[Tensor, Tensor]) -> Tensor:
    k, v = problem.gathered(cache)
    return scaled_dot_product_attention(problem.q.unsqueeze(2), k, v, enable_gqa=True)


class Flex(AttentionPeer):
    """torch's flex_attention over gathered keys, compiled for the shape alone; on a CPU that takes a C++ compiler."""

    name = "flex"

    def calls(self, problem: AttentionProblem) -> list[Callable[[], Tensor]]:
        """Return the calls."""
        from torch.nn.attention.flex_attention import flex_attention

        torch.compiler.reset()  # a new shape at every point of a grid: past a few, they would run uncompiled
        attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        q = problem.q.unsqueeze(2)  # [batch, qo_heads, 1, head_dim]
        return [partial(attend, q, k, v, enable_gqa=True) for k, v in problem.contiguous]


class Flashinfer(AttentionPeer):
    """`BatchDecodeWithPagedKVCacheWrapper`, planned once, over the same pages. No committed result has it yet."""

    name = "flashinfer"
    requires: ClassVar = {"flashinfer": "flashinfer-python"}
    devices = ("cuda",)
    use_tensor_cores = False

    def calls(self, problem: AttentionProblem) -> list[Callable[[], Tensor]]:
        """Return the calls."""
        import flashinfer

        shape, device = problem.shape, problem.device
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=self.use_tensor_cores
        )
        wrapper.plan(
            torch.arange(problem.batch + 1, dtype=torch.int32, device=device) * problem.pages_of_row,
            problem.table.view(-1),
            torch.full((problem.batch,), (problem.context - 1) % PAGE_SIZE + 1, dtype=torch.int32, device=device),
            shape.qo_heads,
            shape.kv_heads,
            shape.head_dim,
            PAGE_SIZE,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
        )
        return [partial(wrapper.run, problem.q, cache, out=problem.out) for cache in problem.caches]


class FlashinferTensorCores(Flashinfer):
    """The same, with its kernels for tensor cores."""

    name = "flashinfer-tc"
    use_tensor_cores = True


class GraphdecodeAttention(AttentionPeer):
    """This runtime's, planned once, as in a step."""

    name = "graphdecode"

    def calls(self, problem: AttentionProblem) -> list[Callable[[], Tensor]]:
        """Return the calls."""
        attention, plan = _attention(problem)
        plan()

        def run(cache: tuple[Tensor, Tensor]) -> Tensor:
            attention.run(problem.out, problem.q, *cache, problem.table)
            return problem.out

        return [partial(run, cache) for cache in problem.caches]


def _attention(problem: AttentionProblem) -> tuple[PagedDecodeAttention, Callable[[], None]]:
    """Return this runtime's attention, and what plans it."""
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
    return attention, partial(attention.plan, before, torch.tensor([problem.batch], dtype=torch.int32, device=device))


ATTENTION_PEERS: dict[str, type[AttentionPeer]] = {
    peer.name: peer for peer in (Sdpa, GatherSdpa, Flex, Flashinfer, FlashinferTensorCores)
}


def parse_attention_peers(text: str) -> list[AttentionPeer]:
    """Return the peers of a list such as `"sdpa,flex"`, in its order, each once; `"all"` is all of them.

    Raises:
        ValueError: one is unknown; names those that there are.
    """
    return [peer() for peer in choose(text, ATTENTION_PEERS)]


def suitable_peers(device: torch.device) -> list[AttentionPeer]:
    """Return those that take part when none is named: on a CPU, the ones that need no compiler."""
    chosen = (Sdpa, Flex, Flashinfer, FlashinferTensorCores) if device.type == "cuda" else (Sdpa, GatherSdpa)
    return [peer() for peer in chosen]


def compare_attention(peers: Sequence[AttentionPeer], problem: AttentionProblem) -> list[dict[str, Any]]:
    """Compare this runtime's attention with its peers at one point; return a row for each, as `attention.json` has it.

    A peer that is absent, that fails, or whose output is further from float64 attention than rounding explains is left
    out with its reason. The others run in turn (A B A B ...).

    Args:
        peers: in the order of the rows; this runtime comes first.
        problem: the point.
    """
    bandwidth = read_bandwidth(problem.device, repeats=3)
    rows: list[dict[str, Any]] = []
    timed: dict[str, Callable[[], float]] = {}
    for peer in (GraphdecodeAttention(), *peers):
        row = problem.row(peer.name) | {"read_bandwidth": bandwidth, "note": peer.why_not(problem.device)}
        rows.append(row)
        if row["note"]:
            continue
        checked, row["note"] = attempt(partial(_check, peer, problem))
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
            timed[peer.name] = ready
    rounds = in_turn(timed, ROUNDS)
    own = rounds.get(GraphdecodeAttention.name)
    for row in rows:
        if row["peer"] in rounds:
            row["rounds_us"] = rounds[row["peer"]]
            row["us"] = statistics.median(row["rounds_us"])
            row["times_graphdecode"] = row["us"] / statistics.median(own) if own else None
            row["bytes_per_s"] = row["kv_bytes"] / (row["us"] * 1e-6)
            row["of_read_bandwidth"] = row["bytes_per_s"] / bandwidth
    return rows


def _check(peer: AttentionPeer, problem: AttentionProblem) -> tuple[Calls, float]:
    """Return a peer's calls and how far the outputs of the first and the last are from the right ones."""
    calls = peer.calls(problem)
    first: Tensor = calls[0]()
    error = problem.error(first, 0)
    return calls, max(error, problem.error(calls[-1](), len(calls) - 1))


def plan_us(problem: AttentionProblem) -> float:
    """Return the microseconds of the plan by itself, in a graph of many; on a GPU."""
    _, plan = _attention(problem)
    round_us = prepared([plan] * _PLANS, problem.device)
    return statistics.median(round_us() for _ in range(ROUNDS))


def prepared(calls: Calls, device: torch.device) -> Callable[[], float]:
    """Warm calls up, and return what takes a round of them, as often as a clock needs: microseconds of one call.

    On a GPU they are captured into one graph, so that launches cost nothing.
    """

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
