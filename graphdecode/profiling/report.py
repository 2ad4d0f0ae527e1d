"""A latency profile for people: tables for a terminal, and one page that can be opened anywhere."""

from __future__ import annotations

import base64
import html
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from graphdecode.profiling.plots import plot_profile
from graphdecode.profiling.profile_row import NOISY

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
    """Write `report.html` beside `profile.json`, and the pictures; return what was written.

    Args:
        profile: what `LatencyProfiler.profile` returned.
        folder: an existing folder.
        draw: pictures too.

    Raises:
        ValueError: pictures are wanted and matplotlib is not installed.
    """
    pictures = plot_profile(profile) if draw else {}
    written = []
    for name, data in pictures.items():
        path = folder / f"{name}.png"
        path.write_bytes(data)
        written.append(path)
    page = folder / "report.html"
    page.write_text(html_report(profile, pictures), encoding="utf-8")
    return [*written, page]
