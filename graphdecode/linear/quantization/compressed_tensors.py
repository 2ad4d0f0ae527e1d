"""compressed-tensors, the format of llm-compressor.

A module NAME has `NAME.weight_scale`, and either `NAME.weight`, int8 or float8, or `NAME.weight_packed` with
`NAME.weight_shape`: unsigned integers in int32, low bits first. Zero points, if any, are int8, or packed likewise along
the rows. Modules of the ignore list have an unquantized weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError, CheckpointError, UnsupportedModelError, shown
from graphdecode.linear.quantization.format import (
    FLOATS,
    OnlineQuantization,
    PackedTensor,
    QuantizationFormat,
    Read,
    checked_block,
    checked_group_size,
    one_of,
    require,
)
from graphdecode.linear.quantization.groups import (
    FP8,
    INT4,
    INT8,
    MXFP4,
    Code,
    Groups,
    packed,
    sorted_by_group,
    unpacked,
)
from graphdecode.linear.quantization.quantized_weight import QuantizedWeight, WeightType
from graphdecode.linear.weight_form import Stored

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "dense")
_PARTS = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
_CHUNK_VALUES = 1 << 22  # float32 values quantized at a time
_GROUP_SIZES = (128, 64, 32)  # default: the first that divides all columns
_FLOAT8_MOST = 448.0
# candidates for a group's largest value over its scale: larger ones clip it, for more precise others
_LARGEST_CODES = (7.0, 7.5, 8.0, 8.5, 9.0, 10.0, 11.0)


class _Scheme(NamedTuple):
    code: Code
    bits: int
    group_size: int  # -1: a whole row, or the whole weight
    rows_of_scale: int = 1
    is_symmetric: bool = True  # zero points are optional


@dataclass(frozen=True)
class GroupQuantization(OnlineQuantization):
    """Codes with a scale per row, or per group of a row."""

    file_format = "safetensors"
    name: str
    code: Code
    weight_type: WeightType
    is_grouped: bool = False  # whether the default is several groups per row
    group_size: int | None = None  # columns that share a scale; None: a whole row

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return int(self.weight_type.bits)

    def sized(self, group_size: int | None, columns: Iterable[int]) -> GroupQuantization:
        if group_size is None and not self.is_grouped:
            return self
        if self.code != "integer":
            raise ArgumentError(f"quantize={self.name!r} has a scale for each row: leave the group size out")
        divisor = math.gcd(*columns)
        fitting = [size for size in _GROUP_SIZES if divisor % size == 0]
        size = group_size if group_size is not None else fitting[0] if fitting else 0
        if size < 16 or size % 16 or divisor % size:
            stated = "" if group_size is None else f"of {group_size} "
            can = f"; those of {', '.join(map(str, fitting))} are" if fitting else ""
            raise ArgumentError(
                f"groups {stated}are not available with quantize={self.name!r}: they must be a multiple of 16, and "
                f"divide all weights' columns, and so {divisor}{can}"
            )
        return replace(self, group_size=size)

    def type_of(self, name: str, columns: int, *, is_outer: bool) -> str:
        return self.weight_type.name

    def quantized(self, weight: Tensor, weight_type: str) -> Groups:
        return quantized_groups(weight, self)

    def written(self, name: str, weight: QuantizedWeight) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(weight, Groups)
        module = name.removesuffix(".weight")
        yield f"{module}.weight_scale", weight.scales
        if weight.code == "e4m3":
            yield name, weight.codes
        else:  # int32, the first integer in the lowest bits; rows are padded to whole ones
            padded = torch.nn.functional.pad(weight.codes, (0, -weight.codes.shape[1] % 4))
            yield f"{module}.weight_packed", padded.view(torch.int32)
            yield f"{module}.weight_shape", torch.tensor(weight.shape)

    def written_config(self, ignored: list[str]) -> dict[str, Any]:
        is_float = self.code == "e4m3"
        weights = {
            "num_bits": self.bits,
            "type": "float" if is_float else "int",
            "symmetric": True,
            "dynamic": False,
            "strategy": "channel" if self.group_size is None else "group",
            "group_size": self.group_size,
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": CompressedTensors.name,
            "format": "float-quantized" if is_float else "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
            "kv_cache_scheme": None,
        }


GROUP_QUANTIZATIONS = {
    "int8": GroupQuantization("int8", "integer", INT8),
    "int4": GroupQuantization("int4", "integer", INT4, is_grouped=True),
    "fp8": GroupQuantization("fp8", "e4m3", FP8),
}
INT8_ROWS = GROUP_QUANTIZATIONS["int8"]


class CompressedTensors(QuantizationFormat):
    """compressed-tensors; see the module's docstring."""

    name = "compressed-tensors"
    weight_types = (INT4, INT8, FP8, MXFP4)
    online = tuple(GROUP_QUANTIZATIONS.values())
    unused_suffixes = (".input_scale", ".input_zero_point", ".output_zero_point")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._format = one_of(settings, "format", (*_FORMATS, "mixed-precision"), "dense")
        for other in ("sparsity_config", "transform_config"):
            config = settings.get(other)
            if config and not (isinstance(config, dict) and config.get("format") == "dense"):
                raise UnsupportedModelError(f"quantization_config: {other} is not supported")
        ignored = settings.get("ignore")
        if ignored is not None and not (isinstance(ignored, list) and all(isinstance(name, str) for name in ignored)):
            raise UnsupportedModelError(f"quantization_config: ignore must be a list of names, got {shown(ignored)}")
        _check_cache(settings.get("kv_cache_scheme"))
        groups = settings.get("config_groups")
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise UnsupportedModelError(f"quantization_config: config_groups must be an object, got {shown(groups)}")
        self._schemes = {_scheme_of(group, self._format) for group in groups.values() if group.get("weights")}
        self.is_integer = any(scheme.code == "integer" for scheme in self._schemes)

    def find(self, tensors: Mapping[str, Stored], read: Read) -> Iterator[tuple[str, PackedTensor]]:
        for scale in tensors:
            module = scale.removesuffix(".weight_scale")
            if module != scale:
                yield f"{module}.weight", self._weight(module, tensors, read)

    def _weight(self, module: str, tensors: Mapping[str, Stored], read: Read) -> PackedTensor:
        is_packed = f"{module}.weight_packed" in tensors
        codes = tensors.get(f"{module}.weight_packed" if is_packed else f"{module}.weight")
        if codes is None or len(codes.shape) != 2:
            raise CheckpointError(f"{module} has a weight_scale and no matrix of weights that it could belong to")
        rows, columns = codes.shape
        if f"{module}.weight_shape" in tensors:
            require(tensors, f"{module}.weight_shape", (2,), ("I64", "I32"))
            rows, columns = (int(size) for size in read(f"{module}.weight_shape", ()))
        elif is_packed and codes.dtype == "U8":
            columns *= 2
        fitting = self._schemes_of(module, codes, (rows, columns))
        zeros = f"{module}.weight_zero_point"
        if zeros not in tensors:
            fitting = [scheme for scheme in fitting if scheme.is_symmetric]
            if not fitting:
                raise CheckpointError(f"{zeros} is missing: the configuration has symmetric false")
        scheme = _fitting(module, fitting, (rows, columns), tensors[f"{module}.weight_scale"])
        if zeros in tensors and scheme.code == "integer":
            is_packed = tensors[zeros].dtype == "I32"
            stored_rows = -(-rows * scheme.bits // 32) if is_packed else rows
            require(tensors, zeros, (stored_rows, -(-columns // scheme.group_size)), ("I32",) if is_packed else ("I8",))
        name = {"integer": f"INT{scheme.bits}", "e4m3": "FP8", "e2m1": "MXFP4"}[scheme.code]
        names = {part: tensor_name for part in _PARTS if (tensor_name := f"{module}.{part}") in tensors}
        return PackedTensor(Stored((rows, columns), name), names, partial(_groups, module, scheme, (rows, columns)))

    def _schemes_of(self, module: str, codes: Stored, shape: tuple[int, int]) -> list[_Scheme]:
        rows, columns = shape
        packed_bits = {-(-columns * bits // 32): bits for bits in (4, 8)}.get(codes.shape[1], 0)
        kinds = {"I8": ("integer", 8), "F8_E4M3": ("e4m3", 8), "U8": ("e2m1", 4)}
        code, bits = kinds.get(codes.dtype, ("integer", packed_bits))
        fitting = [scheme for scheme in self._schemes if (scheme.code, scheme.bits) == (code, bits)]
        if not fitting or codes.shape[0] != rows or columns * bits % 8:
            raise CheckpointError(
                f"{module}: {codes.dtype} {list(codes.shape)} is no weight {list(shape)} that the configuration names"
            )
        return fitting


def _scheme_of(group: Mapping[str, Any], overall: str) -> _Scheme:
    weights = group["weights"]
    if not isinstance(weights, dict):
        raise UnsupportedModelError(f"quantization_config: weights must be an object, got {shown(weights)}")
    one_of(group, "format", _FORMATS, overall if overall in _FORMATS else "dense")
    kind = one_of(weights, "type", ("int", "float"), "int")
    bits = one_of(weights, "num_bits", (4, 8), 8)
    size = weights.get("group_size")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = one_of(weights, "strategy", ("tensor", "channel", "group", "block"), implied)
    size = size if strategy == "group" else -1
    if kind == "float" and bits == 4 and (strategy, size) != ("group", 32):
        raise UnsupportedModelError(
            "quantization_config: floats of 4 bits are supported in groups of 32 alone (mxfp4-pack-quantized)"
        )
    code: Code = "integer" if kind == "int" else "e2m1" if bits == 4 else "e4m3"
    is_symmetric = one_of(weights, "symmetric", (True, False), True) or kind == "float"
    if strategy == "block":
        rows, columns = checked_block(weights.get("block_structure"), "block_structure")
        return _Scheme(code, bits, columns, rows, is_symmetric)
    return _Scheme(code, bits, checked_group_size(size), is_symmetric=is_symmetric)


def _check_cache(scheme: Any) -> None:
    """Refuse KV cache schemes other than fp8 with a scale per layer or head."""
    if scheme is None:
        return
    if not isinstance(scheme, dict):
        raise UnsupportedModelError(f"quantization_config: kv_cache_scheme must be an object, got {shown(scheme)}")
    supported = {"num_bits": (8,), "type": ("float",), "strategy": ("tensor", "attn_head"), "symmetric": (True,)}
    for name, values in supported.items():
        one_of(scheme, name, values, values[0], of="kv_cache_scheme")


def _fitting(module: str, schemes: list[_Scheme], shape: tuple[int, int], scale: Stored) -> _Scheme:
    """Return the scheme that fits a module's scales, with the weight's group size."""
    rows, columns = shape
    dims = (*scale.shape, 1, 1)[:2]
    for scheme in schemes:
        size = columns if scheme.group_size == -1 else min(scheme.group_size, columns)
        blocks = -(-rows // scheme.rows_of_scale)
        is_whole = scheme.group_size == -1 and dims in ((1, 1), (rows, 1))
        dtypes = ("U8",) if scheme.code == "e2m1" else FLOATS
        if (is_whole or dims == (blocks, -(-columns // size))) and scale.dtype in dtypes:
            return scheme._replace(group_size=size)
    raise CheckpointError(
        f"{module}.weight_scale is {scale.dtype} {list(scale.shape)}, which the configuration has for no weight "
        f"{list(shape)}"
    )


def _groups(
    module: str,
    scheme: _Scheme,
    shape: tuple[int, int],
    *,
    weight_scale: Tensor,
    weight: Tensor | None = None,
    weight_packed: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
    **_: Tensor,
) -> Groups:
    rows, columns = shape
    if weight is not None:
        codes = weight if scheme.code == "e4m3" else weight.view(torch.uint8) ^ 128
    elif weight_packed is not None:
        codes = weight_packed.view(torch.uint8)[:, : columns * scheme.bits // 8]
    scales = weight_scale.view(torch.float8_e8m0fnu) if scheme.code == "e2m1" else weight_scale
    scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    is_one = len(scales) == 1 < rows and scheme.rows_of_scale == 1
    zeros = None  # floats have none
    if weight_zero_point is not None and scheme.code == "integer":
        zeros = _zeros(weight_zero_point, scheme.bits, rows)
    rows_of_scale = rows if is_one else scheme.rows_of_scale
    groups = Groups(scheme.code, scheme.bits, codes, scales, zeros, scheme.group_size, rows_of_scale)
    return sorted_by_group(groups, weight_g_idx, module)


def _zeros(stored: Tensor, bits: int, rows: int) -> Tensor:
    """Return zero points as codes, uint8 [rows, groups]."""
    if stored.dtype == torch.int8:
        return stored.reshape(len(stored), -1).view(torch.uint8) ^ 128 if bits == 8 else (stored + 8).view(torch.uint8)
    by_group = stored.T.contiguous().view(torch.uint8)
    return (by_group if bits == 8 else unpacked(by_group))[:, :rows].T.contiguous()


def quantized_groups(
    weight: Tensor, scheme: GroupQuantization, maxima: Callable[[Tensor], Tensor] | None = None
) -> Groups:
    """Quantize a weight [out_features, in_features], float32, bfloat16 or float16; scales have its dtype.

    `maxima`: maps the largest magnitudes of rows of a shard of columns to those of whole rows; None: identity.
    """
    rows, columns = weight.shape
    size = scheme.group_size or columns
    scales = weight.new_empty(rows, columns // size)
    kind = torch.float8_e4m3fn if scheme.code == "e4m3" else torch.uint8
    codes = weight.new_empty(rows, columns * scheme.bits // 8, dtype=kind)
    step = max(1, _CHUNK_VALUES // columns)
    for begin in range(0, rows, step):
        some = slice(begin, begin + step)
        groups = weight[some].float().unflatten(1, (-1, size))
        scales[some] = _scales(groups, scheme, weight.dtype, maxima)
        scaled = groups / scales[some].float()[..., None]
        if scheme.code == "e4m3":
            codes[some] = scaled.clamp_(-_FLOAT8_MOST, _FLOAT8_MOST).flatten(1)
            continue
        half = 2 ** (scheme.bits - 1)
        integers = scaled.round_().clamp_(-half, half - 1).add_(half).flatten(1)
        codes[some] = packed(integers.to(torch.uint8)) if scheme.bits == 4 else integers
    return Groups(scheme.code, scheme.bits, codes, scales, None, size)


def _scales(
    groups: Tensor, scheme: GroupQuantization, dtype: torch.dtype, maxima: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Return scales > 0 of groups [rows, groups, columns] that make the squared error small."""
    largest = groups.abs().amax(-1)
    if maxima is not None:
        largest = maxima(largest.flatten()).view_as(largest)
    least = torch.finfo(dtype).tiny
    if scheme.bits == 8:
        return (largest / (_FLOAT8_MOST if scheme.code == "e4m3" else 127.0)).to(dtype).clamp_(min=least)
    best, best_error = largest.to(dtype), torch.full_like(largest, torch.inf)  # NaN stays
    for code in _LARGEST_CODES:
        scales = (largest / code).to(dtype).clamp_(min=least)
        wide = scales.float()[..., None]
        error = ((groups / wide).round_().clamp_(-8, 7) * wide - groups).square_().sum(-1)
        best = torch.where(error < best_error, scales, best)
        best_error = torch.minimum(best_error, error)
    return best
