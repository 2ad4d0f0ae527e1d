"""Token embedding: rows of a plain or quantized table, and fused with the first layer's norm.

A quantized table is in panels (CPU) or tiles (GPU), like the output layer's weight. Rows are dequantized when gathered.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..linear.code_words import CODES
from ..linear.quantized_linear import QuantizedPanels, dequantized_panels
from ..linear.weight_tiles import WeightTiles, dequantized
from ..native.optional_triton import early_start_options, tl, triton, wait_and_trigger
from ..native.registration import Float32, Int32, Int64, Wide, Written, operator
from ..norm.rms_norm import rms_norm

_MAX_BLOCK = 2048


@triton.jit
def _table_row(tokens, live, rows):
    """Return a program's row of the table; row 0 for dead tokens and invalid ids."""
    token = tl.program_id(0)
    row = tl.load(tokens + token, mask=token < tl.load(live), other=0).to(tl.int64)
    return tl.where((row >= 0) & (row < rows), row, 0)


def _table_rows(tokens: Tensor, live: Tensor, count: int) -> Tensor:
    """Return the tokens' rows of a table of `count`; row 0 for dead tokens and invalid ids."""
    alive = torch.arange(tokens.shape[0], device=tokens.device) < live
    return torch.where(alive & (tokens >= 0) & (tokens < count), tokens, 0)


# One program copies one tile of one row into the residual; with a norm the tile is the whole row, and the norm goes
# into `out`. It reads tile * itemsize bytes, a token id, the live count and the gain, and writes the tile once or
# twice.
@triton.jit
def _embedding_kernel(
    out,
    residual,
    tokens,
    table,
    live,
    weight,
    hidden,
    vocab,
    table_stride,
    scale,
    eps,
    HAS_SCALE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    if HAS_NORM:
        gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:  # the gain is constant
        wait_and_trigger()
    row = _table_row(tokens, live, vocab)
    values = tl.load(table + row * table_stride + columns, mask=inside, other=0.0)
    if HAS_SCALE:
        values = (values.to(tl.float32) * scale).to(residual.dtype.element_ty)
    offsets = tl.program_id(0).to(tl.int64) * hidden + columns
    tl.store(residual + offsets, values, mask=inside)
    if HAS_NORM:
        values = values.to(tl.float32)
        values = values * (1.0 / tl.sqrt(tl.sum(values * values, axis=0) / hidden + eps)) * gain
        tl.store(out + offsets, values.to(out.dtype.element_ty), mask=inside)


def embedding_norm_triton(out, residual, tokens, table, live, weight, scale, eps) -> None:
    """Launch the kernel; see `embedding_norm`. None for `out` and `weight`: see `embedding`."""
    vocab, hidden = table.shape
    block = triton.next_power_of_2(hidden)
    if weight is None:
        block = min(block, _MAX_BLOCK)
    _embedding_kernel[(tokens.shape[0], triton.cdiv(hidden, block))](
        out, residual, tokens, table, live, weight, hidden, vocab, table.stride(0), scale, eps,
        HAS_SCALE=scale != 1.0, HAS_NORM=weight is not None, BLOCK=block,
        num_warps=4 if weight is None else min(max(block // 512, 1), 16), **early_start_options(table.device),
    )  # fmt: skip


def embedding_triton(out, tokens, weight, live, scale) -> None:
    """Launch the kernel without a norm; see `embedding`."""
    embedding_norm_triton(None, out, tokens, weight, live, None, scale, 0.0)


@operator(triton_version=embedding_triton, is_compiled=lambda weight: weight.stride(1) == 1)
def embedding(out: Written[Wide], tokens: Int64, weight: Tensor, live: Int32, scale: float = 1.0) -> None:
    """Write `scale * weight[tokens[i]]` into `out[i]`; dead tokens, and ids outside [0, vocab), read row 0.

    Args:
        out: [tokens, hidden], contiguous, of the weight's dtype, or fp32.
        tokens: int64 [tokens].
        weight: [vocab, hidden], rows may be strided.
        live: int32 [1], how many of the tokens are live.
        scale: multiplies the rows, in fp32.
    """
    rows = torch.index_select(weight, 0, _table_rows(tokens, live, weight.shape[0]))
    out.copy_(rows if scale == 1.0 else rows.float().mul_(scale))


@operator(
    triton_version=embedding_norm_triton,
    parts=lambda out, residual, tokens, table, live, weight, scale, eps: [
        ("embedding", (residual, tokens, table, live, scale)),
        ("rms_norm", (out, residual, weight, eps)),
    ],
)
def embedding_norm(
    out: Written[Tensor],
    residual: Written[Tensor],
    tokens: Int64,
    table: Tensor,
    live: Int32,
    weight: Float32,
    scale: float,
    eps: float,
) -> None:
    """Write `scale * table[tokens[i]]` into `residual[i]`, and RMSNorm of it into `out[i]`.

    Args:
        out: [tokens, hidden], contiguous.
        residual: [tokens, hidden], contiguous, of the table's dtype, or fp32; rounded to it before it is normalized.
        tokens: int64 [tokens].
        table: [vocab, hidden], rows may be strided.
        live: int32 [1], how many of the tokens are live; the others, and ids outside [0, vocab), read row 0.
        weight: fp32 [hidden].
        scale: multiplies the rows, in fp32.
        eps: added to the mean square.
    """
    embedding(residual, tokens, table, live, scale)
    rms_norm(out, residual, weight, eps)


@operator(is_compiled=True)
def quantized_embedding(
    out: Written[Tensor], tokens: Int64, weight: QuantizedPanels, live: Int32, vocab_size: int, scale: float = 1.0
) -> None:
    """Write `scale * weight[tokens[i]]` into `out[i]`; dead tokens and invalid ids read row 0. Only on a CPU.

    Args:
        out: [tokens, hidden], contiguous, floats of 32 or 16 bits; rows are rounded to its dtype before scaling.
        tokens: int64 [tokens].
        weight: from `quantized_panels`, [vocab_size, hidden].
        live: int32 [1], how many of the tokens are live.
        vocab_size: rows of the weight.
        scale: multiplies the rows, in fp32.
    """
    rows = dequantized_panels(weight)[_table_rows(tokens, live, vocab_size)].to(out.dtype)
    out.copy_(rows.float() * scale)


_TILED_BLOCK = 1024


@triton.jit
def _small_float(code, BITS: tl.constexpr):
    """Return the value of e2m1 or e4m3; exponent 0 is subnormal."""
    MANTISSA: tl.constexpr = 1 if BITS == 4 else 3
    exponent = code >> MANTISSA & (3 if BITS == 4 else 15)
    significand = (code & ((1 << MANTISSA) - 1)) + tl.where(exponent > 0, 1 << MANTISSA, 0)
    power = tl.maximum(exponent, 1) + (125 if BITS == 4 else 117)
    value = significand.to(tl.float32) * (power << 23).to(tl.float32, bitcast=True)
    return tl.where(code >> BITS - 1 > 0, -value, value)


@triton.jit
def _six_bits(words, field, inside):
    """Return the 6-bit integers of three words, as fp32; see `weight_tiles`."""
    word = tl.load(words + tl.minimum(field // 5, 2), mask=inside, other=0)
    last = (tl.load(words, mask=inside, other=0) >> 30 & 3) | (tl.load(words + 1, mask=inside, other=0) >> 28 & 12)
    last |= tl.load(words + 2, mask=inside, other=0) >> 26 & 48
    return tl.where(field == 15, last, word >> 6 * (field % 5) & 63).to(tl.float32)


class _TiledMeta(NamedTuple):
    """Constants of a table in tiles; see `WeightTiles` and `code_words`."""

    BITS: int
    ZERO: int | None
    PER_WORD: int
    PER_HIGH: int
    SPAN: int
    GROUP: int
    UNIT: int
    SECONDS: str


# One program dequantizes some columns of one row: it reads their codes and scales, a token id and the live count.
@triton.jit
def _tiled_embedding_kernel(
    out,
    tokens,
    live,
    words,
    high,
    scales,
    seconds,
    hidden,
    weight_rows,
    scale,
    META: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    PER_WORD: tl.constexpr = META.PER_WORD
    PER_HIGH: tl.constexpr = META.PER_HIGH
    SPAN: tl.constexpr = META.SPAN
    GROUP: tl.constexpr = META.GROUP
    UNIT: tl.constexpr = META.UNIT
    SECONDS: tl.constexpr = META.SECONDS
    if PDL:
        wait_and_trigger()
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    row = _table_row(tokens, live, weight_rows)
    span, offset = columns // SPAN, columns % SPAN
    code = tl.load(words + (span // PER_WORD * weight_rows + row) * SPAN + offset, mask=inside, other=0).to(tl.int32)
    code = code >> span % PER_WORD * (16 // PER_WORD) & ((1 << 16 // PER_WORD) - 1)
    if PER_HIGH > 0:
        h = tl.load(high + (span // PER_HIGH * weight_rows + row) * SPAN + offset, mask=inside, other=0).to(tl.int32)
        code |= (h >> span % PER_HIGH * (16 // PER_HIGH) & ((1 << 16 // PER_HIGH) - 1)) << 4
    if META.ZERO is None:
        value = _small_float(code, META.BITS)
    elif META.BITS == 8:
        value = ((code ^ 128) - 128).to(tl.float32)
    else:
        value = (code - META.ZERO).to(tl.float32)
    group = columns * 0
    unit = row + group
    if GROUP > 0:
        unit, group = columns // UNIT * weight_rows + row, columns % UNIT // GROUP
    if SECONDS == "six bits":
        d = tl.load(scales + 2 * unit, mask=inside, other=0.0).to(tl.float32)
        m = tl.load(scales + 2 * unit + 1, mask=inside, other=0.0).to(tl.float32)
        value = d * _six_bits(seconds + 3 * unit, 2 * group, inside) * value
        value -= m * _six_bits(seconds + 3 * unit, 2 * group + 1, inside)
    elif SECONDS == "parts":
        part = tl.load(seconds + unit * (UNIT // GROUP) + group, mask=inside, other=0)
        value *= tl.load(scales + unit, mask=inside, other=0.0).to(tl.float32) * part.to(tl.float32)
    else:
        at = unit
        if GROUP > 0:
            at = unit * (UNIT // GROUP) + group
        factor = tl.load(scales + at, mask=inside, other=0)
        if factor.dtype == tl.uint8:
            factor = tl.maximum(factor.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)
        factor = factor.to(tl.float32)
        if SECONDS == "none":
            value *= factor
        else:
            second = tl.load(seconds + at, mask=inside, other=0).to(tl.float32)
            value = factor * value + second if SECONDS == "least" else factor * (value - second)
    value = value.to(out.dtype.element_ty).to(tl.float32) * scale
    tl.store(out + tl.program_id(0).to(tl.int64) * hidden + columns, value.to(out.dtype.element_ty), mask=inside)


def tiled_embedding_triton(out, tokens, tiles, live, scale=1.0) -> None:
    """Launch the kernel; see `tiled_embedding` for the arguments."""
    words, high, scales, seconds, code, second_kind, group, step = tiles
    kind, hidden = CODES[code], out.shape[1]
    block = min(triton.next_power_of_2(hidden), _TILED_BLOCK)
    sizes = (words.shape[2], group, max(step, group))
    meta = _TiledMeta(kind.bits, kind.zero, kind.per_word, kind.spans_of_high, *sizes, second_kind)
    _tiled_embedding_kernel[(tokens.shape[0], triton.cdiv(hidden, block))](
        out, tokens, live, words, high, scales, seconds, hidden, words.shape[1], scale,
        META=meta, BLOCK=block, num_warps=4, **early_start_options(out.device),
    )  # fmt: skip


@operator(triton_version=tiled_embedding_triton)
def tiled_embedding(out: Written[Tensor], tokens: Int64, tiles: WeightTiles, live: Int32, scale: float = 1.0) -> None:
    """Write `scale * weight[tokens[i]]` into `out[i]`; dead tokens and invalid ids read row 0.

    Args:
        out: [tokens, hidden], contiguous; rows are rounded to its dtype before they are scaled.
        tokens: int64 [tokens].
        tiles: the weight, [vocab, hidden].
        live: int32 [1], how many of the tokens are live.
        scale: multiplies the rows, in fp32.
    """
    rows = dequantized(tiles)[_table_rows(tokens, live, tiles.words.shape[1]), : out.shape[1]].to(out.dtype)
    out.copy_(rows.float() * scale)
