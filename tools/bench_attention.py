"""Measure decode attention: bytes of keys and values read per second, next to what this device reads at most.

    python tools/bench_attention.py --out results/attention                 # this machine's device
    python tools/bench_attention.py --peers sdpa,flex --batches 8 --contexts 4096

On a GPU: batch x context x head shapes, next to torch's SDPA, flex_attention and FlashInfer, whichever of them is
installed, all in one run, over caches that are rotated so that the L2 cache holds none of them. On a CPU: the torch
version next to SDPA over keys that were gathered before, and over keys that are gathered every time. Outputs are
compared with attention in float64 first; a peer that is absent, fails or gives another output is listed with the
reason. Every figure is the median of rounds taken in turn; the read bandwidth is measured at every point. Writes
attention.json after every point, and attention.png at the end where matplotlib is installed.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from graphdecode.profiling.bandwidth import read_bandwidth
from graphdecode.profiling.environment import describe_environment
from peers.attention import (
    ATTENTION_PEERS,
    PAGE_SIZE,
    SHAPES,
    AttentionProblem,
    AttentionResult,
    compare_attention,
    parse_attention_peers,
    plan_us,
    suitable_peers,
)

GPU_GRID = ((1, 8, 32, 128), (512, 4096, 32768))
CPU_GRID = ((1, 8), (512, 4096))


def draw(results: list[AttentionResult], path: Path) -> None:
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
        axes.set_ylim(bottom=0)
    figure.axes[0].set_ylabel("keys and values read / read bandwidth")
    figure.axes[0].legend()
    figure.supxlabel("batch x context")
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("attention"), help="folder for attention.json and .png")
    known = ", ".join(ATTENTION_PEERS)
    parser.add_argument("--peers", help=f"all, or of {known}; by commas; default: those that suit the device")
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
    try:
        peers = suitable_peers(device) if options.peers is None else parse_attention_peers(options.peers)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    names = options.shapes.split(",") if options.shapes else [shape.name for shape in SHAPES]
    batches, contexts = GPU_GRID if cuda else CPU_GRID
    torch.manual_seed(0)
    bandwidth = read_bandwidth(device)
    report = {
        "schema": 3,
        "environment": describe_environment(device),
        "read_bandwidth": bandwidth,
        "page_size": PAGE_SIZE,
        "tolerance": {shape.name: shape.tolerance for shape in SHAPES},
        "plans": [],
        "rows": [],
    }
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s")
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[AttentionResult] = []
    with torch.no_grad():
        for shape in (shape for shape in SHAPES if shape.name in names):
            for context in chosen(options.contexts, contexts):
                for batch in chosen(options.batches, batches):
                    try:
                        problem = AttentionProblem(shape, batch, context, device)
                    except torch.OutOfMemoryError as error:
                        results.append(AttentionResult(shape.name, batch, context, "all", 0, note=str(error)[:80]))
                        continue
                    for result in compare_attention(peers, problem):
                        results.append(result)
                        print(line(result))
                    if cuda:
                        overhead = {"shape": shape.name, "batch": batch, "context": context}
                        report["plans"].append(overhead | {"plan_us": plan_us(problem)})
                    del problem
                    report["rows"] = [asdict(result) for result in results]
                    (options.out / "attention.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(results, options.out / "attention.png")
    if any(result.peer == "graphdecode" and result.us is None for result in results):
        raise SystemExit("graphdecode itself was left out of a point")


def line(result: AttentionResult) -> str:
    where = f"{result.shape:14} {result.batch:4} x {result.context:6}  {result.peer:14}"
    if result.us is None:
        return f"{where} left out: {result.note}"
    ratio = "" if result.times_graphdecode is None else f"{result.times_graphdecode:6.2f} x graphdecode"
    speed = f"{result.bytes_per_s / 1e9:8.1f} GB/s  {result.of_read_bandwidth:5.2f} of what the device reads"
    return f"{where} {result.us:10.1f} us {ratio} {speed}"


if __name__ == "__main__":
    main()
