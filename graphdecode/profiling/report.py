"""A latency profile for people: tables for a terminal, pictures, and one page that can be opened anywhere."""

from __future__ import annotations

import base64
import html
import io
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from graphdecode.errors import ArgumentError
from graphdecode.profiling.latency import NOISY

MISSING = "plots need matplotlib: pip install 'graphdecode[plot]'"
_TICKED_BUCKETS = 12
_LINEAR_SPAN = 16  # where the largest value is further from the least, linear axes show only the largest
_CAPTIONS = {
    "latency": "Step time of each bucket, from the quickest to the slowest round, and the floor: the bytes that a step "
    "must move over the read bandwidth.",
    "padding": "What a batch costs that has to run in a larger bucket.",
    "replay": "The same step run operator by operator, and replayed.",
    "histogram": "How the steps of the smallest and the largest bucket spread.",
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
    """Return an empty figure; raises `ArgumentError` without matplotlib."""
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


def time_columns(profile: dict) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the durations: four percentiles of launch, step, and launch to token."""
    heads = ["bucket", "context"]
    kinds = (("launch_us", "launch us", 1), ("step_ms", "step ms", 3), ("token_ms", "token ms", 3))
    for _, title, _ in kinds:
        heads += [f"{title} p50", "p90", "p99", "max"]
    rows = []
    for row in profile["rows"]:
        cells = [str(row["bucket"]), str(row["context"])]
        for kind, _, digits in kinds:
            cells += [_short(row[kind][key], digits) for key in ("p50", "p90", "p99", "max")]
        rows.append(cells)
    return heads, rows


def _short(value: float, digits: int) -> str:
    """Return a number with so many digits after the point, fewer where there are many before it."""
    return f"{value:.{max(digits - max(len(str(int(value))) - 2, 0), 0)}f}"


def floor_columns(profile: dict) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of what the step stands next to: the same step eagerly, and memory's floor."""
    heads = ["bucket", "context", "step ms", "eager ms", "eager/ replay", "MB moved", "GB/s", "of bandwidth"]
    heads += ["floor ms", "over floor ms", "times floor", "noise"]
    rows = []
    for row in profile["rows"]:
        step = row["step_ms"]["p50"]
        rows.append(
            [
                str(row["bucket"]),
                str(row["context"]),
                f"{step:.3f}",
                f"{row['eager_ms']['p50']:.3f}",
                f"{row['replay_speedup']:.2f}" + "?" * (row["eager_noise"] > NOISY),
                f"{row['bytes_moved'] / 1e6:.1f}",
                f"{row['achieved_bytes_per_second'] / 1e9:.1f}",
                "in cache" if row["in_cache"] else f"{100 * row['bandwidth_share']:.0f}%",
                f"{row['floor_ms']:.3f}",
                f"{step - row['floor_ms']:.3f}",
                f"{row['times_floor']:.2f}" + "*" * row["in_cache"],
                f"{100 * row['noise']:.1f}%" + " noisy" * row["noisy"],
            ]
        )
    return heads, rows


def capture_columns(profile: dict) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of what was captured."""
    rows = [
        [str(b["bucket"]), b["state"], str(sum(b["nodes"].values())), f"{b['capture_ms']:.1f}", str(b["pool_bytes"])]
        for b in profile["captures"]["buckets"]
    ]
    return ["bucket", "state", "nodes", "capture ms", "pool bytes"], rows


def summary(profile: dict) -> list[str]:
    """Return sentences on the bandwidth, the cache and the noise of a profile."""
    rounds = profile["read_bandwidth_rounds"]
    lines = [
        f"{profile['model']} {profile['dtype']} on {profile['environment']['device_name']}, "
        f"{profile['backend']} backend" + "; the launch is the work" * (profile["backend"] == "recorded"),
        f"read bandwidth {profile['read_bandwidth'] / 1e9:.1f} GB/s, measured in turn with the steps "
        f"({min(rounds) / 1e9:.1f} to {max(rounds) / 1e9:.1f}); weights {profile['weight_bytes'] / 2**20:.1f} MiB; "
        f"{profile['steps']} steps at each point, in {profile['rounds']} rounds",
    ]
    rows = profile["rows"]
    if any(row["in_cache"] for row in rows):
        size = profile["environment"]["cache_bytes"] / 2**20
        lines.append(
            f"* a step moves less than the last cache's {size:.0f} MiB, and may be quicker than memory's floor"
        )
    unsure = sum(row["eager_noise"] > NOISY for row in rows)
    if unsure:
        lines.append(f"? the eager steps were too noisy to tell the ratio to a tenth at {unsure} of {len(rows)} points")
    noise, noisy = statistics.median(row["noise"] for row in rows), [row for row in rows if row["noisy"]]
    lines.append(
        f"noise: medians of rounds lie {100 * noise:.1f}% apart at the middle point, "
        f"{100 * max(row['noise'] for row in rows):.1f}% at the worst"
    )
    if noisy:
        lines.append(
            f"too noisy to tell at {len(noisy)} of {len(rows)} points: the machine was busy; "
            "do not trust a difference of a tenth there"
        )
    return lines


def profile_tables(profile: dict) -> list[Table]:
    """Return the figures of every bucket and context for a terminal, each time next to its floor."""
    return [
        _table("host launch, step, and launch to token", *time_columns(profile)),
        _table("eager step and floor", *floor_columns(profile)),
        _table("captures", *capture_columns(profile)),
    ]


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, justify="right", min_width=max(map(len, head.split())), no_wrap=head == "noise")
    for row in rows:
        table.add_row(*row)
    return table


def html_report(profile: dict, pictures: dict[str, bytes]) -> str:
    """Return one self-contained page with the figures and the pictures."""
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
        f"<h2>Captures</h2>{_html_table(*capture_columns(profile))}"
        f"<h2>Measured on</h2><table class=facts>{facts}</table></html>"
    )


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"


def write_report(profile: dict, folder: Path, *, draw: bool = True) -> list[Path]:
    """Write `report.html` beside `profile.json`, and the pictures (see `new_figure`) if `draw`; return their paths."""
    pictures = plot_profile(profile) if draw else {}
    written = []
    for name, data in pictures.items():
        path = folder / f"{name}.png"
        path.write_bytes(data)
        written.append(path)
    page = folder / "report.html"
    page.write_text(html_report(profile, pictures), encoding="utf-8")
    return [*written, page]
