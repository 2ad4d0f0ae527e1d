"""Simulated clusters: routing policies, and autoscaling over a day.

Step times come from a committed profile; `cluster_model` says what is modelled, and its tests compare it with known
queues.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer
from matplotlib import pyplot as plt

from cluster_model import Bounds, Cluster, Outcome, Request, StepCosts, arrivals, day, read_costs, requests
from graphdecode.config.settings import DOWNSCALING_FACTOR, target_requests
from harness import TOOLS, Out, write

PROFILE = TOOLS / "results" / "cpu-epyc-2" / "profile-llama-100m.json"
SIZES = (384, 128, 128)  # mean tokens of a shared prefix, of the rest of the prompt, and of an output
PREFIXES = 20_000
KEPT_PREFIXES = 64  # prefixes of 384 tokens in a replica's cache
POLICIES = ("random", "round robin", "least loaded", "prefix")
RATES = (2.0, 3.0, 4.0, 5.0, 6.0)  # requests per second and replica
SLACKS = (0, 2, 4, 8, 16, 32, 64)
DAY_S, DAY_MEAN, DAY_BURST = 86_400.0, 15.0, 3.0
FIXED = 14  # replicas for the bursts of a day
BURSTS = [(begin, begin + 300.0, DAY_BURST) for begin in (20_000.0, 43_000.0, 70_000.0)]
DRAWN_DAYS = ("fixed", "6 to 24", "2 to 24", "2 to 24, at once to fewer")
STYLE: Any = {"svg.hashsalt": "graphdecode", "svg.fonttype": "none", "font.size": 9, "axes.grid": True}
STYLE |= {"grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white"}
_POINTS = 600  # of a day, at most
_SIZE = (8.0, 3.2)
START_S = 10.0  # from the decision to a replica's first request, measured by `tools/check replicas`


def percentile(values: Iterable[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) * percent // 100]


def figures(done: Iterable[Request], seconds: float) -> dict[str, float]:
    """Return latencies of the second half of the requests; caches fill during the first."""
    half = [request for request in done if request.arrived > seconds / 2]
    first = [1e3 * (request.first_token - request.arrived) for request in half]
    return {
        "requests": len(half),
        "hit_rate": statistics.fmean(request.cached for request in half),
        "ttft_ms_p50": percentile(first, 50),
        "ttft_ms_p99": percentile(first, 99),
        "whole_s_p50": percentile((request.finished - request.arrived for request in half), 50),
    }


def routed(costs: StepCosts, policy: str, replicas: int, rate: float, seconds: float, slack: int = 8) -> dict[str, Any]:
    """Return the figures of one policy at a steady load; all policies get the same requests."""
    began = time.perf_counter()
    each = replicas * rate
    times = arrivals(lambda _: each, each, seconds, random.Random(1))
    asked = requests(times, prefixes=PREFIXES, sizes=SIZES, seed=2)
    cluster = Cluster(costs, policy, replicas, kept_prefixes=KEPT_PREFIXES, slack=slack)
    row = figures(cluster.run(asked).requests, seconds)
    about = {"policy": policy, "replicas": replicas, "rate_per_replica": rate, "slack": slack}
    print(about, row, f"{time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return about | row


def through_a_day(costs: StepCosts, name: str, replicas: int, bounds: Bounds | None) -> tuple[dict[str, Any], Outcome]:
    peak = DAY_MEAN * 1.5 * DAY_BURST
    times = arrivals(day(DAY_MEAN, DAY_S, BURSTS), peak, DAY_S, random.Random(3))
    asked = requests(times, prefixes=PREFIXES, sizes=SIZES, seed=4)
    outcome = Cluster(costs, "prefix", replicas, kept_prefixes=KEPT_PREFIXES, bounds=bounds).run(asked)
    first = [request.first_token - request.arrived for request in outcome.requests]
    row = {
        "name": name,
        "requests": len(first),
        "replica_hours": outcome.replica_seconds / 3600,
        "most_replicas": max(count for _, _, count in outcome.looks),
        "ttft_ms_p50": 1e3 * percentile(first, 50),
        "ttft_ms_p99": 1e3 * percentile(first, 99),
        "later_than_a_second": sum(each > 1.0 for each in first) / len(first),
    }
    print(row, file=sys.stderr, flush=True)
    return row, outcome


def days(costs: StepCosts) -> tuple[list[dict[str, Any]], dict[str, Outcome]]:
    """Return a day with a fixed number of replicas and with autoscaling; the last two are for comparison."""
    rows, outcomes = [], {}
    scaled = Bounds(6, 24, target_requests(costs.max_rows), 10.0, 300.0, START_S, downscaling_factor=DOWNSCALING_FACTOR)
    for name, bounds in (
        ("fixed", None),
        ("2 to 24", replace(scaled, least=2)),
        ("6 to 24", scaled),
        ("6 to 24, two minutes to start", replace(scaled, start_s=120.0)),
        ("2 to 24, at once to fewer", replace(scaled, least=2, downscaling_factor=1.0)),
        ("2 to 24, twice the target", replace(scaled, least=2, target=2 * scaled.target)),
    ):
        replicas = FIXED if bounds is None else bounds.least
        row, outcomes[name] = through_a_day(costs, name, replicas, bounds)
        rows.append(row)
    return rows, outcomes


def draw_policies(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
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


def main(
    out: Out = None,
    pictures: Annotated[Path | None, typer.Option(help="A folder for the pictures.")] = None,
    profile: Annotated[Path, typer.Option(help="Of a model whose steps were measured.")] = PROFILE,
) -> None:
    costs = read_costs(profile, sum(SIZES) - SIZES[2] // 2)
    steady = [routed(costs, policy, 100, rate, 120.0) for policy in POLICIES for rate in RATES]
    slacks = [routed(costs, "prefix", 100, 5.0, 120.0, slack) for slack in SLACKS]
    large = [routed(costs, policy, 1000, 4.0, 16.0) for policy in POLICIES]
    rows, outcomes = days(costs)
    found = {
        "schema": 1,
        "profile": profile.name,
        "sizes": SIZES,
        "prefixes": PREFIXES,
        "kept_prefixes": KEPT_PREFIXES,
        "step_ms_of_all_rows": 1e3 * costs.step_s[-1],
        "prompt_token_ms": 1e3 * costs.prompt_token_s,
        "policies": steady,
        "slacks": slacks,
        "thousand": large,
        "days": rows,
    }
    write(out, found)
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        mpl.use("svg")
        mpl.rcParams |= STYLE
        draw_policies(steady, pictures / "routing-policies.svg")
        draw_slack(slacks, pictures / "routing-slack.svg")
        draw_day({name: outcomes[name] for name in DRAWN_DAYS}, pictures / "autoscaling-day.svg")
