"""Tests of the surfaces run on two back ends: the machine's own, and Triton's kernels in its interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphdecode.graphs import recorded
from graphdecode.kernels.native.registration import is_registered, versions

NATIVE_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAVE_ITEMS = 6  # at which the interpreted device is full: long rows are split


class Interpreted(TorchDispatchMode):
    """Run the Triton version of each operator that has one, over tensors of the CPU."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        has_memory = all(kind is torch.Tensor for kind in types)  # opcheck's tensors have none
        called = versions(operator._opname).triton if is_registered(operator) and has_memory else operator
        return called(*args, **(kwargs or {}))


@contextmanager
def back_end(kind: str) -> Iterator[str]:
    """Yield the device of a back end. Interpreted kernels split rows as on a GPU, in replayed steps too."""
    if kind == "own":
        yield NATIVE_DEVICE
        return
    if NATIVE_DEVICE != "cpu":
        pytest.skip("a GPU runs Triton's kernels anyway")
    from hostile_rows import quick_interpreter

    def bound(operator: Any, *arguments: Any) -> Any:
        return partial(versions(operator._opname).triton, *arguments) if is_registered(operator) else None

    planned = "graphdecode.attention.paged_decode"
    with pytest.MonkeyPatch.context() as patch, quick_interpreter(), Interpreted():
        patch.setattr(recorded, "bind", bound)
        surface = "graphdecode.surfaces.flashinfer"
        for module in (planned, f"{surface}.batch_decode", f"{surface}.batch_mla"):
            patch.setattr(f"{module}.splits_rows", lambda _device: True)
        for module in (planned, f"{surface}.decode_problem", f"{surface}.latent_attention"):
            patch.setattr(f"{module}.wave_items_for", lambda *_, **__: WAVE_ITEMS)
        yield NATIVE_DEVICE


@pytest.fixture(params=["own", pytest.param("interpreted", marks=pytest.mark.slow)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device; slow tests are of interpreted kernels there."""
    with back_end(request.param) as result:
        yield result


@pytest.fixture
def native_device() -> str:
    """The device without the interpreter, of tests that would take it minutes."""
    return NATIVE_DEVICE


@pytest.fixture(params=["own", "interpreted"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device, with interpreted kernels in quick tests, too."""
    with back_end(request.param) as result:
        yield result
