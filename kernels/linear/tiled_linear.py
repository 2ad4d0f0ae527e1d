"""Linear layers with a quantized weight on a GPU: `small_linear`, over a weight in tiles (`weight_tiles.py`).

Weights are read as stored: they are never dequantized in memory, and not rounded. One kernel serves any number of
rows, in tiles of 8 to 128; it distributes work, splits columns, norms, gates, adds and starts early as `small_linear`
does.

The tensor cores multiply unscaled codes, integers or small floats, with the activations; each group's sums are then
scaled in fp32. A group's minimum, or code of 0, is multiplied with the sum of the group's activations, which the tensor
cores compute as the product with ones.
"""

from typing import Annotated, Any, NamedTuple, Self

import torch
from torch import Tensor

from ..native.optional_triton import prefetch, tl, triton, wait_and_trigger
from ..native.registration import AnyElement, Float32, Written, operator
from ..norm.rms_norm import normed
from .code_words import CODES, assembly
from .skinny_linear import ProductArguments
from .small_linear import (
    EPILOGUES,
    FP16_RANGE,
    LINE_BYTES,
    ProductMeta,
    ProductSizes,
    SmallLinearConfig,
    activations,
    block_rows,
    finish,
    lines_ahead,
    old_values,
    partial_sums,
    parts_in_flight,
    should_prefetch,
    write_epilogue,
)
from .weight_tiles import WeightTiles, columns_of, dequantized
from .wide_linear import launch_product


@triton.jit
def dequantized_bits(words, high, ASSEMBLY: tl.constexpr, PER_WORD: tl.constexpr, PER_HIGH: tl.constexpr):
    """Dequantize a tile's codes to the bits of 16-bit floats: one int16 tensor per span, in order."""
    if PER_WORD == 2:
        result = tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [words], (tl.int16, tl.int16), True, 2)
    elif PER_HIGH == 0:
        result = tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,=r,=r,r", [words], (tl.int16, tl.int16, tl.int16, tl.int16), True, 2
        )
    else:
        result = tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,=r,=r,r,r", [words, high], (tl.int16, tl.int16, tl.int16, tl.int16), True, 2
        )
    return result


@triton.jit
def words_at(at, COUNT: tl.constexpr):
    """Return adjacent words."""
    if COUNT == 1:
        result = (tl.load(at), 0)
    elif COUNT == 2:
        result = (tl.load(at), tl.load(at + 1))
    elif COUNT == 3:
        result = (tl.load(at), tl.load(at + 1), tl.load(at + 2))  # type: ignore[assignment]
    elif COUNT == 4:
        result = (tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))  # type: ignore[assignment]
    else:
        result = (  # type: ignore[assignment]
            tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3),
            tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7),
        )  # fmt: skip
    return result


@triton.jit
def number_at(words, INDEX: tl.constexpr, KIND: tl.constexpr):
    """Return one of the numbers in words of 8, 16 or 32 bits, as fp32."""
    if KIND == "float32":
        result = words[INDEX].to(tl.float32, bitcast=True)
    elif KIND == "float16":
        half = words[INDEX // (words[0].dtype.primitive_bitwidth // 16)]
        if words[0].dtype == tl.int32:
            half = (half >> 16 * (INDEX % 2)).to(tl.int16)
        result = half.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "bfloat16":
        if words[0].dtype == tl.int32:
            wide = words[INDEX // 2] << 16 if INDEX % 2 == 0 else words[INDEX // 2] & -65536
        else:
            wide = words[INDEX].to(tl.int32) << 16
        result = wide.to(tl.float32, bitcast=True)
    elif KIND == "int8":
        result = ((words[INDEX // 4] << 24 - 8 * (INDEX % 4)) >> 24).to(tl.float32)
    else:
        if words[0].dtype == tl.int32:
            byte = words[INDEX // 4] >> 8 * (INDEX % 4) & 255
        elif words[0].dtype == tl.int16:
            byte = words[INDEX // 2].to(tl.int32) >> 8 * (INDEX % 2) & 255
        else:
            byte = words[INDEX].to(tl.int32) & 255
        if KIND == "exponent":  # exponent 0 is subnormal
            result = tl.maximum(byte << 23, 1 << 22).to(tl.float32, bitcast=True)
        else:
            result = byte.to(tl.float32)
    return result


@triton.jit
def six_bits_at(words, FIELD: tl.constexpr):
    """Return one of the sixteen 6-bit integers in three words, as fp32."""
    if FIELD < 15:
        result = words[FIELD // 5] >> 6 * (FIELD % 5) & 63
    else:
        result = (words[0] >> 30 & 3) | (words[1] >> 28 & 12) | (words[2] >> 26 & 48)
    return result.to(tl.float32)


@triton.jit
def _with_group(acc, product, total, scales, seconds, INDEX: tl.constexpr, SCALES: tl.constexpr, SECONDS: tl.constexpr):
    """Add the scaled sums of one group of a step."""
    if SECONDS == "six bits":
        scale = number_at(scales, 0, SCALES) * six_bits_at(seconds, 2 * INDEX)
        acc += scale[:, None] * product
        least = number_at(scales, 1, SCALES) * six_bits_at(seconds, 2 * INDEX + 1)
        acc -= least[:, None] * total
    elif SECONDS == "parts":
        scale = number_at(scales, 0, SCALES) * number_at(seconds, INDEX, "int8")
        acc += scale[:, None] * product
    else:
        scale = number_at(scales, INDEX, SCALES)
        if SECONDS == "zeros":
            product -= number_at(seconds, INDEX, "uint8")[:, None] * total
        acc += scale[:, None] * product
        if SECONDS == "least":
            acc += number_at(seconds, INDEX, SCALES)[:, None] * total
    return acc


@triton.jit
def tiled_sums(
    x_rows, gain, row_mask, weight, row, weight_rows, begin, end, depth, WEIGHT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, RANGE: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Return products [BLOCK_N, BLOCK_M] of weight rows with rows of x over a range of columns, and x's squares there.

    `x_rows`: pointers to the first columns of x. Without a gain, squares are zeros.
    """
    ASSEMBLY: tl.constexpr = WEIGHT.ASSEMBLY
    PER_WORD: tl.constexpr = WEIGHT.PER_WORD
    PER_HIGH: tl.constexpr = WEIGHT.PER_HIGH
    SPAN: tl.constexpr = WEIGHT.SPAN
    GROUP: tl.constexpr = WEIGHT.GROUP
    SCALES: tl.constexpr = WEIGHT.SCALES
    SECONDS: tl.constexpr = WEIGHT.SECONDS
    BLOCK_K: tl.constexpr = WEIGHT.BLOCK_K
    TILE: tl.constexpr = PER_WORD * SPAN
    FLOAT: tl.constexpr = tl.float16 if x_rows.dtype.element_ty == tl.float16 else tl.bfloat16
    UNIT: tl.constexpr = max(GROUP, BLOCK_K)
    HAS_TOTALS: tl.constexpr = SECONDS == "least" or SECONDS == "zeros" or SECONDS == "six bits"
    k = tl.arange(0, SPAN)
    plane = tl.cast(weight_rows, tl.int64) * SPAN  # words of one tile
    w_rows = row.to(tl.int64)[:, None] * SPAN + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M, SPAN], tl.float32)
    for at in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        x_step = x_rows + at
        if GROUP > 0:
            unit = at // UNIT * weight_rows + row
            s = words_at(weight.scales + unit * WEIGHT.SCALE_WORDS, WEIGHT.SCALE_WORDS)
            t = s
            if SECONDS != "none":
                t = words_at(weight.seconds + unit * WEIGHT.SECOND_WORDS, WEIGHT.SECOND_WORDS)
        product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        total = product
        for tile in tl.static_range(BLOCK_K // TILE):
            w = tl.load(weight.words + (at // TILE + tile) * plane + w_rows, eviction_policy="evict_first")
            if PER_HIGH == 0:
                h = w  # there is none
            elif tile * PER_WORD % PER_HIGH == 0:
                high_tile = at // (PER_HIGH * SPAN) + tile * PER_WORD // PER_HIGH
                h = tl.load(weight.high + high_tile * plane + w_rows, eviction_policy="evict_first")
            codes = dequantized_bits(w, h, tl.constexpr(ASSEMBLY[tile]), PER_WORD, PER_HIGH)  # bare in Triton 3.6
            for span in tl.static_range(PER_WORD):
                a, squares = activations(
                    x_step + (tile * PER_WORD + span) * SPAN, gain, squares, row_mask,
                    at + (tile * PER_WORD + span) * SPAN + k, depth, RANGE, EVEN_K,
                )  # fmt: skip
                code = codes[span].to(FLOAT, bitcast=True).to(a.dtype)
                a = tl.trans(a)
                if GROUP == 0:
                    acc = tl.dot(code, a, acc, input_precision="ieee")
                else:
                    product = tl.dot(code, a, product, input_precision="ieee")
                    if HAS_TOTALS:
                        ones = tl.full([BLOCK_N, SPAN], 1.0, tl.float32).to(a.dtype)  # for Triton 3.6's interpreter
                        total = tl.dot(ones, a, total, input_precision="ieee")
                    if ((tile * PER_WORD + span + 1) * SPAN) % min(GROUP, BLOCK_K) == 0:
                        acc = _with_group(
                            acc, product, total, s, t, (tile * PER_WORD + span) * SPAN // GROUP, SCALES, SECONDS
                        )
                        product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                        total = product
    if GROUP == 0:
        acc *= number_at(words_at(weight.scales + row, 1), 0, SCALES)[:, None]
    return acc, squares


# One program multiplies block_m rows with block_n rows of the weight, over one part of the columns, a step at a time:
# it reads the words and scales of block_n rows once, and as many columns of x, which the L2 cache holds.
@triton.jit(do_not_specialize=["rows", "splits"])  # one code for any rows: bits must not depend on their number
def tiled_linear_kernel(
    out,
    x,
    weight,
    bias,
    gain,
    partial,
    counters,
    rows,
    splits,
    sizes,
    WEIGHT: tl.constexpr,
    META: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply on the tensor cores."""
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    EPILOGUE: tl.constexpr = META.EPILOGUE
    SPAN: tl.constexpr = WEIGHT.SPAN
    TILE: tl.constexpr = WEIGHT.PER_WORD * SPAN
    width, out_stride = sizes.width, sizes.out_stride
    block = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = tl.program_id(2) * sizes.part
    end = tl.minimum(begin + sizes.part, sizes.columns)
    k = tl.arange(0, SPAN)
    row = block_rows(block, width, BLOCK_N, EPILOGUE != "store" and EPILOGUE != "add")
    plane = tl.cast(sizes.weight_rows, tl.int64) * SPAN  # words of one tile
    if META.AHEAD > 0 and should_prefetch(sizes.prefetchers):
        first = block_rows(block, width, BLOCK_N, EPILOGUE != "store" and EPILOGUE != "add", max(64 // SPAN, 1))
        tiles = begin // TILE + tl.arange(0, META.AHEAD)
        lines = weight.words + tiles.to(tl.int64)[None, :] * plane + first.to(tl.int64)[:, None] * SPAN
        prefetch(lines, (tiles < end // TILE)[None, :])
    offsets = tl.zeros([BLOCK_N], tl.float32)
    if bias is not None:
        offsets += tl.load(bias + row).to(tl.float32)
    if PDL:
        wait_and_trigger()
    row_mask = (m < rows)[:, None]
    x_rows = x + m.to(tl.int64)[:, None] * sizes.x_stride + k[None, :]
    old = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if EPILOGUE == "add" and not META.SPLIT:  # in flight while the weight is read
        old = old_values(out, m, rows, block, width, out_stride, BLOCK_N)
    acc, squares = tiled_sums(
        x_rows, gain, row_mask, weight, row, sizes.weight_rows, begin, end, sizes.depth, WEIGHT, BLOCK_M, BLOCK_N,
        META.STAGES, META.RANGE, META.EVEN_K,
    )  # fmt: skip
    finish(
        out, partial, counters, acc, tl.sum(squares, axis=1), offsets, old, m, rows, block, tl.num_programs(1),
        out_stride, splits, sizes, META, gain is not None, bias is not None,
    )  # fmt: skip


_WORDS = {1: torch.int8, 2: torch.int16}  # words that a row's numbers are read in, by their bytes; else of 32 bits


def words_of(numbers: Tensor) -> Tensor:
    """Return numbers [..., n] as the 8-, 16- or 32-bit integers that the kernel reads."""
    nbytes = numbers.shape[-1] * numbers.element_size()
    return numbers.view(_WORDS.get(nbytes, torch.int32))


class Words(NamedTuple):
    """A weight in tiles as the kernels read it; see `WeightTiles`."""

    words: Tensor
    high: Tensor | None
    scales: Tensor
    seconds: Tensor | None

    @classmethod
    def of(cls, tiles: WeightTiles) -> Self:
        """Return the words of a weight's tensors."""
        seconds = None if tiles.seconds is None else words_of(tiles.seconds)
        return cls(tiles.words, tiles.high, words_of(tiles.scales), seconds)


class TileMeta(NamedTuple):
    """Constants of a kernel over a weight in tiles."""

    ASSEMBLY: tuple[Any, ...]  # PTX that dequantizes a tile, for each tile of a step
    PER_WORD: int  # codes per word
    PER_HIGH: int  # spans per word of higher bits
    SPAN: int  # words of a tile's row
    GROUP: int  # columns that share a scale; 0: all
    SCALES: str  # type of the scales
    SECONDS: str  # kind of the second numbers; see `weight_tiles`
    SCALE_WORDS: int  # words of scales per row and step
    SECOND_WORDS: int  # words of second numbers per row and step
    BLOCK_K: int  # columns of a step

    @classmethod
    def of(cls, tiles: WeightTiles, weight: Words, x: Tensor) -> Self:
        """Return the constants for a product of a weight with `x`."""
        kind, (code, _, group, span, step), scales = CODES[tiles.code], tiles.layout, tiles.scales
        dtype = torch.float16 if x.dtype == torch.float16 else torch.bfloat16
        return cls(
            ASSEMBLY=tuple(assembly(code, dtype, index) for index in range(step // (kind.per_word * span))),
            PER_WORD=kind.per_word,
            PER_HIGH=kind.spans_of_high,
            SPAN=span,
            GROUP=group,
            SCALES="exponent" if scales.dtype == torch.uint8 else str(scales.dtype).removeprefix("torch."),
            SECONDS=tiles.second_kind,
            SCALE_WORDS=weight.scales.shape[-1],
            SECOND_WORDS=0 if weight.seconds is None else weight.seconds.shape[-1],
            BLOCK_K=step,
        )


def tiled_linear_triton(out, x, tiles, bias, gain, partial, counters, eps, epilogue, scale, config) -> None:
    """Launch the kernel; see `tiled_linear` for the arguments."""
    if config.kind == "skinny":
        launch_product(out, x, tiles, ProductArguments(bias, gain, eps, epilogue, scale), config.skinny)
        return
    (rows, depth), width = x.shape, out.shape[1]
    weight_rows, span = tiles.words.shape[1:]
    tile, columns, step = CODES[tiles.code].per_word * span, columns_of(tiles), tiles.step
    block_m, block_n, pdl = config.block_m, config.block_n, config.pdl
    part = triton.cdiv(columns // step, config.splits) * step
    splits = triton.cdiv(columns, part)  # none is empty
    row_lines = block_n * span * 2 // LINE_BYTES  # of a tile
    ahead, prefetchers = lines_ahead(row_lines, part // tile * LINE_BYTES, config.num_warps) if pdl else (0, 0)
    weight = Words.of(tiles)
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    tiled_linear_kernel[(triton.cdiv(rows, block_m), triton.cdiv(weight_rows, block_n), splits)](
        out, x, weight, bias, gain, partial, counters, rows, splits,
        ProductSizes(width, depth, x.stride(0), part, eps, scale, prefetchers, weight_rows, columns, out.stride(0)),
        WEIGHT=TileMeta.of(tiles, weight, x),
        META=ProductMeta(
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=step,
            STAGES=config.num_stages,
            AHEAD=ahead,
            EVEN_K=depth == columns,
            SPLIT=splits > 1,
            IN_FLIGHT=parts_in_flight(block_n * block_m, config.num_warps),
            EPILOGUE=epilogue,
            RANGE=FP16_RANGE if x.dtype == torch.float16 else 1.0,
        ),
        PDL=pdl,
        num_warps=config.num_warps,
        **options,
    )  # fmt: skip


@operator(triton_version=tiled_linear_triton)
def _tiled_linear(
    out: Written[Tensor],
    x: Tensor,
    tiles: WeightTiles,
    bias: Tensor | None,
    gain: Float32 | None,
    partial: Written[AnyElement] | None,
    counters: Written[AnyElement] | None,
    eps: float,
    epilogue: Annotated[str, EPILOGUES],
    scale: float,
    config: SmallLinearConfig,
) -> None:
    """Compute with torch operators; the configuration is not used. See `tiled_linear`."""
    weight = dequantized(tiles)[:, : x.shape[1]]
    product = (x.float() if gain is None else normed(x, gain, eps)) @ weight.T
    if bias is not None:
        product += bias.float()
    if epilogue == "store":
        out.copy_(product)
    else:
        write_epilogue(out, product, epilogue, scale)


def tiled_linear(
    out: Tensor,
    x: Tensor,
    tiles: WeightTiles,
    bias: Tensor | None,
    counters: Tensor | None,
    config: SmallLinearConfig,
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    epilogue: str = "store",
    scale: float = 1.0,
) -> None:
    """Write `x @ weight.T + bias`, with an epilogue, into `out`; sums are fp32, weights are not rounded.

    Args:
        out: [rows, out_features], rows may be strided; half as many columns for a gate.
        x: [rows, in_features], fp32, fp16 or bf16; rows may be strided.
        tiles: the weight; no kernel in flight may write it.
        bias: [out_features] or None, of x's dtype.
        config: the launch configuration; its block_k is the step of the tiles.
        others: see `small_linear`.

    Raises:
        ValueError: too few counters, or an unknown epilogue.
    """
    partial = partial_sums(config, x, tiles.words.shape[1], counters)
    _tiled_linear(out, x, tiles, bias, gain, partial, counters, eps, epilogue, scale, config)
