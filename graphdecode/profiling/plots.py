"""Pictures of a latency profile."""

from __future__ import annotations

import io
import itertools
from typing import Any

import numpy as np

from graphdecode.errors import ArgumentError

MISSING = "plots need matplotlib: pip install 'graphdecode[plot]'"
_TICKED_BUCKETS = 12
_LINEAR_SPAN = 16  # where the largest value is further from the least, linear axes show only the largest


def plot_profile(profile: dict) -> dict[str, bytes]:
    """Return the pictures of a profile, name -> PNG.

    Raises:
        ValueError: matplotlib is not installed.
    """
    pictures = {}
    for name, draw in (
        ("latency", draw_latency),
        ("padding", draw_padding),
        ("replay", _draw_replay),
        ("histogram", _draw_histogram),
    ):
        figure = new_figure((7.5, 4.5))
        draw(figure, profile)
        for axes in figure.axes:
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        pictures[name] = buffer.getvalue()
    return pictures


def new_figure(inches: tuple[float, float]) -> Any:
    """Return an empty figure, as all pictures are made.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError(MISSING) from error
    return Figure(figsize=inches, dpi=110, layout="constrained")


def _by_context(profile: dict) -> dict[int, list[dict]]:
    groups: dict[int, list[dict]] = {}
    for row in sorted(profile["rows"], key=lambda row: (row["context"], row["bucket"])):
        groups.setdefault(row["context"], []).append(row)
    return groups


def _shown_context(profile: dict) -> list[dict]:
    """Return the rows of the shortest context, which pictures of one context show."""
    return next(iter(_by_context(profile).values()))


def draw_latency(figure: Any, profile: dict) -> None:
    """Draw step time over buckets, a line for each context, beside the floor."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes = figure.add_subplot()
    drawn, low, high = [], np.inf, 0.0
    for context, rows in _by_context(profile).items():
        buckets = [row["bucket"] for row in rows]
        steps = np.array([row["step_ms"]["p50"] for row in rows])
        below = [step - min(row["round_ms"]) for step, row in zip(steps, rows, strict=True)]
        above = [max(row["round_ms"]) - step for step, row in zip(steps, rows, strict=True)]
        reach = np.maximum([below, above], 0.0)
        bars = axes.errorbar(buckets, steps, reach, fmt="o-", markersize=4, elinewidth=1, label=f"context {context}")
        within = " (fits the cache)" if all(row["in_cache"] for row in rows) else ""
        floors = [row["floor_ms"] for row in rows]
        label = f"floor at {context}{within}"
        drawn += [bars, *axes.plot(buckets, floors, "--", color=bars[0].get_color(), label=label)]
        low, high = min(low, *steps, *floors), max(high, *steps, *floors)
    axes.set(xlabel="bucket (rows)", ylabel="step (ms): median, and medians of rounds")
    axes.set_title(f"Step time, and the floor at {profile['read_bandwidth'] / 1e9:.1f} GB/s read from memory")
    if max(high / low, buckets[-1] / buckets[0]) > _LINEAR_SPAN:
        axes.set(xscale="log", yscale="log")
        axes.set_xticks([bucket for bucket in buckets if bucket & (bucket - 1) == 0 or bucket == buckets[-1]])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
    else:
        _tick_buckets(axes, buckets)
        axes.set_ylim(bottom=0)
    axes.legend(handles=drawn, fontsize="small", loc="upper left")


def _tick_buckets(axes: Any, buckets: list[int]) -> None:
    """Name the buckets themselves where they do not crowd one another."""
    apart = min((b - a for a, b in itertools.pairwise(buckets)), default=1)
    if len(buckets) <= _TICKED_BUCKETS and apart * 25 >= buckets[-1]:
        axes.set_xticks(buckets)


def draw_padding(figure: Any, profile: dict) -> None:
    """Draw which step time each batch size pays, and what of it is padding."""
    axes = figure.add_subplot()
    rows = _shown_context(profile)
    cost = {row["bucket"]: row["step_ms"]["p50"] for row in rows}
    buckets = list(cost)
    sizes = np.arange(1, buckets[-1] + 1)
    taken = np.array([cost[min(bucket for bucket in cost if bucket >= size)] for size in sizes])
    own = np.interp(sizes, buckets, list(cost.values()))
    padded = len(buckets) < len(sizes)
    if padded:
        axes.bar(
            sizes, taken - own, 1.0, bottom=own, alpha=0.25, label="cost of padding (between buckets: interpolated)"
        )
    axes.step(sizes, taken, where="mid", label="step of the bucket that a batch runs in")
    axes.plot(buckets, list(cost.values()), "o", color="black", markersize=4, label="bucket")
    axes.set(xlabel="batch size (live rows)", ylabel="step, median (ms)")
    none = "" if padded else ": no padding, every batch size is a bucket"
    axes.set_title(f"The padding staircase, context {rows[0]['context']}{none}")
    _tick_buckets(axes, buckets)
    axes.set_ylim(0, 1.08 * max(cost.values()))
    axes.legend(fontsize="small", loc="lower right")


def _draw_replay(figure: Any, profile: dict) -> None:
    axes = figure.add_subplot()
    rows = _shown_context(profile)
    places = np.arange(len(rows))
    eager = axes.bar(places - 0.2, [row["eager_ms"]["p50"] for row in rows], 0.4, label="eager")
    axes.bar(places + 0.2, [row["step_ms"]["p50"] for row in rows], 0.4, label="replay")
    labels = [f"{row['replay_speedup']:.1f}x" for row in rows]
    axes.bar_label(eager, labels, fontsize="small" if len(rows) <= _TICKED_BUCKETS else "xx-small", padding=2)
    axes.set_xticks(places, [str(row["bucket"]) for row in rows])
    axes.set(xlabel="bucket (rows)", ylabel="step, median (ms)")
    axes.set_title(f"Eager against replay and their ratio, context {rows[0]['context']}")
    axes.margins(y=0.1)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_histogram(figure: Any, profile: dict) -> None:
    rows = _shown_context(profile)
    chosen = [rows[0], rows[-1]] if len(rows) > 1 else rows
    panels = figure.subplots(1, len(chosen), sharey=True, squeeze=False)[0]
    for axes, row in zip(panels, chosen, strict=True):
        histogram = row["histogram_ms"]
        edges = np.linspace(histogram["low"], histogram["high"], len(histogram["counts"]) + 1)
        axes.stairs(histogram["counts"], edges, fill=True, alpha=0.7)
        axes.axvline(
            row["step_ms"]["p50"], color="black", linewidth=0.9, label=f"median {row['step_ms']['p50']:.3g} ms"
        )
        above = f"; slower ones: {histogram['above']}" if histogram["above"] else ""
        axes.set(xlabel=f"step (ms){above}", title=f"bucket {row['bucket']}")
        axes.locator_params(axis="x", nbins=5)
        axes.legend(fontsize="small")
    panels[0].set_ylabel(f"steps, of {profile['steps']}")
    figure.suptitle(f"Spread of step times, context {rows[0]['context']}")
