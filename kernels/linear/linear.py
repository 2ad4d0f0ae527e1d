"""Linear layers with plain weights, `out = x @ weight.T + bias`: row-major, in panels, or packed by oneDNN.

Compiled kernels read a weight in panels as one stream, at full bandwidth. A panel is 32 output features. Layouts:
float32 and float16 `[panels, in, 32]`; bfloat16 `[panels, in / 2, 32, 2]`, two input features per 32-bit word. Sums run
over the input features in one order, in float32: a row's result depends neither on other rows nor on the number of
threads.

A weight packed by oneDNN is read at most of the bandwidth at any batch size, where torch's plain product reaches a
third of it at batch 8; for small matrices the plain product is faster.
"""

from typing import Annotated, Any

import torch
from torch import Tensor

from ..model.act_mul import ACTIVATIONS, gated
from ..native.instructions import instructions
from ..native.library import ELEMENTS, library
from ..native.registration import Wide, Written, operator

_CONVERTED = 1 << 20  # weight values converted at a time, which stay in the cache until they are multiplied


def torch_product(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Multiply with torch's own product; see `linear`."""
    if out.dtype == x.dtype and bias is not None:
        torch.addmm(bias, x, weight.t(), out=out)
        return
    if out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    elif x.is_cuda:
        torch.mm(x, weight.to(x.dtype).t(), out_dtype=out.dtype, out=out)
    else:
        wide, rows = x.to(out.dtype), max(1, _CONVERTED // weight.shape[1])
        for columns, part in zip(out.split(rows, dim=1), weight.split(rows), strict=True):
            torch.mm(wide, part.to(out.dtype).t(), out=columns)
    if bias is not None:
        out.add_(bias)


@operator()
def linear(out: Written[Wide], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Write `x @ weight.T + bias` into `out`.

    Args:
        out: [rows, out_features], contiguous, of x's dtype, or float32.
        x: [rows, in_features].
        weight: [out_features, in_features], of x's dtype.
        bias: [out_features] or None.
    """
    torch_product(out, x, weight, bias)


PANEL = 32
_STEPS = {torch.float32: 1, torch.float16: 1, torch.bfloat16: 2}  # input features per word


def can_panel(weight: Tensor) -> bool:
    """Whether a weight can be put in panels: a 32- or 16-bit float on a CPU with compiled kernels."""
    return weight.is_cpu and weight.dtype in ELEMENTS and library(weight.dtype, "linear") is not None


def to_panels(weight: Tensor) -> Tensor:
    """Return a weight [out_features, in_features] in panels; missing features are zeros."""
    out_features, in_features = weight.shape
    step = _STEPS[weight.dtype]
    panels, steps = -(-out_features // PANEL), -(-in_features // step)
    padded = weight
    if (panels * PANEL, steps * step) != weight.shape:
        padded = weight.new_zeros(panels * PANEL, steps * step)
        padded[:out_features, :in_features] = weight
    return padded.view(panels, PANEL, steps, step).transpose(1, 2).contiguous()


@operator(is_compiled=lambda x, panels: panels.dtype == x.dtype and x.stride(1) == 1)
def native_linear(out: Written[Wide], x: Tensor, panels: Tensor, bias: Tensor | None = None) -> None:
    """Write `x @ weight.T + bias` into `out`, the weight in panels. Only on a CPU.

    Args:
        out: [rows, out_features], contiguous, of x's dtype, or fp32.
        x: [rows, in_features], float32, bfloat16 or float16, rows may be strided.
        panels: from `to_panels`, of x's dtype.
        bias: [out_features] or None.
    """
    weight = panels.transpose(1, 2).flatten(2).flatten(0, 1)[: out.shape[1], : x.shape[1]].to(x.dtype)
    torch_product(out, x, weight, bias)


def can_gate(panels: Tensor, out_features: int) -> bool:
    """Whether `gated_linear` is faster for a weight in panels than the product and `act_mul`: not with matrix tiles."""
    return out_features % (2 * PANEL) == 0 and panels.dtype in ELEMENTS and instructions().name != "amx"


@operator(is_compiled=lambda x, panels: panels.dtype == x.dtype and x.stride(1) == 1)
def gated_linear(
    out: Written[Tensor],
    x: Tensor,
    panels: Tensor,
    activation: Annotated[str, ACTIVATIONS],
    bias: Tensor | None = None,
) -> None:
    """Write `activation(gate) * up` of the product `x @ weight.T + bias` into `out`, the weight in panels.

    The product is not rounded. Only on a CPU.

    Args:
        out: [rows, width], contiguous; width is a multiple of 32.
        x: [rows, in_features], float32, bfloat16 or float16, rows may be strided.
        panels: from `to_panels`, of x's dtype: [2 * width, in_features], the gate first.
        activation: one of `act_mul`'s.
        bias: [2 * width] or None.
    """
    weight = panels.transpose(1, 2).flatten(2).flatten(0, 1)[:, : x.shape[1]]
    gate_up = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    torch_product(gate_up, x, weight, bias)
    gated(out, gate_up, activation)


_PACKED_ROWS = 8  # oneDNN's layout for eight rows is as fast at one row, and a third faster at eight
_PACK: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_PACKED_PRODUCT: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can pack this weight: fp32 or bf16, on a CPU that it and torch support."""
    is_available = _PACK is not None and _PACKED_PRODUCT is not None and torch.backends.mkldnn.is_available()
    return is_available and weight.is_cpu and weight.dtype in (torch.float32, torch.bfloat16)


def pack(weight: Tensor) -> Tensor:
    """Pack [out_features, in_features] for oneDNN; returns an opaque tensor."""
    return _PACK(weight, _PACKED_ROWS)


@operator(keys=("MkldnnCPU",))
def packed_linear(out: Written[Tensor], x: Tensor, packed: Tensor, bias: Tensor | None = None) -> None:
    """Write `x @ weight.T + bias` into `out`, the weight packed by oneDNN. Only on a CPU.

    Args:
        out: [rows, out_features], contiguous.
        x: [rows, in_features], fp32 or bf16.
        packed: from `pack`.
        bias: [out_features] or None.
    """
    out.copy_(_PACKED_PRODUCT.default._op(x, packed, bias, "none", [], ""))
