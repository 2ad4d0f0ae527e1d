"""Linear layers with a weight of few bits on a GPU: `small_linear`, over a weight in tiles (`weight_tiles.py`).

What stands in memory is what is read: no weight is undone there, and none is rounded. One kernel
(`tiled_linear_kernels.py`) serves any number of rows, in tiles of 8 to 128; it deals out its work, splits columns,
norms, gates, adds and begins early as `small_linear` does.

The kernel has been run in Triton's interpreter and compiled ahead of time by the tests.
"""

from typing import Annotated, Any, NamedTuple, Self

import torch
from torch import Tensor

from ..model.act_mul import gated
from ..native.optional_triton import triton
from ..native.registration import operator
from ..native.signature import AnyElement, Float32, Written
from ..norm.rms_norm import normed
from .code_words import CODES, assembly
from .small_linear import EPILOGUES, FP16_RANGE, PREFETCH_BYTES, partial_sums, parts_at_once
from .small_linear_config import SmallLinearConfig
from .tiled_linear_kernels import tiled_linear_kernel
from .weight_tiles import WeightTiles, columns_of, dequantised

_WORDS = {1: torch.int8, 2: torch.int16}  # in which the numbers of a row are read, by their bytes; else of 32 bits


def words_of(numbers: Tensor) -> Tensor:
    """Return numbers [..., n] as the integers of 8, 16 or 32 bits in which the kernel reads them."""
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


class TileForm(NamedTuple):
    """What a kernel over a weight in tiles has to know of it.

    Attributes:
        ASSEMBLY: what undoes the codes of a tile, for each of a step.
        PER_WORD: codes of a word.
        PER_HIGH: spans of a word of higher bits.
        SPAN: words of a tile's row.
        GROUP: columns that share a scale; 0: all.
        SCALES: their type.
        SECONDS: what else there is beside scales.
        SCALE_WORDS: of a row and step.
        SECOND_WORDS: of a row and step.
        BLOCK_K: columns of a step.
    """

    ASSEMBLY: tuple[Any, ...]
    PER_WORD: int
    PER_HIGH: int
    SPAN: int
    GROUP: int
    SCALES: str
    SECONDS: str
    SCALE_WORDS: int
    SECOND_WORDS: int
    BLOCK_K: int

    @classmethod
    def of(cls, tiles: WeightTiles, weight: Words, x: Tensor) -> Self:
        """Return what is to be known to multiply a weight with `x`."""
        kind, (code, _, group, span, step), scales = CODES[tiles.code], tiles.layout, tiles.scales
        dtype = torch.float16 if x.dtype == torch.float16 else torch.bfloat16
        return cls(
            ASSEMBLY=tuple(assembly(code, dtype, place) for place in range(step // (kind.per_word * span))),
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


class _Sizes(NamedTuple):
    """Of a product: features, rows of the weight, columns with and without padding, strides, and its factors."""

    width: int
    weight_rows: int
    depth: int
    columns: int
    x_stride: int
    out_stride: int
    part: int
    eps: float
    factor: float


class _Form(NamedTuple):
    """How a product is dealt out, and what is done with it; see `small_linear`."""

    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    AHEAD: int
    EVEN_K: bool
    SPLIT: bool
    AT_ONCE: int
    EPILOGUE: str
    RANGE: float


def tiled_linear_triton(
    out: Tensor,
    x: Tensor,
    tiles: WeightTiles,
    bias: Tensor | None,
    gain: Tensor | None,
    partial: Tensor | None,
    counters: Tensor | None,
    eps: float,
    epilogue: str,
    scale: float,
    config: SmallLinearConfig,
) -> None:
    """Launch the kernel; see `tiled_linear` for the arguments."""
    rows, depth = x.shape
    weight_rows, span = tiles.words.shape[1:]
    tile, columns, step = CODES[tiles.code].per_word * span, columns_of(tiles), tiles.step
    block_m, block_n, pdl = config.block_m, config.block_n, config.pdl
    part = triton.cdiv(columns // step, config.splits) * step
    splits = triton.cdiv(columns, part)  # none is empty
    ahead = min(part // tile, max(PREFETCH_BYTES // (block_n * span * 2), 1)) if pdl else 0
    weight = Words.of(tiles)
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    tiled_linear_kernel[(triton.cdiv(rows, block_m), triton.cdiv(weight_rows, block_n), splits)](
        out, x, weight, bias, gain, partial, counters, rows, splits,
        _Sizes(out.shape[1], weight_rows, depth, columns, x.stride(0), out.stride(0), part, eps, scale),
        WEIGHT=TileForm.of(tiles, weight, x),
        FORM=_Form(
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            STAGES=config.num_stages,
            AHEAD=1 << ahead.bit_length() - 1 if ahead else 0,
            EVEN_K=depth == columns,
            SPLIT=splits > 1,
            AT_ONCE=parts_at_once(block_n * block_m, config.num_warps),
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
    """Compute with torch's own operators, which need none of the configuration; see `tiled_linear`."""
    weight = dequantised(tiles)[:, : x.shape[1]]
    product = (x.float() if gain is None else normed(x, gain, eps)) @ weight.T
    if bias is not None:
        product += bias.float()
    if epilogue == "store":
        out.copy_(product)
    elif epilogue == "add":
        out.copy_(out.float().add_(product, alpha=scale))
    else:
        wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        gated(wide, product, epilogue)
        out.copy_(wide)


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
    """Write `x @ weight.T + bias` into `out`, or do more with it; sums are fp32, and weights what their codes mean.

    Args:
        out: [rows, out_features], rows may be strided; half as many columns for a gate.
        x: [rows, in_features], fp32, fp16 or bf16; rows may be strided.
        tiles: the weight; no kernel that still runs may write it.
        bias: [out_features] or None, of x's dtype.
        counters: int32, at least `config.counters(rows, out_features)`, all 0, and 0 again afterwards; products that
            run one after another share them. None where the configuration has one split.
        config: how the work is dealt out; its block_k is the step of the tiles.
        gain: fp32 [in_features]: the product is that of the RMSNorm of `x`; None: of `x` itself.
        eps: of the norm, added to the mean square.
        epilogue: "store"; "add": `out += scale * product`; or an activation of `act_mul`: `activation(gate) * up`, the
            gate being the first half of the product.
        scale: of the sum.

    Raises:
        ValueError: too few counters, or an epilogue that is not known.
    """
    partial = partial_sums(config, x, tiles.words.shape[1], counters)
    _tiled_linear(out, x, tiles, bias, gain, partial, counters, eps, epilogue, scale, config)
