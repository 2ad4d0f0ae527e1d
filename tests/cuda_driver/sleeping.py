"""Reserved memory of the stand-in's device, for engines on the CPU: what is unmapped is really gone."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as cuda
from cuda_driver.allocator import done
from cuda_driver.stand_in import loaded
from torch import Tensor

from graphdecode.engine import assembly

DEVICE = torch.device("cuda:0")
as_tensor, reserved_memory = torch.as_tensor, assembly.reserved_memory


def tensor_over(given: Any, **options: Any) -> Tensor:
    """Stand for `torch.as_tensor`, which takes memory of a GPU by this interface."""
    interface = getattr(given, "__cuda_array_interface__", None)
    if interface is None:
        return as_tensor(given, **options)
    assert interface["typestr"] == "|u1"
    assert options == {"device": DEVICE}
    memory = (ctypes.c_char * interface["shape"][0]).from_address(interface["data"][0])
    memory.owner = given  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


@contextmanager
def installed() -> Iterator[None]:
    """Let reserved memory lie on the stand-in's device, that of engines on the CPU, too."""
    replacements = {
        "synchronize": lambda _device=None: done(cuda.cuCtxSynchronize()),
        "device": lambda _device: nullcontext(),
        "empty_cache": lambda: None,
        "get_device_properties": lambda _device: SimpleNamespace(total_memory=done(cuda.cuMemGetInfo())[1]),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, replacement in replacements.items():
            patch.setattr(torch.cuda, name, replacement)
        patch.setattr(torch, "as_tensor", tensor_over)
        patch.setattr(assembly, "reserved_memory", lambda settings, _device: reserved_memory(settings, DEVICE))
        yield


def is_there(tensor: Tensor) -> bool:
    """Whether the system would let a tensor's memory be read; False instead of a crash."""
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, (ctypes.c_char * 1).from_address(tensor.data_ptr()))
    except OSError:
        return False
    finally:
        os.close(read_end)
        os.close(write_end)
    return True


def begin_in_a_rank() -> ExitStack:
    """Install it in another process, for as long as the result is held."""
    loaded().begin()
    held = ExitStack()
    held.enter_context(installed())
    return held
