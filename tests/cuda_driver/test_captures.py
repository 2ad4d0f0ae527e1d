"""Captures of single steps over the stand-in driver: what they launch, and how they fail. See also the random lives."""

from __future__ import annotations

import time

import pytest
import torch
from cuda_driver.counting import MAX_STEPS, Counting
from cuda_driver.life import Failing
from cuda_driver.stand_in import Driver
from cuda_driver.torch_device import Device

from graphdecode import CaptureError, GraphManager
from graphdecode.buffers import Batch
from graphdecode.graphs import Loop

CAPACITY = 4


def manager_of(counting: Counting, ladder: list[int], loop: Loop | None = None) -> GraphManager:
    return GraphManager(counting.step, counting.buffers, ladder, constants=[counting.weight], loop=loop)


def test_each_bucket_is_one_capture_and_each_replay_one_launch(device: Device, driver: Driver) -> None:
    graphs = manager_of(Counting(CAPACITY), [2, CAPACITY])
    driver.forget_calls()
    graphs.capture(progress=False)
    assert driver.calls().count("cuStreamBeginCapture") == driver.calls().count("cuGraphInstantiate") == 2
    driver.forget_calls()
    graphs.replay(3)
    driver.forget_calls()  # padding was written
    assert graphs.replay(3) == CAPACITY
    assert driver.calls() == ["cuGraphLaunch"]
    graphs.close()


def test_a_step_that_fails_under_capture_is_blamed_with_its_line(device: Device) -> None:
    counting = Failing(CAPACITY)
    for counting.failure in ("waits and goes on", "raises"):
        with pytest.raises(CaptureError) as caught:
            manager_of(counting, [CAPACITY]).capture(progress=False)
        assert (caught.value.kind, caught.value.operator) == ("failed", "aten.copy_.default")
        assert device.current == device.default
    assert caught.value.file == Failing.step.__code__.co_filename


def test_an_epilogue_that_fails_under_capture_leaves_no_graph(device: Device, driver: Driver) -> None:
    counting = Counting(CAPACITY)

    def epilogue(batch: Batch) -> None:
        counting.epilogue(batch)
        if torch.cuda.current_stream().is_capturing():
            raise ValueError("not this time")

    graphs = manager_of(counting, [2, CAPACITY], Loop(MAX_STEPS, epilogue=epilogue))
    with pytest.raises(CaptureError, match="not this time"):
        graphs.capture(progress=False)
    assert not [line for line in driver.alive() if line.startswith(("graph", "exec"))]


def test_hazards_are_refused_before_any_capture_begins(device: Device, driver: Driver) -> None:
    counting = Counting(CAPACITY)
    with pytest.raises(CaptureError) as caught:
        GraphManager(lambda batch: batch.x.add_(batch.x.sum().item()), counting.buffers, [CAPACITY]).capture(False)
    assert caught.value.kind == "host-read"
    assert "cuStreamBeginCapture" not in driver.calls()


def test_the_time_of_a_capture_does_not_include_reading_the_graph(device, monkeypatch):
    now, snapshot, hours = time.perf_counter, torch.cuda.memory_snapshot, list[int]()
    monkeypatch.setattr(time, "perf_counter", lambda: now() + 3600 * len(hours))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: hours.append(1) or snapshot())
    graphs = manager_of(Counting(CAPACITY), [CAPACITY])
    (bucket,) = graphs.capture(progress=False).buckets
    assert hours
    assert 0 <= bucket.instantiate_ms <= bucket.capture_ms < 3_600_000
    graphs.close()
