"""A latency profile for people: a table, pictures, and one page that can be opened anywhere."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import Any

from rich.table import Table

_MISSING = "plots need matplotlib: pip install 'graphdecode[plot]'"


def profile_table(profile: dict) -> Table:
    """Return the figures of every bucket and context, each time next to its floor."""
    environment = profile["environment"]
    table = Table(title=f"decode step on {environment['device_name']}, {profile['backend']} backend")
    for column in (
        "bucket",
        "context",
        "launch us",
        "step ms p50",
        "p99",
        "token ms",
        "eager/replay",
        "GB/s",
        "x floor",
    ):
        table.add_column(column, justify="right")
    for row in profile["rows"]:
        table.add_row(
            str(row["bucket"]),
            str(row["context"]),
            f"{row['launch_us']['p50']:.0f}",
            f"{row['step_ms']['p50']:.3f}" + (" noisy" if row["noisy"] else ""),
            f"{row['step_ms']['p99']:.3f}",
            f"{row['token_ms']['p50']:.3f}",
            f"{row['replay_speedup']:.2f}x",
            f"{row['achieved_bytes_per_second'] / 1e9:.1f}",
            f"{row['times_floor']:.2f}",
        )
    return table


def plot_profile(profile: dict) -> dict[str, bytes]:
    """Return the pictures of a profile, name -> PNG.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(_MISSING) from error
    pictures = {}
    for name, draw in (
        ("latency", _draw_latency),
        ("padding", _draw_padding),
        ("replay", _draw_replay),
        ("histogram", _draw_histogram),
    ):
        figure = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained")
        draw(figure.add_subplot(), profile)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        pictures[name] = buffer.getvalue()
    return pictures


def _by_context(profile: dict) -> dict[int, list[dict]]:
    groups: dict[int, list[dict]] = {}
    for row in sorted(profile["rows"], key=lambda row: (row["context"], row["bucket"])):
        groups.setdefault(row["context"], []).append(row)
    return groups


def _draw_latency(axes: Any, profile: dict) -> None:
    for context, rows in _by_context(profile).items():
        buckets = [row["bucket"] for row in rows]
        line = axes.plot(buckets, [row["step_ms"]["p50"] for row in rows], "o-", label=f"context {context}")[0]
        floors = [row["floor_ms"] for row in rows]
        axes.plot(buckets, floors, "--", color=line.get_color(), label=f"floor at {context}")
    axes.set(xlabel="bucket (rows)", ylabel="step, median (ms)", title="Step time and the floor that memory sets")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _draw_padding(axes: Any, profile: dict) -> None:
    rows = next(iter(_by_context(profile).values()))
    cost = {row["bucket"]: row["step_ms"]["p50"] for row in rows}
    sizes = list(range(1, max(cost) + 1))
    buckets = [min(bucket for bucket in cost if bucket >= size) for size in sizes]
    axes.step(sizes, [1000 * cost[b] / size for b, size in zip(buckets, sizes, strict=True)], where="mid")
    axes.set(xlabel="batch size (rows)", ylabel="step time for each live row (us)")
    axes.set_title(f"The padding staircase, context {rows[0]['context']}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _draw_replay(axes: Any, profile: dict) -> None:
    rows = next(iter(_by_context(profile).values()))
    places = range(len(rows))
    axes.bar([p - 0.2 for p in places], [row["eager_ms"]["p50"] for row in rows], 0.4, label="eager")
    axes.bar([p + 0.2 for p in places], [row["step_ms"]["p50"] for row in rows], 0.4, label="replay")
    axes.set_xticks(list(places), [str(row["bucket"]) for row in rows])
    axes.set(xlabel="bucket (rows)", ylabel="step, median (ms)")
    axes.set_title(f"Eager against replay, context {rows[0]['context']}")
    axes.legend()
    axes.grid(alpha=0.3, axis="y")


def _draw_histogram(axes: Any, profile: dict) -> None:
    rows = next(iter(_by_context(profile).values()))
    for row in (rows[0], rows[-1]) if len(rows) > 1 else rows:
        shown = [sample for sample in row["samples_ms"] if sample <= 1.5 * row["step_ms"]["p90"]]
        axes.hist(shown, bins=40, alpha=0.6, label=f"bucket {row['bucket']}")
    axes.set(xlabel="step (ms)", ylabel="steps", title=f"Spread of step times, context {rows[0]['context']}")
    axes.legend()
    axes.grid(alpha=0.3)


def html_report(profile: dict, pictures: dict[str, bytes]) -> str:
    """Return one self-contained page with the figures and the pictures."""
    facts = "".join(
        f"<tr><th>{html.escape(str(key))}</th><td>{html.escape(str(value))}</td></tr>"
        for key, value in profile["environment"].items()
    )
    columns = [*("bucket", "context", "launch us", "step ms p50", "p90", "p99", "max"), "token ms", "eager/replay"]
    columns += ["GB/s", "floor ms", "x floor"]
    body = "".join(
        "<tr>"
        + "".join(
            f"<td>{value}</td>"
            for value in (
                row["bucket"],
                row["context"],
                f"{row['launch_us']['p50']:.1f}",
                *(f"{row['step_ms'][key]:.3f}" for key in ("p50", "p90", "p99", "max")),
                f"{row['token_ms']['p50']:.3f}",
                f"{row['replay_speedup']:.2f}",
                f"{row['achieved_bytes_per_second'] / 1e9:.1f}",
                f"{row['floor_ms']:.3f}",
                f"{row['times_floor']:.2f}" + (" (noisy)" if row["noisy"] else ""),
            )
        )
        + "</tr>"
        for row in profile["rows"]
    )
    heads = "".join(f"<th>{column}</th>" for column in columns)
    images = "".join(
        f'<figure><img alt="{name}" src="data:image/png;base64,{base64.b64encode(data).decode()}"></figure>'
        for name, data in pictures.items()
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>graphdecode latency profile</title>"
        "<style>body{font:15px system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em}"
        "table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .7em;border-bottom:1px solid #ccc;"
        "text-align:right}th{text-align:left}img{max-width:100%}figure{margin:1em 0}</style>"
        f"<h1>Latency profile</h1><p>Read bandwidth {profile['read_bandwidth'] / 1e9:.1f} GB/s, measured in the same "
        f"run; weights {profile['weight_bytes'] / 2**20:.1f} MiB; {profile['steps']} steps at each point.</p>"
        f"<table>{facts}</table><table><tr>{heads}</tr>{body}</table>{images}</html>"
    )


def write_report(profile: dict, folder: Path) -> list[Path]:
    """Write pictures and `report.html` beside `profile.json`; return what was written."""
    pictures = plot_profile(profile)
    written = []
    for name, data in pictures.items():
        path = folder / f"{name}.png"
        path.write_bytes(data)
        written.append(path)
    page = folder / "report.html"
    page.write_text(html_report(profile, pictures), encoding="utf-8")
    return [*written, page]
