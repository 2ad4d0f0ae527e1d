"""Token embedding: gather one row of the table for each token of a step, times a scale."""

import torch
from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import Int32, Int64, Written

_MAX_BLOCK = 2048


# One program copies one tile of one row: it reads and writes tile * itemsize bytes, a token id and the live count.
# Dead tokens read row 0, whatever id they hold: an id out of range must never become an address.
@triton.jit
def _embedding_kernel(
    out, tokens, weight, live, hidden, weight_stride, scale, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    alive = token < tl.load(live)
    row = tl.load(tokens + token, mask=alive, other=0).to(tl.int64)
    values = tl.load(weight + row * weight_stride + columns, mask=inside)
    if HAS_SCALE:
        values = (values.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64) * hidden + columns, values, mask=inside)


def embedding_triton(out: Tensor, tokens: Tensor, weight: Tensor, live: Tensor, scale: float) -> None:
    """Launch the kernel; see `embedding`."""
    hidden = weight.shape[1]
    block = min(triton.next_power_of_2(hidden), _MAX_BLOCK)
    grid = (tokens.shape[0], triton.cdiv(hidden, block))
    _embedding_kernel[grid](
        out, tokens, weight, live, hidden, weight.stride(0), scale, HAS_SCALE=scale != 1.0, BLOCK=block, num_warps=4
    )


def _is_served(out: Tensor, tokens: Tensor, weight: Tensor, live: Tensor, scale: float) -> bool:
    return weight.stride(1) == 1


@operator(triton_version=embedding_triton, is_compiled=_is_served)
def embedding(out: Written[Tensor], tokens: Int64, weight: Tensor, live: Int32, scale: float = 1.0) -> None:
    """Write `scale * weight[tokens[i]]` into `out[i]`; tokens past the live count read row 0.

    Args:
        out: [tokens, hidden], contiguous, of the weight's dtype.
        tokens: int64 [tokens]; the live ones must lie in [0, vocab), the dead ones may hold anything.
        weight: [vocab, hidden], rows may be strided.
        live: int32 [1], how many of the tokens are live.
        scale: multiplies the rows, in fp32.
    """
    _gather(out, tokens, weight, live)
    if scale != 1.0:
        out.mul_(scale)


def _gather(out: Tensor, tokens: Tensor, weight: Tensor, live: Tensor) -> None:
    if not tokens.is_cpu:
        alive = torch.arange(tokens.shape[0], device=tokens.device) < live
        torch.index_select(weight, 0, torch.where(alive, tokens, 0), out=out)
        return
    count = int(live.item())
    if count >= tokens.shape[0]:
        torch.index_select(weight, 0, tokens, out=out)
        return
    torch.index_select(weight, 0, tokens[:count], out=out[:count])
    out[count:] = weight[0]
