"""Token embedding from a table in tiles of few bits, which is the output layer's weight, too, or like one."""

import torch
from torch import Tensor

from ..linear.code_words import CODES
from ..linear.weight_tiles import WeightTiles, dequantised
from ..native.early_start import early_start_options, wait_and_trigger
from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import Int32, Int64, Written

_MAX_BLOCK = 1024


@triton.jit
def _small_float(code, BITS: tl.constexpr):
    """Return what e2m1 or e4m3 stands for: with a leading one but for the exponent 0, which means the same as 1."""
    MANTISSA: tl.constexpr = 1 if BITS == 4 else 3
    exponent = code >> MANTISSA & (3 if BITS == 4 else 15)
    significand = (code & ((1 << MANTISSA) - 1)) + tl.where(exponent > 0, 1 << MANTISSA, 0)
    power = tl.maximum(exponent, 1) + (125 if BITS == 4 else 117)
    value = significand.to(tl.float32) * (power << 23).to(tl.float32, bitcast=True)
    return tl.where(code >> BITS - 1 > 0, -value, value)


@triton.jit
def _six_bits(words, field, inside):
    """Return integers of 6 bits that three words hold, as fp32; see `weight_tiles`."""
    own = tl.load(words + tl.minimum(field // 5, 2), mask=inside, other=0)
    last = (tl.load(words, mask=inside, other=0) >> 30 & 3) | (tl.load(words + 1, mask=inside, other=0) >> 28 & 12)
    last |= tl.load(words + 2, mask=inside, other=0) >> 26 & 48
    return tl.where(field == 15, last, own >> 6 * (field % 5) & 63).to(tl.float32)


# One program undoes some columns of one row: it reads their codes and scales, a token id and the live count. Dead
# tokens, and ids that no row has, read row 0: an id out of range must never become an address.
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
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    PER_WORD: tl.constexpr,
    PER_HIGH: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    SECONDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_and_trigger()
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    row = tl.load(tokens + token, mask=token < tl.load(live), other=0).to(tl.int64)
    row = tl.where((row >= 0) & (row < weight_rows), row, 0)
    span, place = columns // SPAN, columns % SPAN
    code = tl.load(words + (span // PER_WORD * weight_rows + row) * SPAN + place, mask=inside, other=0).to(tl.int32)
    code = code >> span % PER_WORD * (16 // PER_WORD) & ((1 << 16 // PER_WORD) - 1)
    if PER_HIGH > 0:
        h = tl.load(high + (span // PER_HIGH * weight_rows + row) * SPAN + place, mask=inside, other=0).to(tl.int32)
        code |= (h >> span % PER_HIGH * (16 // PER_HIGH) & ((1 << 16 // PER_HIGH) - 1)) << 4
    if ZERO is None:
        value = _small_float(code, BITS)
    elif BITS == 8:
        value = ((code ^ 128) - 128).to(tl.float32)
    else:
        value = (code - ZERO).to(tl.float32)
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
    tl.store(out + token.to(tl.int64) * hidden + columns, value.to(out.dtype.element_ty), mask=inside)


def tiled_embedding_triton(out: Tensor, tokens: Tensor, tiles: WeightTiles, live: Tensor, scale: float = 1.0) -> None:
    """Launch the kernel; see `tiled_embedding` for the arguments."""
    words, high, scales, seconds, code, second_kind, group, step = tiles
    kind, hidden = CODES[code], out.shape[1]
    block = min(triton.next_power_of_2(hidden), _MAX_BLOCK)
    _tiled_embedding_kernel[(tokens.shape[0], triton.cdiv(hidden, block))](
        out, tokens, live, words, high, scales, seconds, hidden, words.shape[1], scale,
        BITS=kind.bits,
        ZERO=kind.zero,
        PER_WORD=kind.per_word,
        PER_HIGH=kind.spans_of_high,
        SPAN=words.shape[2],
        GROUP=group,
        UNIT=max(step, group),
        SECONDS=second_kind,
        BLOCK=block,
        num_warps=4,
        **early_start_options(out.device),
    )  # fmt: skip


@operator(triton_version=tiled_embedding_triton)
def tiled_embedding(out: Written[Tensor], tokens: Int64, tiles: WeightTiles, live: Int32, scale: float = 1.0) -> None:
    """Write `scale * weight[tokens[i]]` into `out[i]`; dead tokens, and ids that no row has, read row 0.

    Args:
        out: [tokens, hidden], contiguous; rows are rounded to its dtype before they are scaled.
        tokens: int64 [tokens].
        tiles: the weight, [vocab, hidden].
        live: int32 [1], how many of the tokens are live.
        scale: multiplies the rows, in fp32.
    """
    alive = torch.arange(tokens.shape[0], device=tokens.device) < live
    known = alive & (tokens >= 0) & (tokens < tiles.words.shape[1])
    table = dequantised(tiles)[:, : out.shape[1]]
    out.copy_(table[torch.where(known, tokens, 0)].to(out.dtype).float() * scale)
