"""Measure decode attention: bytes of keys and values read per second, next to what this device reads at most.

    python tools/bench_attention.py --out results/attention                 # this machine's device
    python tools/bench_attention.py --peers sdpa --batches 8 --contexts 4096

On a GPU: batch x context x head shapes, next to torch's SDPA, flex_attention and FlashInfer, whichever of them is
installed, all in one run, over caches that are rotated so that the L2 cache holds none of them. On a CPU: the torch
version next to SDPA over keys that were gathered before, and over keys that are gathered every time. Every figure is
the median of several rounds; the read bandwidth is measured in the same run. Writes attention.json after every point,
and attention.png at the end where matplotlib is installed.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from graphdecode.attention import PagedDecodeAttention
from graphdecode.kernels.split_decode import merge_splits_triton
from graphdecode.profiling.bandwidth import read_bandwidth
from graphdecode.profiling.environment import describe_environment

PAGE_SIZE = 16
ROUNDS = 9
ROUND_SECONDS = 0.004
COLD_BYTES = 256 << 20  # more than any L2 cache; rotated caches together are at least so large
GPU_GRID = ((1, 8, 32, 128), (512, 4096, 32768))
CPU_GRID = ((1, 8), (512, 4096))


@dataclass(frozen=True)
class Shape:
    """Heads of a model and dtypes of its queries and cache."""

    name: str
    qo_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype


SHAPES = (
    Shape("llama-8b", 32, 8, 128, torch.float16, torch.float16),
    Shape("mha", 32, 32, 128, torch.float16, torch.float16),
    Shape("qwen3", 32, 8, 128, torch.bfloat16, torch.bfloat16),
    Shape("llama-8b-fp8", 32, 8, 128, torch.float16, torch.float8_e4m3fn),
)


@dataclass
class Result:
    """One peer at one point of the grid."""

    shape: str
    batch: int
    context: int
    peer: str
    kv_bytes: int
    us: float | None
    bytes_per_s: float | None = None
    of_read_bandwidth: float | None = None
    note: str = ""


class Problem:
    """A batch of one context over rotated caches; pages in random order."""

    def __init__(self, shape: Shape, batch: int, context: int, device: torch.device) -> None:
        self.shape, self.batch, self.context, self.device = shape, batch, context, device
        self.pages_of_row = -(-context // PAGE_SIZE)
        pages = batch * self.pages_of_row
        self.kv_bytes = 2 * batch * context * shape.kv_heads * shape.head_dim * shape.kv_dtype.itemsize
        cold = COLD_BYTES if device.type == "cuda" else COLD_BYTES // 2
        self.copies = max(min(-(-cold // self.kv_bytes), 64), 1)
        sizes = (pages + 1, PAGE_SIZE, shape.kv_heads, shape.head_dim)
        self.caches = [(self._random(sizes), self._random(sizes)) for _ in range(self.copies)]
        self.table = torch.randperm(pages, device=device).to(torch.int32).view(batch, self.pages_of_row)
        self.q = torch.randn(batch, shape.qo_heads, shape.head_dim, device=device).to(shape.dtype)
        self.out = torch.empty_like(self.q)

    def _random(self, sizes: tuple[int, ...]) -> torch.Tensor:
        cache = torch.empty(sizes, dtype=self.shape.kv_dtype, device=self.device)
        for page in cache.split(4096):  # a piece at a time: fp8 has to be made from something wider
            page.copy_(torch.randn(page.shape, dtype=torch.float16, device=self.device))
        return cache

    def gathered(self, cache: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        """Keys and values as [batch, heads, context, head_dim]."""
        index = self.table.long()
        return [part[index].flatten(1, 2)[:, : self.context].transpose(1, 2) for part in cache]


def ours(problem: Problem) -> list[Callable[[], None]]:
    """One call for each cache; planned once, as in a step."""
    attention = our_attention(problem)
    return [
        lambda cache=cache: attention.run(problem.out, problem.q, *cache, problem.table) for cache in problem.caches
    ]


def our_attention(problem: Problem) -> PagedDecodeAttention:
    shape = problem.shape
    attention = PagedDecodeAttention(
        max_batch_size=problem.batch,
        num_qo_heads=shape.qo_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        page_size=PAGE_SIZE,
        max_pages_per_row=problem.pages_of_row,
        dtype=shape.dtype,
        device=problem.device,
    )
    attention.plan(*plan_inputs(problem))
    return attention


def plan_inputs(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    before = torch.full((problem.batch,), problem.context - 1, dtype=torch.int32, device=problem.device)
    return before, torch.tensor([problem.batch], dtype=torch.int32, device=problem.device)


def sdpa(problem: Problem) -> list[Callable[[], None]]:
    q = problem.q.unsqueeze(2)
    ready = [problem.gathered(cache) for cache in problem.caches]
    return [lambda kv=kv: scaled_dot_product_attention(q, *kv, enable_gqa=True) for kv in ready]


def gather_sdpa(problem: Problem) -> list[Callable[[], None]]:
    q = problem.q.unsqueeze(2)
    return [
        lambda cache=cache: scaled_dot_product_attention(q, *problem.gathered(cache), enable_gqa=True)
        for cache in problem.caches
    ]


def flex(problem: Problem) -> list[Callable[[], None]]:
    attend = torch.compile(importlib.import_module("torch.nn.attention.flex_attention").flex_attention)
    q = problem.q.unsqueeze(2)
    ready = [problem.gathered(cache) for cache in problem.caches]
    return [lambda kv=kv: attend(q, *kv, enable_gqa=True) for kv in ready]


def flashinfer(problem: Problem, use_tensor_cores: bool) -> list[Callable[[], None]]:
    peer = importlib.import_module("flashinfer")
    shape = problem.shape
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=problem.device)
    wrapper = peer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=use_tensor_cores)
    starts = torch.arange(problem.batch + 1, dtype=torch.int32, device=problem.device) * problem.pages_of_row
    last = torch.full((problem.batch,), (problem.context - 1) % PAGE_SIZE + 1, dtype=torch.int32, device=problem.device)
    wrapper.plan(
        starts, problem.table.view(-1), last, shape.qo_heads, shape.kv_heads, shape.head_dim, PAGE_SIZE,
        q_data_type=shape.dtype, kv_data_type=shape.kv_dtype,
    )  # fmt: skip
    return [lambda cache=cache: wrapper.run(problem.q, cache, out=problem.out) for cache in problem.caches]


PEERS: dict[str, Callable[[Problem], list[Callable[[], None]]]] = {
    "graphdecode": ours,
    "sdpa": sdpa,
    "gather+sdpa": gather_sdpa,
    "flex": flex,
    "flashinfer": lambda problem: flashinfer(problem, False),
    "flashinfer-tc": lambda problem: flashinfer(problem, True),
}


def median_us(calls: list[Callable[[], object]], device: torch.device) -> float:
    """Microseconds of one call, each over another cache than the one before; on a GPU from one captured graph."""
    for call in calls:
        call()
    rotate: Callable[[], object] = lambda: [call() for call in calls]  # noqa: E731
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rotate()
        rotate = graph.replay
    times = []
    repeats = 1
    while len(times) < ROUNDS:
        seconds = timed(rotate, repeats, device)
        if seconds < ROUND_SECONDS and repeats < 1024 and not times:
            repeats *= 2
            continue
        times.append(seconds / (repeats * len(calls)))
    return statistics.median(times) * 1e6


def timed(call: Callable[[], object], repeats: int, device: torch.device) -> float:
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


def measure(problem: Problem, peers: list[str], bandwidth: float) -> Iterator[Result]:
    """Measure every peer at one point; one that cannot is noted with its reason."""
    for peer in peers:
        result = Result(problem.shape.name, problem.batch, problem.context, peer, problem.kv_bytes, None)
        try:
            result.us = median_us(PEERS[peer](problem), problem.device)
            result.bytes_per_s = problem.kv_bytes / (result.us * 1e-6)
            result.of_read_bandwidth = result.bytes_per_s / bandwidth
        except (ImportError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            result.note = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        yield result


def plan_and_merge_us(problem: Problem) -> dict[str, float]:
    """Microseconds of the plan and of the merge by themselves, in a graph of many."""
    attention = our_attention(problem)
    before, live = plan_inputs(problem)
    kv_lens, plan, partial, partial_lse = attention.workspace
    merge = lambda: merge_splits_triton(  # noqa: E731
        problem.out, None, partial, partial_lse, plan, kv_lens.shape[0], 1, 1.0
    )
    return {
        "plan_us": median_us([lambda: attention.plan(before, live)] * 32, problem.device),
        "merge_us": median_us([merge] * 32, problem.device),
    }


def draw(results: list[Result], path: Path) -> None:
    """Plot the share of the read bandwidth that each peer reaches, a panel for each shape."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    shapes = list(dict.fromkeys(result.shape for result in results))
    figure = Figure(figsize=(4.2 * len(shapes), 3.6), layout="constrained")
    for axes, shape in zip(figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0], shapes, strict=True):
        own = [result for result in results if result.shape == shape]
        points = list(dict.fromkeys((result.batch, result.context) for result in own))
        for peer in dict.fromkeys(result.peer for result in own):
            shares = {(r.batch, r.context): r.of_read_bandwidth for r in own if r.peer == peer and r.us is not None}
            if shares:
                places = [points.index(point) for point in shares]
                axes.plot(places, list(shares.values()), marker="o", label=peer)
        axes.set_xticks(range(len(points)), [f"{batch} x {context}" for batch, context in points], rotation=60)
        axes.set_title(shape)
        axes.axhline(1.0, color="grey", linewidth=0.8)
    figure.axes[0].set_ylabel("keys and values read / read bandwidth")
    figure.axes[0].legend()
    figure.supxlabel("batch x context")
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("attention"), help="folder for attention.json and .png")
    parser.add_argument("--peers", help=f"comma-separated, of {', '.join(PEERS)}; default: all that suit the device")
    parser.add_argument("--batches", help="comma-separated")
    parser.add_argument("--contexts", help="comma-separated")
    parser.add_argument("--shapes", help=f"comma-separated, of {', '.join(shape.name for shape in SHAPES)}")
    return parser.parse_args()


def chosen(text: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    return default if text is None else tuple(int(part) for part in text.split(","))


def main() -> None:
    options = arguments()
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    default = ["sdpa", "flex", "flashinfer", "flashinfer-tc"] if cuda else ["sdpa", "gather+sdpa"]
    wanted = options.peers.split(",") if options.peers is not None else default
    unknown = [peer for peer in wanted if peer and peer not in PEERS]
    if unknown:
        raise SystemExit(f"unknown peers {', '.join(unknown)}; there are {', '.join(PEERS)}")
    peers = ["graphdecode", *[peer for peer in wanted if peer and peer != "graphdecode"]]
    names = options.shapes.split(",") if options.shapes else [shape.name for shape in SHAPES]
    batches, contexts = GPU_GRID if cuda else CPU_GRID
    torch.manual_seed(0)
    bandwidth = read_bandwidth(device)
    report = {
        "schema": 1,
        "environment": describe_environment(device),
        "read_bandwidth": bandwidth,
        "page_size": PAGE_SIZE,
        "plan_and_merge": [],
        "rows": [],
    }
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s")
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    with torch.no_grad():
        for shape in (shape for shape in SHAPES if shape.name in names):
            for context in chosen(options.contexts, contexts):
                for batch in chosen(options.batches, batches):
                    try:
                        problem = Problem(shape, batch, context, device)
                    except torch.OutOfMemoryError as error:
                        results.append(Result(shape.name, batch, context, "graphdecode", 0, None, note=str(error)[:80]))
                        continue
                    for result in measure(problem, peers, bandwidth):
                        results.append(result)
                        print(line(result))
                    if cuda:
                        overhead = {"shape": shape.name, "batch": batch, "context": context}
                        report["plan_and_merge"].append(overhead | plan_and_merge_us(problem))
                    del problem
                    report["rows"] = [asdict(result) for result in results]
                    (options.out / "attention.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(results, options.out / "attention.png")


def line(result: Result) -> str:
    where = f"{result.shape:14} {result.batch:4} x {result.context:6}  {result.peer:14}"
    if result.us is None or result.bytes_per_s is None or result.of_read_bandwidth is None:
        return f"{where} {result.note}"
    speed = f"{result.bytes_per_s / 1e9:8.1f} GB/s  {result.of_read_bandwidth:5.2f} of what the device reads"
    return f"{where} {result.us:10.1f} us {speed}"


if __name__ == "__main__":
    main()
