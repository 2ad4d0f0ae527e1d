"""bitsandbytes' nf4 (Dettmers et al., 2023, QLoRA): blocks of a flattened weight.

A weight NAME has `NAME`, uint8 [values / 2, 1], the high nibble first; `NAME.absmax`, the scales; `NAME.quant_map`; and
`NAME.quant_state.bitsandbytes__nf4`, JSON as bytes. Quantized scales are indices into `NAME.nested_quant_map`, times
`NAME.nested_absmax` per block, plus an offset from the JSON.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphdecode.errors import CheckpointError, UnsupportedModelError, shown
from graphdecode.linear.quantization.format import PackedTensor, QuantizationFormat, Read, checked_size, one_of, require
from graphdecode.linear.quantization.groups import NF4, TABLES, Groups
from graphdecode.linear.weight_form import Stored

_STATE = ".quant_state.bitsandbytes__nf4"
_MOST_STATE_BYTES = 4096


class BitsAndBytes(QuantizationFormat):
    """bitsandbytes' 4-bit weights; see the module's docstring."""

    name = "bitsandbytes"
    weight_types = (NF4,)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        one_of(settings, "load_in_8bit", (False,), False)
        one_of(settings, "load_in_4bit", (True,), False)
        one_of(settings, "bnb_4bit_quant_type", ("nf4",), "fp4")

    def find(self, tensors: Mapping[str, Stored], read: Read) -> Iterator[tuple[str, PackedTensor]]:
        for state in tensors:
            name = state.removesuffix(_STATE)
            if name != state:
                yield name, _nf4_weight(name, tensors, read)


def _nf4_weight(name: str, tensors: Mapping[str, Stored], read: Read) -> PackedTensor:
    state = _state(name, tensors, read)
    shape, size = state.get("shape"), checked_size(state, "blocksize")
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
    tensor_names = {
        "codes": name,
        "absmax": f"{name}.absmax",
        "quant_map": f"{name}.quant_map",
        "state": f"{name}{_STATE}",
    }
    nested, offset = 0, 0.0
    if "nested_blocksize" in state:
        nested, offset = checked_size(state, "nested_blocksize"), _offset(state)
        require(tensors, f"{name}.nested_absmax", (-(-blocks // nested),), ("F32",))
        require(tensors, f"{name}.nested_quant_map", (256,), ("F32",))
        tensor_names |= {part: f"{name}.{part}" for part in ("nested_absmax", "nested_quant_map")}
    require(tensors, f"{name}.absmax", (blocks,), ("U8",) if nested else ("F32",))
    return PackedTensor(
        Stored((rows, columns), NF4.name), tensor_names, partial(_nf4_groups, rows, size, nested, offset)
    )


def _offset(state: Mapping[str, Any]) -> float:
    value = state.get("nested_offset")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise UnsupportedModelError(f"nested_offset must be a number > 0, got {shown(value)}")
    return float(value)


def _nf4_groups(
    rows: int,
    group_size: int,
    nested_size: int,
    offset: float,
    *,
    codes: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None = None,
    nested_quant_map: Tensor | None = None,
    **_: Tensor,
) -> Groups:
    codes = codes.view(rows, -1)
    if nested_absmax is not None and nested_quant_map is not None:
        each = nested_absmax.repeat_interleave(nested_size)[: len(absmax)]
        absmax = nested_quant_map[absmax.int()] * each + offset
    return Groups("nf4", 4, codes >> 4 | codes << 4, absmax.view(rows, -1), None, group_size)


def _state(name: str, tensors: Mapping[str, Stored], read: Read) -> dict[str, Any]:
    stored = tensors[name + _STATE]
    if stored.dtype != "U8" or len(stored.shape) != 1 or stored.shape[0] > _MOST_STATE_BYTES:
        raise CheckpointError(f"{name}{_STATE} is {stored.dtype} {list(stored.shape)} and should be a few bytes")
    try:
        state = json.loads(bytes(int(value) for value in read(name + _STATE, ())))
    except ValueError as error:
        raise CheckpointError(f"{name}{_STATE} is not JSON: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{name}{_STATE} is not a JSON object")
    return state
