"""GGUF's block types (ggml's `ggml-common.h`) as codes, tables and scales, and weights rounded to them.

Codes and scales keep their values: two-level scales stay integers times a factor.

The package `gguf` makes Q8_0. Made here are Q4_K and Q6_K, which it lacks, and Q5_0, for which it does not search
scales. Scales are searched as in ggml: those of the least error of several are taken, and codes are rounded with the
stored scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.kernels.linear.quantized_linear import Numbers, QuantizedPanels, quantized_panels
from graphdecode.kernels.linear.weight_tiles import WeightTiles, six_bit_words, tiled
from graphdecode.linear.quantization.format import OnlineQuantization, QuantizationFormat
from graphdecode.linear.quantization.quantized_weight import QuantizedWeight, WeightType
from graphdecode.linear.weight_form import FLOAT_DTYPES, Shard

_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F  # in eight bytes
_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # IQ4_NL and IQ4_XS
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the values of e2m1, which makes them integers
_CHUNK_VALUES = 1 << 21  # to quantize, which needs some tens of MB of temporary memory
_MOVES = (-0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75)  # added to the largest code, for candidate scales
_LEAST = 1e-15


class BlockType(NamedTuple):
    """A tensor type of GGUF files."""

    name: str  # ggml's, such as "Q4_K"
    values: int  # values per block; 1 for plain types
    nbytes: int  # bytes per block

    def size(self, values: int) -> int:
        """Return the bytes of `values` values in whole blocks."""
        return values // self.values * self.nbytes


# by ggml's number; missing types are not for weights (I8, ...), or never stored (Q8_1, Q8_K)
_DESCRIBED: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 28: ("F64", 1, 8), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
BLOCK_TYPES = {number: BlockType(*described) for number, described in sorted(_DESCRIBED.items())}
BLOCK_OF = {block.name: block for block in BLOCK_TYPES.values()}


def dequantize(stored: np.ndarray, block: BlockType) -> Tensor:
    """Return the values of whole blocks, uint8 [rows, bytes of a row]: [rows, values of a row].

    They are float32 for what is stored in blocks, else of the stored type.
    """
    if block.name in FLOAT_DTYPES:
        return torch.from_numpy(stored).view(FLOAT_DTYPES[block.name])
    if block.name == "Q1_0":  # scale or -scale by each bit
        blocks = stored.reshape(-1, block.nbytes)
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        signs = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little") * np.float32(2) - np.float32(1)
        return torch.from_numpy((scales * signs).reshape(len(stored), -1))
    import gguf.quants  # models of other formats do not need it

    return torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[block.name]))


class _Layout(NamedTuple):
    bits: int  # of a code
    table: Sequence[int] | None  # value of each code; None for signed bytes
    tile_code: str | None  # the code in tiles; None: tiles do not support it
    # returns the codes [rows, blocks, values] of blocks, uint8 [rows, blocks, nbytes]; or the offset in a block of 16
    # bytes that hold 16 codes in their low nibbles and 16 in their high ones
    codes: Callable[[Tensor], Tensor] | int
    # returns scales and minima of the groups, [rows, blocks * groups], of the same blocks
    numbers: Callable[[Tensor], tuple[Numbers, Numbers | None]]


def _halves(blocks: Tensor, at: int) -> Tensor:
    """Return the fp16 number at an offset of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(stored: Tensor) -> Tensor:
    """Return the nibbles [..., 2 * n] of bytes [..., n], all low ones first."""
    eights = stored.clone(memory_format=torch.contiguous_format).view(torch.int64)
    return torch.cat((eights & _LOW_NIBBLES, eights >> 4 & _LOW_NIBBLES), dim=-1).view(torch.uint8)


def _bits(stored: Tensor, count: int) -> Tensor:
    """Return `count` bits at a time of bytes [..., n], as [..., 8 / count, n]."""
    shifts = torch.arange(0, 8, count, dtype=torch.uint8)[:, None]
    return stored[..., None, :] >> shifts & ((1 << count) - 1)


def _scale(blocks: Tensor) -> tuple[Numbers, None]:
    return Numbers(_halves(blocks, 0)), None


def _scale_and_least(blocks: Tensor) -> tuple[Numbers, Numbers]:
    return Numbers(_halves(blocks, 0)), Numbers(_halves(blocks, 2))


def _five_bits(at: int) -> Callable[[Tensor], Tensor]:
    """Return a reader of codes whose fifth bits are at offset `at` of a block."""

    def codes(blocks: Tensor) -> Tensor:
        fifth = blocks[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
        return _nibbles(blocks[..., at + 4 :]) | fifth.flatten(-2) << 4

    return codes


def _mxfp4_scale(blocks: Tensor) -> tuple[Numbers, None]:
    exponents = blocks[..., 0].to(torch.int16)  # of twice the scale; bf16 is the upper half of a float32
    below = torch.where(exponents == 0, 0x20, 0x40)  # 2^-128 and 2^-127 are subnormal
    scales = torch.where(exponents < 2, below.to(torch.int16), (exponents - 1) << 7)
    return Numbers(scales.view(torch.bfloat16)), None


def _two_levels(blocks: Tensor, integers: Tensor, factors: Tensor) -> Numbers:
    """Return integers [rows, blocks, groups] and their factors [rows, blocks]."""
    return Numbers(integers.to(torch.int8).reshape(len(blocks), -1), factors.contiguous())


def _q2_k_codes(blocks: Tensor) -> Tensor:
    return _bits(blocks[..., 16:80].unflatten(-1, (2, 32)), 2).flatten(2)


def _q2_k_numbers(blocks: Tensor) -> tuple[Numbers, Numbers]:
    scales = _two_levels(blocks, blocks[..., :16] & 15, _halves(blocks, 80))
    return scales, _two_levels(blocks, blocks[..., :16] >> 4, -_halves(blocks, 82))


def _q3_k_codes(blocks: Tensor) -> Tensor:
    third = _bits(blocks[..., :32], 1).unflatten(-2, (2, 4))
    return (_bits(blocks[..., 32:96].unflatten(-1, (2, 32)), 2) | third << 2).flatten(2)


def _q3_k_scales(blocks: Tensor) -> tuple[Numbers, None]:
    high = _bits(blocks[..., 104:108], 2).flatten(-2)
    scales = (_nibbles(blocks[..., 96:104]) | high << 4).to(torch.int8) - 32
    return _two_levels(blocks, scales, _halves(blocks, 108)), None


def _scales_and_mins(blocks: Tensor) -> tuple[Numbers, Numbers]:
    """Return scales and minima of Q4_K and Q5_K: eight of each, in six bits."""
    first, second, third = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return _two_levels(blocks, scales, _halves(blocks, 0)), _two_levels(blocks, mins, -_halves(blocks, 2))


def _q4_k_codes(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(2)


def _q5_k_codes(blocks: Tensor) -> Tensor:
    fifth = _bits(blocks[..., 16:48], 1).unflatten(-2, (4, 2)).flatten(-2)
    return (_nibbles(blocks[..., 48:].unflatten(-1, (4, 32))) | fifth << 4).flatten(2)


def _q6_k_codes(blocks: Tensor) -> Tensor:
    high = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-2)
    return (_nibbles(blocks[..., :128].unflatten(-1, (2, 64))) | high << 4).flatten(2)


def _q6_k_scales(blocks: Tensor) -> tuple[Numbers, None]:
    return _two_levels(blocks, blocks[..., 192:208].contiguous().view(torch.int8), _halves(blocks, 208)), None


def _iq4_xs_codes(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(2)


def _iq4_xs_scales(blocks: Tensor) -> tuple[Numbers, None]:
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), dim=-1).flatten(-2)
    high = _bits(blocks[..., 2:4], 2).transpose(-1, -2).flatten(-2)
    return _two_levels(blocks, (low | high << 4).to(torch.int8) - 32, _halves(blocks, 0)), None


_LAYOUTS = {
    "Q8_0": _Layout(8, None, "s8", lambda blocks: blocks[..., 2:], _scale),
    "Q4_0": _Layout(4, range(-8, 8), "s4", 2, _scale),
    "Q4_1": _Layout(4, range(16), "u4", 4, _scale_and_least),
    "Q5_0": _Layout(5, range(-16, 16), "s5", _five_bits(2), _scale),
    "Q5_1": _Layout(5, range(32), "u5", _five_bits(4), _scale_and_least),
    "Q2_K": _Layout(2, range(4), None, _q2_k_codes, _q2_k_numbers),
    "Q3_K": _Layout(3, range(-4, 4), None, _q3_k_codes, _q3_k_scales),
    "Q4_K": _Layout(4, range(16), "u4", _q4_k_codes, _scales_and_mins),
    "Q5_K": _Layout(5, range(32), "u5", _q5_k_codes, _scales_and_mins),
    "Q6_K": _Layout(6, range(-32, 32), "s6", _q6_k_codes, _q6_k_scales),
    "IQ4_NL": _Layout(4, _NON_LINEAR, None, 2, _scale),
    "IQ4_XS": _Layout(4, _NON_LINEAR, None, _iq4_xs_codes, _iq4_xs_scales),
    "MXFP4": _Layout(4, (*_FP4, *(-value for value in _FP4)), "e2m1", 1, _mxfp4_scale),
}


BLOCKS_ON_CPU = frozenset(_LAYOUTS)  # types that products read; others are dequantized
BLOCKS_ON_GPU = frozenset(kind for kind, layout in _LAYOUTS.items() if layout.tile_code)


@dataclass(frozen=True)
class GgufBlocks(QuantizedWeight):
    """A weight in GGUF blocks."""

    path = "blocks"
    stored: Tensor  # uint8 [out_features, bytes per row], whole blocks
    block_type: str  # ggml's name

    @property
    def shape(self) -> tuple[int, int]:
        kind = BLOCK_OF[self.block_type]
        return len(self.stored), self.stored.shape[1] // kind.nbytes * kind.values

    @property
    def kind(self) -> str:
        return self.block_type

    def dequantized(self) -> Tensor:
        return dequantize(self.stored.numpy(), BLOCK_OF[self.block_type])

    def rows(self, rows: slice) -> GgufBlocks:
        return replace(self, stored=self.stored[rows])

    def part(self, shard: Shard) -> GgufBlocks:
        kind = BLOCK_OF[self.block_type]
        rows, *columns = shard.slices(self.shape)
        if any(cut % kind.values for each in columns for cut in (each.start, each.stop)):
            raise ValueError(f"a part begins or ends within a block of {kind.values}")
        within = [slice(*(cut // kind.values * kind.nbytes for cut in (each.start, each.stop))) for each in columns]
        return replace(self, stored=self.stored[(rows, *within)].contiguous())

    @classmethod
    def joined(cls, parts: Sequence[GgufBlocks]) -> GgufBlocks | None:
        return replace(parts[0], stored=torch.cat([part.stored for part in parts]))

    def some_panels(self) -> QuantizedPanels:
        layout, blocks = self._layout, self._blocks
        table = None if layout.table is None else torch.tensor(layout.table, dtype=torch.int8)
        at = layout.codes
        codes = blocks[..., at : at + 16] if isinstance(at, int) else at(blocks).flatten(1)
        return quantized_panels(codes, layout.bits, table, *layout.numbers(blocks))

    def for_tiles(self) -> GgufBlocks | None:
        return self if self._layout.tile_code else None

    def some_tiles(self) -> WeightTiles:
        layout, blocks = self._layout, self._blocks
        code, at, (scales, mins) = layout.tile_code, layout.codes, layout.numbers(blocks)
        codes = (_nibbles(blocks[..., at : at + 16]) if isinstance(at, int) else at(blocks)).flatten(1)
        group = codes.shape[1] // scales.values.shape[1]
        assert code is not None
        if code == "e2m1":  # the table of blocks has twice the values of e2m1
            exponents = (scales.values * 2).view(torch.int16) >> 7
            return tiled(codes, code, exponents.to(torch.uint8), group)
        if scales.factors is None:
            return tiled(codes, code, scales.values, group, *(() if mins is None else (mins.values, "least")))
        if mins is None:
            return tiled(codes, code, scales.factors, group, scales.values, "parts")
        assert mins.factors is not None
        factors_and_mins = torch.stack((scales.factors, -mins.factors), dim=-1).flatten(1)
        integers = [each.view(torch.uint8).unflatten(1, (-1, 8)) for each in (scales.values, mins.values)]
        return tiled(codes, code, factors_and_mins, group, six_bit_words(*integers), "six bits")

    @property
    def _layout(self) -> _Layout:
        return _LAYOUTS[self.block_type]

    @property
    def _blocks(self) -> Tensor:
        """uint8 [out_features, blocks, bytes per block]."""
        return self.stored.contiguous().view(len(self.stored), -1, BLOCK_OF[self.block_type].nbytes)


def quantized_blocks(weight: Tensor, block_type: str) -> Tensor:
    """Return a weight [rows, columns], whole blocks, as uint8 [rows, bytes of a row]: Q8_0, Q5_0, Q4_K or Q6_K."""
    step = max(1, _CHUNK_VALUES // weight.shape[1])
    return torch.cat([_QUANTIZED[block_type](some.float()) for some in weight.split(step)])


def _q8_0(weight: Tensor) -> Tensor:
    import gguf.quants  # models of other formats do not need it

    return torch.from_numpy(gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0))


def _bytes(halves: Tensor) -> Tensor:
    """Return numbers [blocks] in half precision as bytes [blocks, 2]."""
    return halves.contiguous().view(torch.uint8).view(-1, 2)


def _q4_k(weight: Tensor) -> Tensor:
    """Return blocks of 256 in 8 groups, each with a scale and a least value of six bits: 4.5 bits a value."""
    groups = weight.reshape(-1, 8, 32)
    scales, mins = _fitted_scales_and_mins(groups, 15)
    most = scales.amax(1), mins.amax(1)
    by = tuple((each / 63).half() for each in most)
    in_six_bits = [
        (63 * each / largest.clamp(min=_LEAST)[:, None]).round().clamp(0, 63)
        for each, largest in zip((scales, mins), most, strict=True)
    ]
    scale, least = (part * factor.float()[:, None] for part, factor in zip(in_six_bits, by, strict=True))
    codes = ((groups + least[..., None]) / scale.clamp(min=_LEAST)[..., None]).round().clamp(0, 15).to(torch.uint8)
    low, high = codes.view(-1, 4, 2, 32).unbind(2)
    sixes = [part.to(torch.uint8) for part in in_six_bits]
    first = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in sixes]
    last = sixes[0][:, 4:] & 15 | (sixes[1][:, 4:] & 15) << 4
    blocks = torch.cat((_bytes(by[0]), _bytes(by[1]), *first, last, (low | high << 4).flatten(1)), dim=1)
    return blocks.view(len(weight), -1)


def _fitted_scales_and_mins(groups: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return scales and negated minima, both >= 0, for codes from 0 to `most`, by least squares over rounded codes.

    Errors are weighted by the magnitude of a value and of its group; see ggml's `make_qkx2_quants`.
    """
    least, largest = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True)
    width = (largest - least).clamp(min=_LEAST)
    weights = groups.square().mean(-1, keepdim=True).sqrt() + groups.abs()
    sum_w, sum_x = weights.sum(-1, keepdim=True), (weights * groups).sum(-1, keepdim=True)
    best_scale, best_min = width / most, least
    best_error = torch.full_like(width, torch.inf)
    for move in _MOVES:
        codes = ((groups - least) * ((most + move) / width)).round_().clamp_(0, most)
        weighted = weights * codes
        sum_l, sum_l2 = weighted.sum(-1, keepdim=True), (weighted * codes).sum(-1, keepdim=True)
        sum_xl = (weighted * groups).sum(-1, keepdim=True)
        determinant = sum_w * sum_l2 - sum_l.square()
        safe = determinant.clamp(min=_LEAST)
        scale = (sum_w * sum_xl - sum_x * sum_l) / safe
        candidate_min = (sum_l2 * sum_x - sum_l * sum_xl) / safe
        above = candidate_min > 0
        scale = torch.where(above, sum_xl / sum_l2.clamp(min=_LEAST), scale)
        candidate_min = candidate_min.clamp(max=0)
        error = (weights * (scale * codes + candidate_min - groups).square_()).sum(-1, keepdim=True)
        better = (error < best_error) & (determinant > 0)
        best_scale, best_min = torch.where(better, scale, best_scale), torch.where(better, candidate_min, best_min)
        best_error = torch.where(better, error, best_error)
    return best_scale[..., 0].clamp(min=0), -best_min[..., 0]


def _q5_0(weight: Tensor) -> Tensor:
    """Return blocks of 32 with a scale: 5.5 bits a value."""
    groups = weight.reshape(-1, 1, 32)
    scale = _signed_scales(groups, 16).half()
    codes = (groups[:, 0] / torch.where(scale == 0, torch.inf, scale.float())).round().clamp(-16, 15).add(16)
    codes = codes.to(torch.uint8)
    fifth = (codes.view(-1, 4, 8) >> 4 << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    low, high = (codes & 15).view(-1, 2, 16).unbind(1)
    return torch.cat((_bytes(scale[:, 0]), fifth, low | high << 4), dim=1).view(len(weight), -1)


def _q6_k(weight: Tensor) -> Tensor:
    """Return blocks of 256 in 16 groups, each with a scale of eight bits: 6.6 bits a value."""
    groups = weight.reshape(-1, 16, 16)
    scales = _signed_scales(groups, 32)
    most = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    by = (most / -128).half()
    in_bytes = (scales * (-128 / torch.where(most == 0, torch.inf, most))).round().clamp(-128, 127)
    scale = (in_bytes * by.float())[..., None]
    codes = (groups / torch.where(scale == 0, torch.inf, scale)).round().clamp(-32, 31).add(32).to(torch.uint8)
    quarters = codes.view(-1, 2, 4, 32)  # of a half block
    low, high = quarters & 15, quarters >> 4
    low = torch.cat((low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4), dim=-1)
    high = (high << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]).sum(2, dtype=torch.uint8)
    scales_stored = in_bytes.to(torch.int8).view(torch.uint8)
    blocks = torch.cat((low.flatten(1), high.flatten(1), scales_stored, _bytes(by[:, 0])), dim=1)
    return blocks.view(len(weight), -1)


def _signed_scales(groups: Tensor, most: int) -> Tensor:
    """Return scales for codes from -most to most - 1; errors are weighted by the value's square (`make_qx_quants`)."""
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    safe = torch.where(largest == 0, torch.inf, largest)
    best, best_gain = torch.zeros_like(largest), torch.zeros_like(largest)
    weights = groups.square()
    for move in _MOVES:
        codes = (groups * (-(most + move) / safe)).round_().clamp_(-most, most - 1)
        weighted = weights * codes
        sum_xl, sum_l2 = (weighted * groups).sum(-1, keepdim=True), (weighted * codes).sum(-1, keepdim=True)
        scale = sum_xl / sum_l2.clamp(min=_LEAST)
        better = scale * sum_xl > best_gain
        best, best_gain = torch.where(better, scale, best), torch.where(better, scale * sum_xl, best_gain)
    return best[..., 0]


_QUANTIZED: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_0": _q5_0, "Q6_K": _q6_k}


@dataclass(frozen=True)
class BlockQuantization(OnlineQuantization):
    """GGUF blocks."""

    file_format = "gguf"
    covers_embedding = True
    name: str
    products: tuple[str, str]  # block type of layers' products; the second if the first does not divide the columns
    outer: tuple[str, str]  # likewise, of embedding and output layer

    def sized(self, group_size: int | None, columns: Iterable[int]) -> BlockQuantization:
        if group_size is not None:
            raise ArgumentError(f"quantize={self.name!r} has blocks of one size: leave the group size out")
        return self

    def type_of(self, name: str, columns: int, *, is_outer: bool) -> str:
        kinds = self.outer if is_outer else self.products
        fitting = [kind for kind in kinds if columns % BLOCK_OF[kind].values == 0]
        if not fitting:
            least = BLOCK_OF[kinds[-1]].values
            raise ArgumentError(
                f"quantize={self.name!r}: {name} has {columns} columns, into which blocks of {least} do not go"
            )
        return fitting[0]

    def quantized(self, weight: Tensor, weight_type: str) -> GgufBlocks:
        return GgufBlocks(quantized_blocks(weight, weight_type), weight_type)


def _weight_type(block: BlockType) -> WeightType:
    devices = {"cpu": BLOCKS_ON_CPU, "cuda": BLOCKS_ON_GPU}
    supported = tuple(device for device, names in devices.items() if block.name in names)
    return WeightType(block.name, block.nbytes * 8 / block.values, supported)


class GgufFormat(QuantizationFormat):
    """GGUF files, which `models/gguf` reads."""

    name = "gguf"
    weight_types = tuple(_weight_type(block) for block in BLOCK_TYPES.values() if block.values > 1)
    online = (
        BlockQuantization("q8_0", ("Q8_0", "Q8_0"), ("Q8_0", "Q8_0")),
        BlockQuantization("q4_k", ("Q4_K", "Q5_0"), ("Q6_K", "Q8_0")),
    )
