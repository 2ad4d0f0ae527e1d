"""Times on a device, over a stand-in for its clock: a step is what the device takes, however long a launch takes."""

import pytest
import torch

from graphdecode.profiling.latency import back_to_back_ms

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


def test_a_step_that_is_not_held_takes_as_long_as_the_slower_of_host_and_device(machine: Machine) -> None:
    machine.launch_ms = 3 * STEP_MS
    assert back_to_back_ms(machine.launch, 4, is_held=False)[1:] == pytest.approx([machine.launch_ms] * 3)
    machine.launch_ms = LAUNCH_MS
    assert back_to_back_ms(machine.launch, 4, is_held=False)[1:] == pytest.approx([STEP_MS] * 3)


def test_without_a_way_to_hold_the_device_the_first_step_alone_has_its_launch(machine, monkeypatch):
    monkeypatch.delattr(torch.cuda, "_sleep")
    first, *others = back_to_back_ms(machine.launch, 4)
    assert first == pytest.approx(STEP_MS + LAUNCH_MS)
    assert others == pytest.approx([STEP_MS] * 3)
