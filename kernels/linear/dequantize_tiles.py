"""Rows of a weight in tiles, dequantized into memory: with many activation rows cuBLAS then multiplies them faster.

A product over tiles dequantizes a weight for each tile of activation rows anew. Dequantized once, the weight costs its
bytes, and the 16-bit values written and read again, whatever the number of activation rows.
"""

from torch import Tensor

from ..native.optional_triton import early_start_options, tl, triton, wait_and_trigger
from ..native.registration import Written, operator
from .linear import linear
from .tiled_linear import TileMeta, Words, dequantized_bits, number_at, six_bits_at, words_at
from .weight_tiles import WeightTiles, columns_of, dequantized

_BLOCK_ROWS, _NUM_WARPS = 32, 4
_ALIGNED_ROWS = 128  # of the weight, so that cuBLAS gets whole tiles


@triton.jit
def _scaled(value, scales, seconds, INDEX: tl.constexpr, SCALES: tl.constexpr, SECONDS: tl.constexpr):
    """Return the values of one group of a step."""
    if SECONDS == "six bits":
        scale = number_at(scales, 0, SCALES) * six_bits_at(seconds, 2 * INDEX)
        least = number_at(scales, 1, SCALES) * six_bits_at(seconds, 2 * INDEX + 1)
        result = scale[:, None] * value - least[:, None]
    elif SECONDS == "parts":
        result = (number_at(scales, 0, SCALES) * number_at(seconds, INDEX, "int8"))[:, None] * value
    elif SECONDS == "least":
        result = number_at(scales, INDEX, SCALES)[:, None] * value + number_at(seconds, INDEX, SCALES)[:, None]
    elif SECONDS == "zeros":
        result = number_at(scales, INDEX, SCALES)[:, None] * (value - number_at(seconds, INDEX, "uint8")[:, None])
    else:
        result = number_at(scales, INDEX, SCALES)[:, None] * value
    return result


# One program dequantizes a step's columns of BLOCK_N rows: it reads their words and scales once, and writes the values.
@triton.jit
def dequantize_tiles_kernel(
    out, weight, first, rows, depth, weight_rows, WEIGHT: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Dequantize rows of a weight from `first` on."""
    ASSEMBLY: tl.constexpr = WEIGHT.ASSEMBLY
    PER_WORD: tl.constexpr = WEIGHT.PER_WORD
    PER_HIGH: tl.constexpr = WEIGHT.PER_HIGH
    SPAN: tl.constexpr = WEIGHT.SPAN
    GROUP: tl.constexpr = WEIGHT.GROUP
    SCALES: tl.constexpr = WEIGHT.SCALES
    SECONDS: tl.constexpr = WEIGHT.SECONDS
    BLOCK_K: tl.constexpr = WEIGHT.BLOCK_K
    TILE: tl.constexpr = PER_WORD * SPAN
    UNIT: tl.constexpr = max(GROUP, BLOCK_K)
    EVERY: tl.constexpr = GROUP if GROUP > 0 else BLOCK_K  # columns of a scale within a step
    FLOAT: tl.constexpr = tl.float16 if out.dtype.element_ty == tl.float16 else tl.bfloat16
    if PDL:
        wait_and_trigger()
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(first + n, weight_rows - 1)
    at = tl.program_id(0) * BLOCK_K
    k = tl.arange(0, SPAN)
    plane = tl.cast(weight_rows, tl.int64) * SPAN  # words of one tile
    w_rows = row.to(tl.int64)[:, None] * SPAN + k[None, :]
    if GROUP > 0:
        unit = at // UNIT * weight_rows + row
        s = words_at(weight.scales + unit * WEIGHT.SCALE_WORDS, WEIGHT.SCALE_WORDS)
        t = s
        if SECONDS != "none":
            t = words_at(weight.seconds + unit * WEIGHT.SECOND_WORDS, WEIGHT.SECOND_WORDS)
    else:
        s = words_at(weight.scales + row, 1)
        t = s
    for tile in tl.static_range(BLOCK_K // TILE):
        w = tl.load(weight.words + (at // TILE + tile) * plane + w_rows, eviction_policy="evict_first")
        if PER_HIGH == 0:
            h = w  # there is none
        elif tile * PER_WORD % PER_HIGH == 0:
            high_tile = at // (PER_HIGH * SPAN) + tile * PER_WORD // PER_HIGH
            h = tl.load(weight.high + high_tile * plane + w_rows, eviction_policy="evict_first")
        codes = dequantized_bits(w, h, tl.constexpr(ASSEMBLY[tile]), PER_WORD, PER_HIGH)  # bare in Triton 3.6
        for span in tl.static_range(PER_WORD):
            value = codes[span].to(FLOAT, bitcast=True).to(tl.float32)
            value = _scaled(value, s, t, (tile * PER_WORD + span) * SPAN // EVERY, SCALES, SECONDS)
            columns = at + (tile * PER_WORD + span) * SPAN + k
            mask = (n < rows)[:, None] & (columns < depth)[None, :]
            tl.store(
                out + n.to(tl.int64)[:, None] * depth + columns[None, :], value.to(out.dtype.element_ty), mask=mask
            )


def dequantize_tiles_triton(out, tiles, first) -> None:
    """Launch the kernel; see `dequantize_tiles` for the arguments."""
    weight = Words.of(tiles)
    grid = (columns_of(tiles) // tiles.step, triton.cdiv(out.shape[0], _BLOCK_ROWS))
    dequantize_tiles_kernel[grid](
        out, weight, first, out.shape[0], out.shape[1], tiles.words.shape[1],
        WEIGHT=TileMeta.of(tiles, weight, out), BLOCK_N=_BLOCK_ROWS, num_warps=_NUM_WARPS,
        **early_start_options(out.device),
    )  # fmt: skip


@operator(triton_version=dequantize_tiles_triton)
def dequantize_tiles(out: Written[Tensor], tiles: WeightTiles, first: int) -> None:
    """Write rows of a weight, from `first` on, into `out`.

    Args:
        out: [rows, in_features], contiguous, 16-bit floats: values are rounded to its dtype.
        tiles: the weight.
        first: of the rows; all of them are in the weight.
    """
    out.copy_(dequantized(tiles)[first : first + out.shape[0], : out.shape[1]])


def dequantized_linear(out: Tensor, x: Tensor, tiles: WeightTiles, bias: Tensor | None, scratch: Tensor) -> None:
    """Write `x @ weight.T + bias` into `out`, the weight dequantized first, in parts that `scratch` holds.

    Args:
        out: [rows, out_features] of x's dtype; rows may be strided.
        x: [rows, in_features], 16-bit floats.
        tiles: the weight.
        bias: [out_features] or None.
        scratch: [elements] of x's dtype, written; it holds at least a row of the weight.
    """
    depth, height = x.shape[1], tiles.words.shape[1]
    count = -(-height // max(scratch.numel() // depth, 1))  # parts
    most = min(-(-height // count // _ALIGNED_ROWS) * _ALIGNED_ROWS, scratch.numel() // depth)
    for first in range(0, height, most):
        rows = slice(first, min(first + most, height))
        weight = scratch[: (rows.stop - first) * depth].view(-1, depth)
        dequantize_tiles(weight, tiles, first)
        linear(out[:, rows], x, weight, None if bias is None else bias[rows])
