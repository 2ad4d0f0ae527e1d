"""A latency profile as tables for a terminal, pictures, and a self-contained page."""

from __future__ import annotations

import base64
import html
import io
import itertools
import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from graphdecode.errors import ArgumentError
from graphdecode.profiling.latency import NOISY

MISSING = "plots need matplotlib: pip install 'graphdecode[plot]'"
_TICKED_BUCKETS = 12
_LINEAR_SPAN = 16  # ratio of largest to smallest value above which axes are logarithmic
_CAPTIONS = {
    "latency": "Step time of each bucket, from the quickest to the slowest round, and the floor: the bytes that a step "
    "must move over the read bandwidth.",
    "padding": "What a batch costs that has to run in a larger bucket.",
}
_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;color:#222;margin:2em auto;max-width:84em;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0;font-variant-numeric:tabular-nums}"
    "td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right}td{white-space:nowrap}"
    "th{color:#555;font-weight:600;vertical-align:bottom}.facts th,.facts td{text-align:left;white-space:normal}"
    ".wide{overflow-x:auto}.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(34em,100%),1fr));gap:1em}"
    "figure{margin:0}img{max-width:100%}figcaption{color:#555;font-size:.9em}.noisy{color:#b00}"
)


def plot_profile(profile: dict) -> dict[str, bytes]:
    """Return the pictures of a profile, name -> PNG."""
    pictures = {}
    for name, draw in zip(_CAPTIONS, (draw_latency, draw_padding), strict=True):
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
    """Return an empty figure; raises `ArgumentError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError(MISSING) from error
    return Figure(figsize=inches, dpi=110, layout="constrained")


def _by_context(profile: dict) -> dict[int, list[dict]]:
    rows = sorted(profile["rows"], key=lambda row: (row["context"], row["bucket"]))
    return {context: list(group) for context, group in itertools.groupby(rows, key=lambda row: row["context"])}


def draw_latency(figure: Any, profile: dict) -> None:
    """Draw step time and floor over buckets, a line for each context."""
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
    """Put ticks at the buckets if there is room."""
    spacing = min((b - a for a, b in itertools.pairwise(buckets)), default=1)
    if len(buckets) <= _TICKED_BUCKETS and spacing * 25 >= buckets[-1]:
        axes.set_xticks(buckets)


def draw_padding(figure: Any, profile: dict) -> None:
    """Draw the step time of each batch size, and the part of it that is padding."""
    axes = figure.add_subplot()
    context, rows = next(iter(_by_context(profile).items()))  # the shortest
    cost = {row["bucket"]: row["step_ms"]["p50"] for row in rows}
    buckets, steps = list(cost), list(cost.values())
    sizes = np.arange(1, buckets[-1] + 1)
    padded_ms = np.array([cost[min(bucket for bucket in cost if bucket >= size)] for size in sizes])
    unpadded_ms = np.interp(sizes, buckets, steps)
    padded = len(buckets) < len(sizes)
    if padded:
        label = "cost of padding (between buckets: interpolated)"
        axes.bar(sizes, padded_ms - unpadded_ms, 1.0, bottom=unpadded_ms, alpha=0.25, label=label)
    axes.step(sizes, padded_ms, where="mid", label="step of the bucket that a batch runs in")
    axes.plot(buckets, steps, "o", color="black", markersize=4, label="bucket")
    axes.set(xlabel="batch size (live rows)", ylabel="step, median (ms)")
    none = "" if padded else ": no padding, every batch size is a bucket"
    axes.set_title(f"The padding staircase, context {context}{none}")
    _tick_buckets(axes, buckets)
    axes.set_ylim(0, 1.08 * max(steps))
    axes.legend(fontsize="small", loc="lower right")


Columns = tuple[list[str], list[list[str]]]  # heads and rows


def time_columns(profile: dict) -> Columns:
    """Return four percentiles of launch, step, and launch to token."""
    kinds, keys = {"launch_us": 1, "step_ms": 3, "token_ms": 3}, ("p50", "p90", "p99", "max")  # digits of each
    heads = [f"{kind.replace('_', ' ')} {key}" if key == "p50" else key for kind in kinds for key in keys]
    rows = [
        [str(row["bucket"]), str(row["context"])]
        + [_short(row[kind][key], digits) for kind, digits in kinds.items() for key in keys]
        for row in profile["rows"]
    ]
    return ["bucket", "context", *heads], rows


def _short(value: float, digits: int) -> str:
    """Format a number with `digits` decimals, fewer if it is large."""
    return f"{value:.{max(digits - max(len(str(int(value))) - 2, 0), 0)}f}"


_FLOOR_COLUMNS: dict[str, Callable[[dict], str]] = {
    "bucket": lambda row: str(row["bucket"]),
    "context": lambda row: str(row["context"]),
    "step ms": lambda row: f"{row['step_ms']['p50']:.3f}",
    "eager ms": lambda row: f"{row['eager_ms']['p50']:.3f}",
    "eager/ replay": lambda row: f"{row['replay_speedup']:.2f}" + "?" * (row["eager_noise"] > NOISY),
    "MB moved": lambda row: f"{row['bytes_moved'] / 1e6:.1f}",
    "GB/s": lambda row: f"{row['achieved_bytes_per_second'] / 1e9:.1f}",
    "of bandwidth": lambda row: "in cache" if row["in_cache"] else f"{100 * row['bandwidth_share']:.0f}%",
    "floor ms": lambda row: f"{row['floor_ms']:.3f}",
    "over floor ms": lambda row: f"{row['step_ms']['p50'] - row['floor_ms']:.3f}",
    "times floor": lambda row: f"{row['times_floor']:.2f}" + "*" * row["in_cache"],
    "noise": lambda row: f"{100 * row['noise']:.1f}%" + " noisy" * row["noisy"],
}


def floor_columns(profile: dict) -> Columns:
    """Return step, eager step, and the floor by memory bandwidth."""
    return list(_FLOOR_COLUMNS), [[cell(row) for cell in _FLOOR_COLUMNS.values()] for row in profile["rows"]]


def _capture_columns(profile: dict) -> Columns:
    rows = [
        [str(b["bucket"]), b["state"], str(sum(b["nodes"].values())), f"{b['capture_ms']:.1f}", str(b["pool_bytes"])]
        for b in profile["captures"]["buckets"]
    ]
    return ["bucket", "state", "nodes", "capture ms", "pool bytes"], rows


def summary(profile: dict) -> list[str]:
    """Return sentences on the bandwidth, the cache and the noise of a profile."""
    rows, rounds, environment = profile["rows"], profile["read_bandwidth_rounds"], profile["environment"]
    lines = [
        f"{profile['model']} {profile['dtype']} on {environment['device_name']}, "
        f"{profile['backend']} backend" + "; the launch is the work" * (profile["backend"] == "recorded"),
        f"read bandwidth {profile['read_bandwidth'] / 1e9:.1f} GB/s, measured between the steps "
        f"({min(rounds) / 1e9:.1f} to {max(rounds) / 1e9:.1f}); weights {profile['weight_bytes'] / 2**20:.1f} MiB; "
        f"{profile['steps']} steps at each point, in {profile['rounds']} rounds",
    ]
    if any(row["in_cache"] for row in rows):
        size = f"{environment['cache_bytes'] / 2**20:.0f} MiB"
        lines.append(f"* a step moves less than the last-level cache's {size}, and may be faster than the floor")
    if unsure := sum(row["eager_noise"] > NOISY for row in rows):
        lines.append(f"? the eager steps are too noisy for a ratio within 10% at {unsure} of {len(rows)} points")
    noise = [row["noise"] for row in rows]
    lines.append(
        f"noise: medians of rounds lie {100 * statistics.median(noise):.1f}% apart at the middle point, "
        f"{100 * max(noise):.1f}% at the worst"
    )
    if noisy := sum(row["noisy"] for row in rows):
        lines.append(
            f"too noisy to tell at {noisy} of {len(rows)} points: the machine was busy; "
            "do not trust differences of 10% there"
        )
    return lines


def profile_tables(profile: dict, width: int) -> list[Table]:
    """Return the figures of every bucket and context for a terminal, each time next to its floor.

    A table wider than the terminal is split into several, each with bucket and context.
    """
    titles = {
        "host launch, step, and launch to token": time_columns,
        "eager step and floor": floor_columns,
        "captures": _capture_columns,
    }
    tables = []
    for title, columns in titles.items():
        heads, rows = columns(profile)
        widths = [max(map(len, (*head.split(), *cells))) for head, *cells in zip(heads, *rows, strict=True)]
        for part in _parts(heads, widths, width):
            table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
            for index in part:
                table.add_column(textwrap.fill(heads[index], widths[index]), justify="right")
            for row in rows:
                table.add_row(*(row[index] for index in part))
            tables.append(table)
    return tables


def _parts(heads: list[str], widths: list[int], width: int) -> list[list[int]]:
    """Assign columns to tables of at most `width`: the first two to each, percentiles with their median."""
    groups: list[list[int]] = []
    for index, head in enumerate(heads):
        if head in ("p90", "p99", "max"):
            groups[-1].append(index)
        else:
            groups.append([index])
    keys = groups[0] + groups[1]
    parts = [keys]
    for group in groups[2:]:
        if parts[-1] != keys and 1 + sum(widths[index] + 2 for index in parts[-1] + group) > width:
            parts.append(keys)
        parts[-1] = parts[-1] + group
    return parts


def _html_report(profile: dict, pictures: dict[str, bytes]) -> str:
    facts = "".join(
        f"<tr><th>{html.escape(key.replace('_', ' '))}</th><td>{html.escape(str(value))}</td></tr>"
        for key, value in profile["environment"].items()
    )
    images = "".join(
        f'<figure><img alt="{name}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        f"<figcaption>{_CAPTIONS[name]}</figcaption></figure>"
        for name, data in pictures.items()
    )
    title = html.escape(f"Latency profile of {profile['model']}")
    sentences = "".join(
        f"<p{' class=noisy' if line.startswith('too noisy') else ''}>{html.escape(line)}.</p>"
        for line in summary(profile)
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>{sentences}"
        f"<div class=pictures>{images}</div>"
        f"<h2>Times</h2>{_html_table(*time_columns(profile))}"
        f"<h2>Eager step and floor</h2>{_html_table(*floor_columns(profile))}"
        f"<h2>Captures</h2>{_html_table(*_capture_columns(profile))}"
        f"<h2>Measured on</h2><table class=facts>{facts}</table></html>"
    )


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"


def write_report(profile: dict, folder: Path, *, draw: bool = True) -> list[Path]:
    """Write `report.html` beside `profile.json`, and the pictures (see `new_figure`) if `draw`; return their paths."""
    pictures = plot_profile(profile) if draw else {}
    written = [folder / f"{name}.png" for name in pictures] + [folder / "report.html"]
    for path, data in zip(written, (*pictures.values(), _html_report(profile, pictures).encode()), strict=True):
        path.write_bytes(data)
    return written
