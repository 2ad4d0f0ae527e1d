"""Clusters larger than any machine here, simulated: who should get a request, and how many replicas a day takes.

Steps cost what a committed profile measured; `cluster_model` says what is modelled, and its tests compare it with
queues whose figures are known.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster_model.load import arrivals, day, requests
from cluster_model.pictures import draw_day, draw_policies, draw_slack
from cluster_model.simulation import Bounds, Cluster, Outcome, Request, StepCosts, read_costs
from graphdecode.config.replicas import DOWNSCALING_FACTOR, target_requests
from harness import TOOLS, Out, write

PROFILE = TOOLS / "results" / "cpu-epyc-2" / "profile-llama-100m.json"
SIZES = (384, 128, 128)  # tokens of a beginning, of the prompt behind it, and of an answer in the mean
PREFIXES = 20_000
KEPT_PREFIXES = 64  # of 384 tokens in a replica's cache
POLICIES = ("random", "round robin", "least loaded", "prefix")
RATES = (2.0, 3.0, 4.0, 5.0, 6.0)  # requests a second and replica
SLACKS = (0, 2, 4, 8, 16, 32, 64)
DAY_S, DAY_MEAN, DAY_BURST = 86_400.0, 15.0, 3.0
FIXED = 14  # replicas, as the bursts of a day need
BURSTS = [(begin, begin + 300.0, DAY_BURST) for begin in (20_000.0, 43_000.0, 70_000.0)]
DRAWN_DAYS = ("fixed", "6 to 24", "2 to 24", "2 to 24, at once to fewer")
START_S = 10.0  # from the wish for a replica to its first request, as `tools/check replicas` measured it


def figures(done: Iterable[Request], seconds: float) -> dict[str, float]:
    """Return what users saw of the second half of the requests: in the first one caches fill."""
    half = [request for request in done if request.arrived > seconds / 2]
    first = sorted(1e3 * (request.first_token - request.arrived) for request in half)
    whole = sorted(request.finished - request.arrived for request in half)
    return {
        "requests": len(half),
        "hit_rate": statistics.fmean(request.cached for request in half),
        "ttft_ms_p50": first[len(first) // 2],
        "ttft_ms_p99": first[len(first) * 99 // 100],
        "whole_s_p50": whole[len(whole) // 2],
    }


def routed(costs: StepCosts, policy: str, replicas: int, rate: float, seconds: float, slack: int = 8) -> dict[str, Any]:
    """Return what came of one policy at a steady load; all policies get the same requests."""
    began = time.perf_counter()
    each = replicas * rate
    times = arrivals(lambda _: each, each, seconds, random.Random(1))
    asked = requests(times, prefixes=PREFIXES, sizes=SIZES, seed=2)
    cluster = Cluster(costs, policy, replicas, kept_prefixes=KEPT_PREFIXES, slack=slack)
    told = figures(cluster.run(asked).requests, seconds)
    about = {"policy": policy, "replicas": replicas, "rate_per_replica": rate, "slack": slack}
    print(about, told, f"{time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return about | told


def through_a_day(costs: StepCosts, name: str, replicas: int, bounds: Bounds | None) -> tuple[dict[str, Any], Outcome]:
    """Return what a day takes and what users saw of it."""
    peak = DAY_MEAN * 1.5 * DAY_BURST
    times = arrivals(day(DAY_MEAN, DAY_S, BURSTS), peak, DAY_S, random.Random(3))
    asked = requests(times, prefixes=PREFIXES, sizes=SIZES, seed=4)
    outcome = Cluster(costs, "prefix", replicas, kept_prefixes=KEPT_PREFIXES, bounds=bounds).run(asked)
    first = sorted(request.first_token - request.arrived for request in outcome.requests)
    told = {
        "name": name,
        "requests": len(first),
        "replica_hours": outcome.replica_seconds / 3600,
        "most_replicas": max(count for _, _, count in outcome.looks),
        "ttft_ms_p50": 1e3 * first[len(first) // 2],
        "ttft_ms_p99": 1e3 * first[len(first) * 99 // 100],
        "later_than_a_second": sum(each > 1.0 for each in first) / len(first),
    }
    print(told, file=sys.stderr, flush=True)
    return told, outcome


def days(costs: StepCosts) -> tuple[list[dict[str, Any]], dict[str, Outcome]]:
    """Return a day with so many replicas as its bursts need, and with as many as autoscaling takes.

    The last two scale as replicas do not: in one step to fewer, and to twice as many requests on each.
    """
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
        told, outcomes[name] = through_a_day(costs, name, replicas, bounds)
        rows.append(told)
    return rows, outcomes


def main(
    out: Out = None,
    pictures: Annotated[Path | None, typer.Option(help="A folder for the pictures.")] = None,
    profile: Annotated[Path, typer.Option(help="Of a model whose steps were measured.")] = PROFILE,
) -> None:
    """Simulate the routing policies at many loads, and a day with its bursts."""
    costs = read_costs(profile, sum(SIZES) - SIZES[2] // 2)
    steady = [routed(costs, policy, 100, rate, 120.0) for policy in POLICIES for rate in RATES]
    slacks = [routed(costs, "prefix", 100, 5.0, 120.0, slack) for slack in SLACKS]
    large = [routed(costs, policy, 1000, 4.0, 16.0) for policy in POLICIES]
    told, outcomes = days(costs)
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
        "days": told,
    }
    write(out, found)
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        draw_policies(steady, pictures / "routing-policies.svg")
        draw_slack(slacks, pictures / "routing-slack.svg")
        draw_day({name: outcomes[name] for name in DRAWN_DAYS}, pictures / "autoscaling-day.svg")
