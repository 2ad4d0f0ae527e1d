"""A device that is not the current one: whatever reaches it makes it the current one first, and gives the other back.

No GPU is here: `torch.cuda.device` is a stand-in that keeps count, and tensors of a GPU have no memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from graphdecode import BucketConfig, GraphManager, Slot, StepBuffers
from graphdecode.buckets import StepShape
from graphdecode.buffers import Batch
from graphdecode.engine.loading import make_runner
from graphdecode.engine.prompts import PromptChunk
from graphdecode.engine.runner import LaunchPlan, Runner
from graphdecode.engine.steps import RowInputs, RowSampling
from graphdecode.graphs import table
from graphdecode.kernels.native.registration import Written, operator
from graphdecode.models import load_model

OTHER = torch.device("cuda:1")


class Devices:
    """Which device is the current one, and which was at each call that asked for it."""

    def __init__(self) -> None:
        self.current = 0
        self.seen: list[tuple[str, int]] = []

    @contextmanager
    def device(self, wanted: torch.device) -> Iterator[None]:
        outer, self.current = self.current, torch.device(wanted).index
        try:
            yield
        finally:
            self.current = outer

    def noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            self.seen.append((name, self.current))
            return call(*arguments, **options)

        return noted


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    made = Devices()
    monkeypatch.setattr(torch.cuda, "device", made.device)
    return made


class OnGPU(Tensor):
    """A tensor that says it is on a GPU, and has no memory."""

    @staticmethod
    def of(size: int) -> Tensor:
        return Tensor._make_wrapper_subclass(OnGPU, (size,), device=OTHER)

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> None:
        raise AssertionError("nothing computes with it")


class FakeEvent:
    def __init__(self) -> None:
        self.record = self.synchronize = lambda: None


@pytest.fixture(params=[1, 4], ids=lambda steps: f"steps_per_launch={steps}")
def runner(request: pytest.FixtureRequest, devices: Devices, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """A runner that takes its model to be on another device than the current one."""
    config = BucketConfig(max_batch_size=2, max_sequence_length=64, steps_per_launch=request.param)
    made = make_runner(load_model("demo", device="cpu"), config)
    made.graphs.capture(progress=False, kinds=["steps"])
    calls = {
        made.model: ["prefill"],
        made.step: ["stage", "stage_pages", "read", "rewind"],
        made.graphs: ["run", "close"],
    }
    for owner, names in calls.items():
        for name in names:
            monkeypatch.setattr(owner, name, devices.noting(name, getattr(owner, name)))
    monkeypatch.setattr(torch.cuda, "Event", devices.noting("event", FakeEvent))
    monkeypatch.setattr(torch.cuda, "synchronize", devices.noting("synchronize", lambda _device: None))
    monkeypatch.setattr(made.model, "device", OTHER)
    monkeypatch.setattr(made, "is_cpu", False)
    return made


def test_every_entry_of_the_runner_makes_its_device_the_current_one(runner: Runner, devices: Devices) -> None:
    chunks = [PromptChunk([97, 98, 99], 0, (0,))]
    runner.stage(chunks=chunks)
    runner.launch(LaunchPlan.of_chunks(chunks))
    runner.stage([RowInputs([97, 98, 99, 100], 4, (0,), RowSampling())])
    with runner.device_guard():
        runner.step.stage_pages([(0, 1)])
    assert runner.read(runner.launch(LaunchPlan(StepShape(1))))[0].tokens[0] >= 0
    with pytest.raises(ValueError, match="batch"):
        runner.launch(LaunchPlan(StepShape(3)))
    runner.close()
    # staging rows stages their pages
    entries = ["run", "prefill", "stage", "stage_pages", "stage_pages", "run", "event", "read", "run", "rewind"]
    assert devices.seen == [(name, 1) for name in [*entries, "synchronize", "close"]]
    assert devices.current == 0


def test_an_operator_launches_on_the_device_of_its_tensors(devices: Devices) -> None:
    @operator(triton_version=devices.noting("launch", lambda *_: None))
    def launched_for_a_test(out: Written[Tensor], x: Tensor) -> None:
        """Stand for an operator with a kernel."""

    with torch._C._DisableTorchDispatch():  # straight to what is registered for a GPU
        launched_for_a_test(OnGPU.of(2), OnGPU.of(2))
    assert devices.seen == [("launch", 1)]
    assert devices.current == 0


def test_a_step_runs_on_the_device_of_its_slots_eagerly_and_when_it_is_captured(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = StepBuffers([Slot("x", ("batch",), torch.float32)], max_batch_size=2, device="cpu")

    def step(batch: Batch) -> None:
        batch.x.add_(1)

    manager = GraphManager(devices.noting("step", step), buffers, [1, 2])
    monkeypatch.setattr(buffers, "device", OTHER)
    manager.capture(progress=False)
    manager.run_eager(1)
    assert {device for _, device in devices.seen} == {1}
    devices.seen.clear()
    monkeypatch.setattr(table, "run", devices.noting("run", table.run))
    manager.replay(2)
    manager.close()
    assert devices.current == 0
