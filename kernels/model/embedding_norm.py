"""Token embedding and the first norm of the layers in one launch; see `embedding` and `rms_norm`."""

from typing import Any

from torch import Tensor

from ..native.early_start import early_start_options, wait_and_trigger
from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import Float32, Int32, Int64, Written
from ..norm.rms_norm import rms_norm
from .embedding import embedding


# One program gathers one row of the table and normalises it: it reads hidden * itemsize bytes, a token id, the live
# count and the gain, and writes the row twice. Of dead tokens and unknown ids it reads row 0, as `embedding` does.
@triton.jit
def _embedding_norm_kernel(
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
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:  # the gain is constant
        wait_and_trigger()
    token = tl.program_id(0)
    alive = token < tl.load(live)
    row = tl.load(tokens + token, mask=alive, other=0).to(tl.int64)
    row = tl.where((row >= 0) & (row < vocab), row, 0)
    values = tl.load(table + row * table_stride + columns, mask=inside, other=0.0)
    if HAS_SCALE:
        values = (values.to(tl.float32) * scale).to(residual.dtype.element_ty)
    place = token.to(tl.int64) * hidden + columns
    tl.store(residual + place, values, mask=inside)
    values = values.to(tl.float32)
    values = values * (1.0 / tl.sqrt(tl.sum(values * values, axis=0) / hidden + eps)) * gain
    tl.store(out + place, values.to(out.dtype.element_ty), mask=inside)


def embedding_norm_triton(
    out: Tensor,
    residual: Tensor,
    tokens: Tensor,
    table: Tensor,
    live: Tensor,
    weight: Tensor,
    scale: float,
    eps: float,
) -> None:
    """Launch the kernel; see `embedding_norm`."""
    vocab, hidden = table.shape
    block = triton.next_power_of_2(hidden)
    _embedding_norm_kernel[(tokens.shape[0],)](
        out,
        residual,
        tokens,
        table,
        live,
        weight,
        hidden,
        vocab,
        table.stride(0),
        scale,
        eps,
        HAS_SCALE=scale != 1.0,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **early_start_options(table.device),
    )


def _parts(
    out: Tensor,
    residual: Tensor,
    tokens: Tensor,
    table: Tensor,
    live: Tensor,
    weight: Tensor,
    scale: float,
    eps: float,
) -> list[tuple[str, tuple[Any, ...]]]:
    return [("embedding", (residual, tokens, table, live, scale)), ("rms_norm", (out, residual, weight, eps))]


@operator(triton_version=embedding_norm_triton, parts=_parts)
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
        residual: [tokens, hidden], contiguous, of the table's dtype, or fp32; rounded to it before it is normalised.
        tokens: int64 [tokens].
        table: [vocab, hidden], rows may be strided.
        live: int32 [1], how many of the tokens are live; the others, and ids outside [0, vocab), read row 0.
        weight: fp32 [hidden].
        scale: multiplies the rows, in fp32.
        eps: added to the mean square.
    """
    embedding(residual, tokens, table, live, scale)
    rms_norm(out, residual, weight, eps)
