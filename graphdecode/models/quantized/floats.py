"""Weights with codes of floats: float8, gpt-oss's MXFP4, and bitsandbytes' nf4.

Float8 is e4m3, with a scale per weight, per row, or per block of rows and columns. DeepSeek's and Qwen's checkpoints
have `NAME.weight_scale_inv` for blocks of 128 x 128, which multiplies in spite of its name; others have
`NAME.weight_scale`, per weight or per row (FBGEMM).

MXFP4 (Open Compute Project, Microscaling Formats, 2023): 32 values share a power of two. `NAME_blocks` is uint8
[experts, out_features, in_features / 32, 16], two values per byte, the low nibble first, and `NAME_scales` uint8
[experts, out_features, in_features / 32], exponents with a bias of 127. `NAME` is listed as their transpose, [experts,
in_features, out_features].

nf4 (Dettmers et al., 2023, QLoRA): blocks of a flattened weight. A weight NAME has `NAME`, uint8 [values / 2, 1], the
high nibble first; `NAME.absmax`, the scales; `NAME.quant_map`; and `NAME.quant_state.bitsandbytes__nf4`, JSON as bytes.
Quantized scales are indices into `NAME.nested_quant_map`, times `NAME.nested_absmax` per block, plus an offset from the
JSON.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphdecode.linear.groups import TABLES, Groups
from graphdecode.linear.weight_form import Stored
from graphdecode.models.fields import UnsupportedModelError, count, number
from graphdecode.models.quantized.method import FLOATS, Method, PackedTensor, Read, checked_block, one_of, require
from graphdecode.models.weight_map import CheckpointError

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16  # per block of MXFP4
_STATE = ".quant_state.bitsandbytes__nf4"
_MOST_STATE_BYTES = 4096


def _float8_groups(codes: Tensor, scales: Tensor, *, block: tuple[int, int]) -> Groups:
    rows, columns = block
    return Groups("e4m3", 8, codes, scales if scales.ndim == 2 else scales.reshape(-1, 1), None, columns, rows)


class Float8(Method):
    """fp8 with a scale per weight, row or block."""

    name = "fp8"
    unused_suffixes = (".input_scale", ".activation_scale", ".input_scale_inv")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        one_of(settings, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        one_of(settings, "expert_dtype", ("fp8",), "fp8")
        block = settings.get("weight_block_size")
        self._block = None if block is None else checked_block(block, "weight_block_size")

    def find(self, tensors: Mapping[str, Stored], read: Read) -> Iterator[tuple[str, PackedTensor]]:
        for name, stored in tensors.items():
            if stored.dtype != "F8_E4M3" or not name.endswith(".weight") or len(stored.shape) != 2:
                continue
            scale = next((found for end in ("_scale_inv", "_scale") if (found := name + end) in tensors), None)
            if scale is None:
                raise CheckpointError(f"{name} is F8_E4M3, and there is no {name}_scale_inv and no {name}_scale")
            unpack = partial(_float8_groups, block=self._block_of(name, stored.shape, tensors[scale]))
            yield name, PackedTensor(Stored(stored.shape, "FP8"), {"codes": name, "scales": scale}, unpack)

    def _block_of(self, name: str, shape: tuple[int, ...], scale: Stored) -> tuple[int, int]:
        """Return the rows and columns that share a scale."""
        rows, columns = shape
        dims = (*scale.shape, 1, 1)[:2]
        blocks = [(rows, columns), (1, columns)]
        if self._block is not None:
            blocks.append((min(self._block[0], rows), min(self._block[1], columns)))
        for block in blocks:
            if dims == (-(-rows // block[0]), -(-columns // block[1])) and scale.dtype in (*FLOATS, "F8_E8M0"):
                return block
        expected = "one of the weight, one of each row" + (f", one of {self._block}" if self._block else "")
        raise CheckpointError(
            f"{name}: the scales are {scale.dtype} {list(scale.shape)} for a weight {list(shape)}, and should be "
            f"{expected}"
        )


class FbgemmFloat8(Float8):
    """FBGEMM's fp8: a scale per row."""

    name = "fbgemm_fp8"


class Mxfp4(Method):
    """gpt-oss's experts; see the module's docstring."""

    name = "mxfp4"

    def find(self, tensors: Mapping[str, Stored], read: Read) -> Iterator[tuple[str, PackedTensor]]:
        for name, blocks in tensors.items():
            plain = name.removesuffix(_BLOCKS)
            scales = tensors.get(f"{plain}{_SCALES}")
            if plain == name or scales is None or {blocks.dtype, scales.dtype} != {"U8"}:
                continue
            if len(scales.shape) == 3 and blocks.shape == (*scales.shape, _BYTES):
                experts, rows, groups = scales.shape
                stored = Stored((experts, groups * 2 * _BYTES, rows), "MXFP4")
                there = {"blocks": name, "scales": f"{plain}{_SCALES}"}
                yield plain, PackedTensor(stored, there, _mxfp4_groups, is_stack=True)


def _mxfp4_groups(*, blocks: Tensor, scales: Tensor) -> Groups:
    exponents = scales.flatten(0, 1).view(torch.float8_e8m0fnu)
    return Groups("e2m1", 4, blocks.flatten(0, 1).flatten(1), exponents, None, 2 * _BYTES)


class Nf4(Method):
    """bitsandbytes' 4-bit weights; see the module's docstring."""

    name = "bitsandbytes"

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
    there = {"codes": name, "absmax": f"{name}.absmax", "quant_map": f"{name}.quant_map", "state": f"{name}{_STATE}"}
    nested, offset = 0, 0.0
    if "nested_blocksize" in state:
        nested, offset = count(state, "nested_blocksize"), number(state, "nested_offset")
        require(tensors, f"{name}.nested_absmax", (-(-blocks // nested),), ("F32",))
        require(tensors, f"{name}.nested_quant_map", (256,), ("F32",))
        there |= {part: f"{name}.{part}" for part in ("nested_absmax", "nested_quant_map")}
    require(tensors, f"{name}.absmax", (blocks,), ("U8",) if nested else ("F32",))
    return PackedTensor(Stored((rows, columns), "NF4"), there, partial(_nf4_groups, rows, size, nested, offset))


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
