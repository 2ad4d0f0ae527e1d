"""Linear layers with a weight in panels, which a compiled kernel reads as one stream, at the machine's bandwidth.

A panel is 32 output features. Layouts: float32 `[panels, in, 32]`; bfloat16 `[panels, in / 2, 32, 2]`, so that two
input features stand in one 32-bit word; int8 `[panels, in / 4, 32, 4]` with a scale for each output feature. Each sum
runs over the input features in order, in float32: a row's result depends neither on other rows nor on the number of
threads.
"""

import torch
from torch import Tensor

from ..native.library import ELEMENTS, NativeCall, fits
from ..native.registration import operator

PANEL = 32
_STEPS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}  # input features that stand in one 32-bit word


def can_panel(weight: Tensor) -> bool:
    """Whether a weight can be put in panels here: float32 or bfloat16 in host memory, and kernels are compiled."""
    return weight.dtype in ELEMENTS and fits(weight)


def to_panels(weight: Tensor) -> Tensor:
    """Return a weight [out_features, in_features] in panels; missing features are zeros.

    Args:
        weight: float32 or bfloat16, or int8.
    """
    out_features, in_features = weight.shape
    step = _STEPS[weight.dtype]
    panels, steps = -(-out_features // PANEL), -(-in_features // step)
    padded = weight
    if (panels * PANEL, steps * step) != weight.shape:
        padded = weight.new_zeros(panels * PANEL, steps * step)
        padded[:out_features, :in_features] = weight
    return padded.view(panels, PANEL, steps, step).transpose(1, 2).contiguous()


def bind_native_linear(
    out: Tensor, x: Tensor, panels: Tensor, scales: Tensor | None, bias: Tensor | None
) -> NativeCall:
    """Return the product of fixed tensors; see `native_linear`."""
    rows, in_features = x.shape
    padded = panels.shape[1] * panels.shape[3]
    wide = torch.empty(rows, padded)
    kernel = "linear" if scales is None else "int8_linear"
    sizes = (rows, in_features, out.shape[1], x.stride(0))
    return NativeCall(kernel, x.dtype, out, x, panels, bias, wide, *sizes, scales)


def native_linear_on_host(out: Tensor, x: Tensor, panels: Tensor, scales: Tensor | None, bias: Tensor | None) -> None:
    """Multiply with a weight in panels; see `native_linear`."""
    bind_native_linear(out, x, panels, scales, bias)()


_native_linear = operator(
    "native_linear(Tensor(a!) out, Tensor x, Tensor panels, Tensor? scales, Tensor? bias) -> ()",
    torch_version=native_linear_on_host,
    bound_version=bind_native_linear,
)


def native_linear(
    out: Tensor, x: Tensor, panels: Tensor, scales: Tensor | None = None, bias: Tensor | None = None
) -> None:
    """Write `x @ (weight * scales).T + bias` into `out`, the weight in panels. CPU alone.

    Args:
        out: [rows, out_features], contiguous.
        x: [rows, in_features], float32 or bfloat16, rows may be strided; any number of rows.
        panels: what `to_panels(weight)` returned, of x's dtype or int8.
        scales: [out_features], for int8.
        bias: [out_features] or None.
    """
    _native_linear(out, x, panels, scales, bias)
