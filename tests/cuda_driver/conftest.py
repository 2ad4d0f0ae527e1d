"""The stand-in for the driver as a fixture: a test leaves nothing alive on it, and nothing to complain of."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.driver")

from cuda_driver.stand_in import Driver, condition_code, loaded
from cuda_driver.torch_device import Device, installed

from graphdecode.graphs import cuda_loop


def collect_what_is_left(driver: Driver) -> None:
    """Let go of what only rings of references hold; it takes its time, and mostly there is none."""
    if any(line.startswith(("graph", "exec", "module")) for line in driver.alive()):
        gc.collect()


@pytest.fixture
def bare_driver() -> Driver:
    """The stand-in, with the first device's context current; what a test leaves behind is its own business."""
    driver = loaded()
    driver.begin()
    return driver


@pytest.fixture
def driver(bare_driver: Driver) -> Iterator[Driver]:
    """The stand-in; a test that leaves something alive, or did what the driver leaves undefined, fails."""
    yield bare_driver
    collect_what_is_left(bare_driver)
    assert bare_driver.complaints() == []
    assert bare_driver.alive() == []


@pytest.fixture
def device(driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Device]:
    """Torch on the stand-in, in whose code the loop's condition is compiled; a test leaves no problem behind."""
    condition = condition_code(tmp_path)
    monkeypatch.setattr(cuda_loop, "compile_condition", lambda _capability: condition)
    monkeypatch.setattr(cuda_loop, "seconds_of_step", lambda loop, *_: 1.0 if loop.kind == "single" else 0.9)
    with installed(driver) as device:
        yield device
        collect_what_is_left(driver)
    assert device.problems == []
