"""bitsandbytes' nf4 (Dettmers et al., 2023, QLoRA): blocks of a flattened weight, whose scales may be quantized too.

Of a weight NAME there are `NAME`, uint8 [values / 2, 1], the first of two values in the upper half of a byte;
`NAME.absmax`, the scales; `NAME.quant_map`; and `NAME.quant_state.bitsandbytes__nf4`, JSON as bytes. Scales that are
quantized are bytes, to be looked up in `NAME.nested_quant_map`, times `NAME.nested_absmax` of blocks of them, and moved
by an offset that the JSON has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphdecode.linear.groups import TABLES, Groups
from graphdecode.linear.weight_form import Stored
from graphdecode.models.fields import UnsupportedModelError, count, number
from graphdecode.models.quantized.packed_tensor import PackedTensor, Read, is_one_of, require
from graphdecode.models.weight_map import CheckpointError

_STATE = ".quant_state.bitsandbytes__nf4"
_MOST_STATE_BYTES = 4096


@dataclass(frozen=True)
class _Weight(PackedTensor):
    group_size: int
    nested: tuple[int, float] | None  # how many scales share one, and what is added

    def groups(self, read: Read) -> Groups:
        """Return it as it is stored, its scales as numbers."""
        rows, columns = self.stored.shape
        name = self.tensors[0]
        codes = read(name, ()).view(rows, columns // 2)
        scales = read(f"{name}.absmax", ())
        if self.nested is not None:
            size, offset = self.nested
            each = read(f"{name}.nested_absmax", ()).repeat_interleave(size)[: len(scales)]
            scales = read(f"{name}.nested_quant_map", ())[scales.int()] * each + offset
        return Groups("nf4", 4, codes >> 4 | codes << 4, scales.view(rows, -1), None, self.group_size)


class Nf4:
    """bitsandbytes' weights of four bits; see the file's docstring."""

    name: ClassVar[str] = "bitsandbytes"
    spare: ClassVar[tuple[str, ...]] = ()
    of_integers = False

    def __init__(self, settings: Mapping[str, Any]) -> None:
        is_one_of(settings, "load_in_8bit", (False,), False)
        is_one_of(settings, "load_in_4bit", (True,), False)
        is_one_of(settings, "bnb_4bit_quant_type", ("nf4",), "fp4")

    def find(self, tensors: Mapping[str, Stored], read: Read) -> Iterator[tuple[str, PackedTensor]]:
        """Yield the weights that have a state."""
        for state in tensors:
            name = state.removesuffix(_STATE)
            if name != state:
                yield name, _weight(name, tensors, read)


def _weight(name: str, tensors: Mapping[str, Stored], read: Read) -> PackedTensor:
    state = _state(name, tensors, read)
    shape, size = state.get("shape"), count(state, "blocksize")
    if not isinstance(shape, list) or len(shape) != 2 or not all(isinstance(each, int) and each > 0 for each in shape):
        raise CheckpointError(f"{name}{_STATE} has no shape of a matrix")
    rows, columns = shape
    if columns % size:
        raise UnsupportedModelError(f"{name} has {columns} columns, into which blocks of {size} do not go")
    blocks = rows * columns // size
    require(tensors, name, (rows * columns // 2, 1), ("U8",))
    require(tensors, f"{name}.quant_map", (16,), ("F32",))
    if not torch.allclose(read(f"{name}.quant_map", ()), torch.tensor(TABLES["nf4"]), atol=1e-6):
        raise CheckpointError(f"{name}.quant_map is not that of nf4")
    parts = [name, f"{name}.absmax", f"{name}.quant_map", f"{name}{_STATE}"]
    nested = None
    if "nested_blocksize" in state:
        group = count(state, "nested_blocksize")
        require(tensors, f"{name}.nested_absmax", (-(-blocks // group),), ("F32",))
        require(tensors, f"{name}.nested_quant_map", (256,), ("F32",))
        nested = (group, number(state, "nested_offset"))
        parts += [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
    require(tensors, f"{name}.absmax", (blocks,), ("F32",) if nested is None else ("U8",))
    return _Weight(Stored((rows, columns), "NF4"), tuple(parts), size, nested)


def _state(name: str, tensors: Mapping[str, Stored], read: Read) -> dict[str, Any]:
    stored = tensors[name + _STATE]
    if stored.dtype != "U8" or len(stored.shape) != 1 or stored.shape[0] > _MOST_STATE_BYTES:
        raise CheckpointError(f"{name}{_STATE} is {stored.dtype} {list(stored.shape)} and should be a few bytes")
    try:
        state = json.loads(bytes(int(value) for value in read(name + _STATE, ())))
    except ValueError as error:
        raise CheckpointError(f"{name}{_STATE} is no JSON: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{name}{_STATE} is no JSON object")
    return state
