"""The assembly that stands in kernels, for Triton's interpreter: the few instructions of PTX that there are, in numpy.

A float instruction must be exact here: what codes of few bits are undone by rounds nothing.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

Registers = dict[str, np.ndarray]
_INSTRUCTION = re.compile(r"(?<![.\w])([a-z][a-z0-9.]*) ([^;{}]*);")
_FORMATS = {"bf16x2": "bf16", "f16x2": "f16"}


def create_inline_asm(
    _builder: InterpreterBuilder, asm: str, constraints: str, values: list[TensorHandle], *rest: Any
) -> SimpleNamespace:
    """Stand for the builder's method: run assembly over two neighbours of 16 bits at a time."""
    outputs = constraints.count("=")
    if "prefetch" in asm:  # it asks for memory and changes nothing; its one result is for nobody
        found = [TensorHandle(np.zeros_like(values[0].data, dtype=np.int32), tl.int32)]
    else:
        assert rest[-1] == 2
        assert all(value.data.dtype.itemsize == 2 for value in values)
        registers = {f"${outputs + place}": _pairs(value.data) for place, value in enumerate(values)}
        shape = values[0].data.shape
        run(asm, registers)
        found = [
            TensorHandle(registers[f"${place}"].view(np.int16).reshape(shape), tl.int16) for place in range(outputs)
        ]
    return SimpleNamespace(get_result=lambda place: found[place])


def _pairs(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words).reshape(-1).view(np.uint32)


def run(asm: str, registers: Registers) -> None:
    """Run instructions over registers, uint32 each, those of the operands by their numbers."""
    for name, operands in _INSTRUCTION.findall(asm):
        target, *sources = (operand.strip() for operand in operands.split(","))
        given = [np.uint32(int(source, 0)) if source[0].isdigit() else registers[source] for source in sources]
        operation, *kinds = name.split(".")
        if operation == "mov":
            registers[target] = given[0]
        elif operation == "shl":
            registers[target] = given[0] << given[1]
        elif operation == "shr":
            registers[target] = given[0] >> given[1]
        elif operation == "lop3":
            registers[target] = _by_table(*given)
        elif operation == "fma":
            registers[target] = _multiply_add(*given, _FORMATS[kinds[-1]])
        else:
            raise NotImplementedError(f"{name} {operands}")


def _by_table(a: Any, b: Any, c: Any, table: Any) -> Any:
    """Return the bits that a table of eight gives for those of three words."""
    found = np.zeros_like(a)
    for place in range(8):
        if int(table) >> place & 1:
            found |= (a if place & 4 else ~a) & (b if place & 2 else ~b) & (c if place & 1 else ~c)
    return found


def _multiply_add(a: Any, b: Any, c: Any, form: str) -> np.ndarray:
    wide = _floats(a, form) * _floats(b, form) + _floats(c, form)
    found = _words(wide, form)
    assert (_floats(found, form) == wide).all(), "a code is rounded"
    return found


def _floats(words: Any, form: str) -> np.ndarray:
    """Return the two floats of each word, float64 [..., 2]."""
    halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=-1)
    if form == "f16":
        return halves.astype(np.uint16).view(np.float16).astype(np.float64)
    return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _words(floats: np.ndarray, form: str) -> np.ndarray:
    """Return words of two floats each, cut off where they do not fit."""
    if form == "f16":
        halves = floats.astype(np.float16).view(np.uint16).astype(np.uint32)
    else:
        halves = floats.astype(np.float32).view(np.uint32) >> 16
    return halves[..., 0] | halves[..., 1] << np.uint32(16)
