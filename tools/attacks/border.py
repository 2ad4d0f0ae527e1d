"""Calls of the surfaces with arguments of any type: the library itself must raise, before anything has changed."""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import graphdecode
from attacks.mutation import hostile_value
from attacks.trial import Wrong
from graphdecode import GraphdecodeError

_PACKAGE = Path(graphdecode.__file__).parent
_ROOTS = (str(_PACKAGE), str((_PACKAGE / "kernels").resolve()))
_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DTYPES = [torch.float64, torch.float16, torch.int8, torch.bool, torch.int64, torch.int16, torch.complex64]


class RefusedCall(GraphdecodeError, ValueError):
    """A surface refused a call with one of the allowed errors."""


def called(
    call: Callable[..., Any],
    arguments: Mapping[str, Any],
    watched: Callable[[], list[Tensor]] = list,
    errors: tuple[type[Exception], ...] = (ValueError,),
) -> Any:
    """Call a surface.

    Args:
        arguments: by name.
        watched: returns the tensors that a refused call must not change.
        errors: allowed for a refusal.

    Raises:
        RefusedCall: the library refused it.
        Wrong: it was refused after it had changed a tensor.
    """
    before = [bits_of(tensor).clone() for tensor in watched()]
    try:
        return call(**arguments)
    except errors as error:
        if not _is_own(error):
            raise
        after = [bits_of(tensor) for tensor in watched()]
        if len(before) != len(after) or not all(map(torch.equal, before, after)):
            raise Wrong(f"the call is refused, but has changed a tensor: {error}") from error
        raise RefusedCall(str(error)) from error


def _is_own(error: Exception) -> bool:
    """Return whether a `raise` of this library raised an error, rather than another library."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    file = trace.tb_frame.f_code.co_filename
    return file.startswith(_ROOTS) and "raise" in linecache.getline(file, trace.tb_lineno)


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor, which also compare NaN."""
    return tensor.contiguous().view(_INT_OF_SIZE[tensor.element_size()])


def spoiled(rng: random.Random, value: Any) -> Any:
    """Return a value with another type, shape or entries than an argument."""
    if not isinstance(value, Tensor) or rng.random() < 0.3:
        return hostile_value(rng)
    kind = rng.randrange(7)
    if kind == 0:
        return value.to(rng.choice([dtype for dtype in _DTYPES if dtype != value.dtype]))
    if kind == 1:
        return value[None]
    if kind == 2:
        return value[:0]
    if kind == 3 and value.dim():
        return torch.cat([value, value])
    if kind == 4 and value.dim() > 1:
        return value.transpose(0, -1)
    if kind == 5:
        return value.to("meta")
    return value.tolist() if value.numel() < 100 else value.flatten()
