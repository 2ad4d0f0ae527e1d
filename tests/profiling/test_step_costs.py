"""What a step costs: floors worked out by hand, variants that compute the same, gaps that a trace has."""

from pathlib import Path

import pytest
import torch

from benchmarks.step import EAGER, FULL, captured_variants, kernel_summary, measure_steps
from graphdecode.config import BucketConfig
from graphdecode.kernels.native import library as native
from graphdecode.profiling.latency import back_to_back_ms

ROOT = Path(__file__).parents[2]
# the demo model: 4 layers, d 128, 4 query and 2 key heads of 32, ff 384, vocabulary 259 (tied)
DEMO_WEIGHTS = 4 * (4 * (256 * 128 + 128 * 128 + 768 * 128 + 128 * 384 + 2 * 128) + 259 * 128 + 128)
DEMO_TOKEN_BYTES = 2 * 4 * 2 * 32 * 4


@pytest.fixture(scope="module")
def demo():
    return measure_steps(
        "demo", dtype="float32", batch_sizes=[1, 3], contexts=[5, 33], steps=4, rounds=1, progress=False
    )


def test_every_variant_is_measured_at_every_point(demo):
    variants = {FULL, EAGER, "without fused operators"}
    if torch.cuda.is_available():
        variants |= {"cuBLAS alone", "without early start"}
    elif native.library() is not None:
        variants |= {"without compiled kernels"}
    points = {(cost["variant"], cost["bucket"], cost["context"]) for cost in demo["costs"]}
    assert points == {(variant, bucket, context) for variant in variants for bucket in (1, 3) for context in (5, 33)}
    assert all(cost["step_ms"] > 0 and cost["host_us"] > 0 for cost in demo["costs"])
    assert [capture["bucket"] for capture in demo["captures"]] == [1, 3]


def test_the_floor_is_the_bytes_over_the_bandwidth(demo):
    assert demo["weight_bytes"] == pytest.approx(DEMO_WEIGHTS, rel=0.02)
    for cost in demo["costs"]:
        moved = demo["weight_bytes"] + cost["bucket"] * (cost["context"] + 1) * DEMO_TOKEN_BYTES
        assert cost["floor_ms"] == pytest.approx(1000 * moved / cost["read_bandwidth"])
        assert cost["times_floor"] == pytest.approx(cost["step_ms"] / cost["floor_ms"])


def test_the_variants_compute_the_same_step(demo):
    for cost in demo["costs"]:
        assert cost["logprob_error"] < 1e-4, cost["variant"]


def test_the_variants_share_one_cache():
    config = BucketConfig(max_batch_size=2, max_sequence_length=64)
    with captured_variants("demo", torch.device("cpu"), "float32", config) as runners:
        assert len(runners) >= 2
        places = {layer.keys.data_ptr() for runner in runners.values() for layer in runner.cache.layers}
        assert len(places) == runners[FULL].model.num_layers


def test_gaps_lie_between_kernels_that_do_not_overlap():
    kernels = [("b", 10.0, 14.0), ("a", 0.0, 8.0), ("a", 12.0, 20.0), ("c", 25.0, 26.0)]
    summary = kernel_summary(kernels, steps=2)
    assert summary["idle_us"] == (2 + 5) / 2
    assert summary["top_kernels_us"] == {"a": 8.0, "b": 2.0, "c": 0.5}
    assert summary["largest_gaps_us"][0] == {"us": 5.0, "after": "a", "before": "c"}
    assert kernel_summary([], steps=1) == {"top_kernels_us": {}, "idle_us": 0, "largest_gaps_us": []}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sizes": [0]}, r"must be >= 1, got \[0\]"),
        ({"contexts": []}, "must be >= 1"),
        ({"steps": 0}, "must be >= 1"),
        ({"model": "shape:llama-7t"}, "unknown shape"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        measure_steps(**{"model": "demo", "progress": False} | options)


def test_a_model_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr("benchmarks.step.free_bytes", lambda device: 2**30)
    with pytest.raises(ValueError, match=r"shape:llama-3.1-8b takes .* GiB, and 1.0 GiB are free"):
        measure_steps("shape:llama-3.1-8b", progress=False)


LAUNCH_MS, STEP_MS, HOLD_MS = 0.03, 0.1, 2.0


class Machine:
    """A host that launches, and a device that does one thing after the other, not before it was launched."""

    def __init__(self, launch_ms: float) -> None:
        self.host = self.device = 0.0
        self.launch_ms = launch_ms

    def run(self, milliseconds: float) -> None:
        self.device = max(self.device, self.host) + milliseconds

    def launch(self) -> None:
        self.host += self.launch_ms
        self.run(STEP_MS)

    def event(self, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)


class Event:
    """A point in the device's time."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def record(self) -> None:
        self.machine.run(0.0)
        self.at = self.machine.device

    def synchronize(self) -> None:
        self.machine.host = max(self.machine.host, self.at)

    def elapsed_time(self, later: "Event") -> float:
        return later.at - self.at


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Machine:
    machine = Machine(getattr(request, "param", LAUNCH_MS))
    monkeypatch.setattr(torch.cuda, "Event", machine.event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: machine.run(HOLD_MS))
    return machine


@pytest.mark.parametrize("machine", [LAUNCH_MS, STEP_MS], indirect=True)
def test_a_step_back_to_back_is_without_its_launch(machine: Machine) -> None:
    assert back_to_back_ms(machine.launch, 8) == pytest.approx([STEP_MS] * 8)


def test_an_unqueued_step_takes_as_long_as_the_slower_of_host_and_device(machine: Machine) -> None:
    machine.launch_ms = 3 * STEP_MS
    assert back_to_back_ms(machine.launch, 4, is_queued_first=False)[1:] == pytest.approx([machine.launch_ms] * 3)
    machine.launch_ms = LAUNCH_MS
    assert back_to_back_ms(machine.launch, 4, is_queued_first=False)[1:] == pytest.approx([STEP_MS] * 3)


def test_without_a_way_to_hold_the_device_the_first_step_alone_has_its_launch(machine, monkeypatch):
    monkeypatch.delattr(torch.cuda, "_sleep")
    first, *others = back_to_back_ms(machine.launch, 4)
    assert first == pytest.approx(STEP_MS + LAUNCH_MS)
    assert others == pytest.approx([STEP_MS] * 3)
