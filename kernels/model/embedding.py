"""Token embedding: gather one row of the table for each token of a step, times a scale."""

import torch
from torch import Tensor

from ..native.early_start import early_start_options, wait_and_trigger
from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import Int32, Int64, Wide, Written

_MAX_BLOCK = 2048


# One program copies one tile of one row: it reads and writes tile * itemsize bytes, a token id and the live count.
# Dead tokens, and ids that no row has, read row 0: an id out of range must never become an address.
@triton.jit
def _embedding_kernel(
    out,
    tokens,
    weight,
    live,
    hidden,
    vocab,
    weight_stride,
    scale,
    HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_and_trigger()
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    alive = token < tl.load(live)
    row = tl.load(tokens + token, mask=alive, other=0).to(tl.int64)
    row = tl.where((row >= 0) & (row < vocab), row, 0)
    values = tl.load(weight + row * weight_stride + columns, mask=inside)
    if HAS_SCALE:
        values = (values.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64) * hidden + columns, values, mask=inside)


def embedding_triton(out: Tensor, tokens: Tensor, weight: Tensor, live: Tensor, scale: float) -> None:
    """Launch the kernel; see `embedding`."""
    vocab, hidden = weight.shape
    block = min(triton.next_power_of_2(hidden), _MAX_BLOCK)
    grid = (tokens.shape[0], triton.cdiv(hidden, block))
    _embedding_kernel[grid](
        out,
        tokens,
        weight,
        live,
        hidden,
        vocab,
        weight.stride(0),
        scale,
        HAS_SCALE=scale != 1.0,
        BLOCK=block,
        num_warps=4,
        **early_start_options(out.device),
    )


def _is_served(out: Tensor, tokens: Tensor, weight: Tensor, live: Tensor, scale: float) -> bool:
    return weight.stride(1) == 1


@operator(triton_version=embedding_triton, is_compiled=_is_served)
def embedding(out: Written[Wide], tokens: Int64, weight: Tensor, live: Int32, scale: float = 1.0) -> None:
    """Write `scale * weight[tokens[i]]` into `out[i]`; dead tokens, and ids outside [0, vocab), read row 0.

    Args:
        out: [tokens, hidden], contiguous, of the weight's dtype, or fp32.
        tokens: int64 [tokens].
        weight: [vocab, hidden], rows may be strided.
        live: int32 [1], how many of the tokens are live.
        scale: multiplies the rows, in fp32.
    """
    alive = torch.arange(tokens.shape[0], device=tokens.device) < live
    known = alive & (tokens >= 0) & (tokens < weight.shape[0])
    rows = torch.index_select(weight, 0, torch.where(known, tokens, 0))
    out.copy_(rows if scale == 1.0 else rows.float().mul_(scale))
