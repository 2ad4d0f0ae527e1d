"""Linear layers with a weight in panels, which a compiled kernel reads as one stream, at the machine's bandwidth.

A panel is 32 output features. Layouts: float32 and float16 `[panels, in, 32]`; bfloat16 `[panels, in / 2, 32, 2]`, so
that two input features stand in one 32-bit word; int8 `[panels, in / 4, 32, 4]` with a scale for each output feature.
Each sum runs over the input features in one order, in float32: a row's result depends neither on other rows nor on the
number of threads.
"""

import torch
from torch import Tensor

from ..native.library import ELEMENTS, fits
from ..native.registration import operator
from ..native.signature import AnyElement, Wide, Written
from .linear import plain_product

PANEL = 32
_STEPS = {torch.float32: 1, torch.float16: 1, torch.bfloat16: 2, torch.int8: 4}  # input features that stand together


def can_panel(weight: Tensor) -> bool:
    """Whether a weight can be put in panels here: a float of 32 or 16 bits in host memory, and kernels are compiled."""
    return weight.dtype in ELEMENTS and fits(weight)


def to_panels(weight: Tensor) -> Tensor:
    """Return a weight [out_features, in_features] in panels; missing features are zeros.

    Args:
        weight: float32, bfloat16, float16 or int8.
    """
    out_features, in_features = weight.shape
    step = _STEPS[weight.dtype]
    panels, steps = -(-out_features // PANEL), -(-in_features // step)
    padded = weight
    if (panels * PANEL, steps * step) != weight.shape:
        padded = weight.new_zeros(panels * PANEL, steps * step)
        padded[:out_features, :in_features] = weight
    return padded.view(panels, PANEL, steps, step).transpose(1, 2).contiguous()


def _is_served(out: Tensor, x: Tensor, panels: Tensor, scales: Tensor | None, bias: Tensor | None) -> bool:
    return panels.dtype == (x.dtype if scales is None else torch.int8) and x.stride(1) == 1


@operator(is_compiled=_is_served)
def native_linear(
    out: Written[Wide],
    x: Tensor,
    panels: AnyElement,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Write `x @ (weight * scales).T + bias` into `out`, the weight in panels. CPU alone.

    Args:
        out: [rows, out_features], contiguous, of x's dtype, or fp32.
        x: [rows, in_features], float32, bfloat16 or float16, rows may be strided; any number of rows.
        panels: what `to_panels(weight)` returned, of x's dtype or int8.
        scales: [out_features], for int8.
        bias: [out_features] or None.
    """
    weight = panels.transpose(1, 2).flatten(2).flatten(0, 1)[: out.shape[1], : x.shape[1]].to(x.dtype)
    if scales is None:
        plain_product(out, x, weight, bias)
        return
    plain_product(out, x, weight, None)
    out.mul_(scales)
    if bias is not None:
        out.add_(bias)
