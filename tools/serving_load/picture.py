"""The picture of a serving run: throughput against latency, and how full the batches were."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from graphdecode.errors import ArgumentError
from graphdecode.profiling.plots import new_figure

_FIRST_TOKEN = (
    ("ttft_ms", "p50", "first token, median", "C0", "o-"),
    ("ttft_ms", "p99", "first token, p99", "C0", "o--"),
    ("queue_ms", "p50", "of it in the queue, median", "C1", "s-"),
    ("queue_ms", "p99", "of it in the queue, p99", "C1", "s--"),
)
_NEXT_TOKENS = (
    ("itl_ms", "p50", "between tokens, median", "C2", "o-"),
    ("itl_ms", "p99", "between tokens, p99", "C2", "o--"),
    ("tpot_ms", "p50", "mean of an answer, median", "C3", "s-"),
    ("tpot_ms", "p99", "mean of an answer, p99", "C3", "s--"),
)
_LEAST_MS = 1e-3  # a logarithmic axis has no zero


def plot_serving(rows: Sequence[dict], title: str) -> bytes:
    """Return the picture of some loads as PNG.

    Args:
        rows: what `serve` returned, and the `load`'s name.
        title: over all.

    Raises:
        ValueError: matplotlib is not installed, or there are no rows.
    """
    if not rows:
        raise ArgumentError("there is no load to draw")
    ordered = sorted(rows, key=lambda row: row["offered_per_second"] or 0.0)
    figure = new_figure((13, 5))
    first, following, batches = figure.subplots(1, 3)
    _draw_latencies(first, ordered, _FIRST_TOKEN, "until the first token")
    _draw_latencies(following, ordered, _NEXT_TOKENS, "between tokens")
    _draw_batches(batches, ordered)
    for row in ordered:
        point = (row["tokens_per_second"], max(row["ttft_ms"]["p99"], _LEAST_MS))
        first.annotate(
            row["load"],
            point,
            textcoords="offset points",
            xytext=(0, 7),
            fontsize="small",
            ha="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
        )
    for axes in (first, following, batches):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(title)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_latencies(axes: Any, rows: Sequence[dict], kinds: Sequence[tuple[str, ...]], title: str) -> None:
    for kind, percentile, label, colour, style in kinds:
        points = [(row["tokens_per_second"], row[kind][percentile]) for row in rows if row[kind] is not None]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, np.maximum(y, _LEAST_MS), style, color=colour, label=label, markersize=4)
    axes.set(xlabel="throughput (tokens/s)", ylabel="latency (ms)", yscale="log", title=title)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlim(0, 1.1 * max(row["tokens_per_second"] for row in rows))
    axes.locator_params(axis="x", nbins=6)
    axes.margins(y=0.12)
    if axes.lines:
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2)


def _draw_batches(axes: Any, rows: Sequence[dict]) -> None:
    for row in rows:
        sizes = [int(size) for size in row["batch_sizes"]]
        steps = np.array(list(row["batch_sizes"].values()))
        shares = 100 * steps.cumsum() / steps.sum()
        axes.step([0, *sizes], [0, *shares], where="post", label=row["load"])
    axes.set(xlabel="live rows of a step, at most", ylabel="share of steps (%)", title="batch sizes")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 102)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=4)
