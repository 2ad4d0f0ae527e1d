"""Pictures of what was simulated, as SVG; the same figures give the same files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from cluster_model.simulation import Outcome

mpl.use("svg")
mpl.rcParams |= {"svg.hashsalt": "graphdecode", "svg.fonttype": "none", "font.size": 9, "axes.grid": True}
mpl.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "grid.alpha": 0.3, "figure.facecolor": "white"}

from matplotlib import pyplot as plt  # noqa: E402 (it takes what is set above)

_POINTS = 600  # of a day, at most
_SIZE = (8.0, 3.2)


def draw_policies(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw times to the first token and hits in the caches by load, for each policy."""
    figure, (left, right) = plt.subplots(1, 2, figsize=_SIZE)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        rates = [row["rate_per_replica"] for row in own]
        left.plot(rates, [row["ttft_ms_p99"] for row in own], marker="o", label=policy)
        right.plot(rates, [100 * row["hit_rate"] for row in own], marker="o", label=policy)
    left.set(yscale="log", xlabel="requests/s of each replica", ylabel="first token, ms (p99)")
    right.set(ylim=(0, 100), xlabel="requests/s of each replica", ylabel="beginnings found in the cache, %")
    left.legend()
    _save(figure, file)


def draw_slack(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw what it does to let a replica be ahead of the others for the sake of its cache."""
    figure, left = plt.subplots(figsize=(5.0, 3.0))
    right = left.twinx()
    slacks = [str(row["slack"]) for row in rows]
    times = left.plot(slacks, [row["ttft_ms_p99"] for row in rows], marker="o", label="first token, ms (p99)")
    hits = right.plot(slacks, [100 * row["hit_rate"] for row in rows], "C1", marker="s", label="found in the cache, %")
    left.set(xlabel="slack, requests", ylabel="first token, ms (p99)", ylim=(0, None))
    right.set(ylabel="beginnings found in the cache, %", ylim=(0, 100))
    right.grid(visible=False)
    left.legend(handles=[*times, *hits], loc="center right")
    _save(figure, file)


def draw_day(outcomes: Mapping[str, Outcome], file: Path) -> None:
    """Draw the requests under way and the replicas of a day."""
    figure, (top, below) = plt.subplots(2, 1, figsize=(8.0, 4.6), sharex=True)
    for name, outcome in outcomes.items():
        every = max(len(outcome.looks) // _POINTS, 1)
        chunks = [outcome.looks[start : start + every] for start in range(0, len(outcome.looks), every)]
        hours = [chunk[0][0] / 3600 for chunk in chunks]
        top.plot(hours, [max(count for _, count, _ in chunk) for chunk in chunks], label=name, linewidth=0.8)
        below.plot(hours, [max(count for _, _, count in chunk) for chunk in chunks], label=name, linewidth=0.8)
    top.set(ylabel="requests under way", yscale="log")
    below.set(xlabel="hour of the day", ylabel="replicas", ylim=(0, None))
    below.legend(ncols=2)
    _save(figure, file)


def _save(figure: Any, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
