"""A device that is not the current one: whatever reaches it makes it the current one first, and gives the other back.

No GPU is here: `torch.cuda.device` is a stand-in that keeps count, and tensors of a GPU have no memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphdecode import BucketConfig, EngineConfig, GraphManager, Slot, StepBuffers
from graphdecode.buckets import StepShape
from graphdecode.buffers import Batch
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.capacity import plan_capacity
from graphdecode.engine.prompts import PromptChunk
from graphdecode.engine.runner import LaunchPlan, Runner
from graphdecode.engine.steps import RowInputs, RowSampling, SequenceMemory
from graphdecode.kernels.native.registration import Written, operator
from graphdecode.memory import Memory, host_memory
from graphdecode.models import describe_model, load_model

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
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.current)
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
    chunks = [PromptChunk([97, 98, 99], 0, SequenceMemory((0,)))]
    runner.stage(chunks=chunks)
    runner.launch(LaunchPlan.of_chunks(chunks))
    runner.stage([RowInputs([97, 98, 99, 100], 4, SequenceMemory((0,)), RowSampling())])
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

    for current in (0, 1):
        devices.current = current
        with torch._C._DisableTorchDispatch():  # straight to what is registered for a GPU
            launched_for_a_test(OnGPU.of(2), OnGPU.of(2))
        assert devices.seen.pop() == ("launch", 1)
        assert devices.current == current


def test_a_step_runs_on_the_device_of_its_slots_eagerly_and_when_it_is_captured(devices, monkeypatch):
    buffers = StepBuffers([Slot("x", ("batch",), torch.float32)], max_batch_size=2, device="cpu")

    def step(batch: Batch) -> None:
        batch.x.add_(1)

    manager = GraphManager(devices.noting("step", step), buffers, [1, 2])
    monkeypatch.setattr(buffers, "device", OTHER)
    manager.capture(progress=False)
    manager.run_eager(1)
    assert {device for _, device in devices.seen} == {1}
    manager.replay(2)
    manager.close()
    assert devices.current == 0


MIB = 2**20
MEMINFO = f"MemTotal: {64 * 1024} kB\nMemFree: {1024} kB\nMemAvailable: {40 * 1024} kB\nCached: {39 * 1024} kB\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": MEMINFO} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(folder: str, limit: str, used: int, kept: int, *, version: int = 2) -> dict[str, str]:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    total = "" if version == 2 else "total_"
    stat = f"anon 5\n{total}inactive_file {kept - 3}\n{total}active_file 3\n"
    base = f"sys/fs/cgroup{folder}"
    return {f"{base}/{names[0]}": f"{limit}\n", f"{base}/{names[1]}": f"{used}\n", f"{base}/memory.stat": stat}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (64, 40)),  # what was read from files lies in memory that can be had, and not in MemFree
        ({"proc/self/cgroup": "0::/\n"} | group("", str(16 * MIB), 10 * MIB, 4 * MIB), (16, 10)),
        ({"proc/self/cgroup": "0::/\n"} | group("", "max", 10 * MIB, 4 * MIB), (64, 40)),
        ({"proc/self/cgroup": "0::/a/b\n"} | group("/a/b", "max", 0, 3), (64, 40)),
        (
            {"proc/self/cgroup": "0::/a/b\n"}
            | group("/a/b", str(32 * MIB), 3 * MIB, 3)
            | group("/a", str(20 * MIB), 19 * MIB, MIB),
            (20, 2),  # the nearest limit of all around us
        ),
        (
            {"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/elsewhere/docker\n0::/\n"}
            | group("/memory", str(8 * MIB), 9 * MIB, 3, version=1),
            (8, 0),  # the container sees its own group as the first one, and is over its limit
        ),
        (
            {"proc/self/cgroup": "4:memory:/\n"} | group("/memory", "9223372036854771712", 50 * MIB, 3, version=1),
            (64, 40),
        ),
    ],
)
def test_available_memory_is_within_every_cgroup_limit(files, expected, tmp_path):
    found = host_memory(machine(tmp_path, files))
    assert [round(number / MIB, 3) for number in found] == list(expected)


def test_memory_is_estimated_on_an_unknown_system(tmp_path: Path) -> None:
    found = host_memory(tmp_path)
    assert 0 < found.available <= min(found.total, 4 * 2**30)


def test_pages_of_a_cpu_fit_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EngineConfig(BucketConfig(max_batch_size=1024, max_sequence_length=512, memory_fraction=0.5))
    model, device = describe_model("demo"), torch.device("cpu")
    monkeypatch.setattr("graphdecode.memory.available.host_memory", lambda: Memory(64 * MIB, 40 * MIB))
    capacity = plan_capacity(settings, model, torch.float32, device)
    assert capacity.total_num_pages == 20 * MIB // capacity.page_bytes - 1
