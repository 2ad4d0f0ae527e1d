"""Random weights of few bits with their values in float64, and how far a product may be from those."""

import gguf
import numpy as np
import torch
from torch import Tensor

from graphdecode.kernels.linear.quantized_linear import Numbers, QuantizedPanels, quantized_linear, quantized_panels
from graphdecode.kernels.native.instructions import instructions

ROWS_IN_ALL_DIGITS = 2 if any("vnni" in flag or "dotprod" in flag for flag in instructions().flags) else 0
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)} | dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (0, 2))


def stored_weight(block_type: str, shape: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a weight as bytes of a block type, and its values in float64 as the gguf library undoes them."""
    kind = gguf.GGMLQuantizationType[block_type]
    values, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng([seed, *shape])
    stored = rng.integers(0, 256, (shape[0], shape[1] // values, nbytes), dtype=np.uint8)
    if block_type == "MXFP4":
        stored[..., 0] = rng.integers(118, 130, stored.shape[:2])
    else:
        for at in HALVES.get(block_type, (0,)):
            scales = rng.normal(0, 0.02, (*stored.shape[:2], 1)).astype(np.float16)
            stored[..., at : at + 2] = scales.view(np.uint8)
    stored = stored.reshape(shape[0], -1)
    return torch.from_numpy(stored), torch.from_numpy(gguf.quants.dequantize(stored, kind)).double()


def integer_weight(
    bits: int, groups: int, dtype: torch.dtype, zero_points: bool, shape: tuple[int, int] = (70, 384)
) -> tuple[QuantizedPanels, Tensor]:
    """Return integers with scales and zero points, as checkpoints of integers have them, and the values in float64."""
    generator = torch.Generator().manual_seed(bits * groups)
    codes = torch.randint(0, 1 << bits, shape, generator=generator)
    scales = torch.randn(shape[0], groups, generator=generator).to(dtype)
    zeros = torch.randint(-8, 8, scales.shape, generator=generator) if zero_points else None
    integers = codes.where(codes < 128, codes - 256) if bits == 8 else codes - (1 << bits - 1)
    by_group = integers.view(*scales.shape, -1).double() - (0 if zeros is None else zeros[..., None])
    mins = None if zeros is None else Numbers(-zeros.to(torch.int8), scales)  # a multiple of the scales
    table = None if bits == 8 else torch.arange(-(1 << bits - 1), 1 << bits - 1, dtype=torch.int8)
    held = quantized_panels(codes.to(torch.uint8), bits, table, Numbers(scales), mins)
    return held, (by_group * scales.double()[..., None]).flatten(1)


def float8_weight(groups: int) -> tuple[QuantizedPanels, Tensor]:
    """Return each value of float8 many times, [70, 384], and the values in float64."""
    codes = torch.arange(256).to(torch.uint8).repeat(70, 2)[:, :384].clone()
    codes[codes & 127 == 127] = 0  # not a number
    floats = codes.view(torch.float8_e4m3fn)
    scales = torch.rand(70, groups, generator=torch.Generator().manual_seed(6))
    weight = (floats.double().view(70, groups, -1) * scales.double()[..., None]).flatten(1)
    return quantized_panels(floats, 8, None, Numbers(scales)), weight


def product(
    x: Tensor, held: QuantizedPanels, out_features: int, bias: Tensor | None = None, *, batch_invariant: bool = False
) -> Tensor:
    """Return a product, written over what is no number."""
    out = torch.full((len(x), out_features), torch.nan, dtype=x.dtype)
    quantized_linear(out, x, held, bias, batch_invariant=batch_invariant)
    return out


def share_of_allowed(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> float:
    """Return the largest difference from float64, as a share of what sums in float32 and one rounding may cost.

    Rows of 16 bits may be taken as integers of 16 bits, which are off by a random 2^-16 of a span's largest at most;
    one row or two in 23 bits, where the processor multiplies bytes.
    """
    expected = x.double() @ weight.T + (0 if bias is None else bias.double())
    sizes = x.double().abs() @ weight.abs().T  # of what is summed up: sums in float32 err by so much of it
    rounding = 0 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps / 2
    allowed = 2e-6 * sizes + rounding * expected.abs() + 1e-6
    if x.dtype.itemsize == 2 and len(x) > ROWS_IN_ALL_DIGITS:
        allowed += 2**-14 * x.double().abs().amax(1, keepdim=True) * weight.norm(dim=1)
    return float(((out.double() - expected).abs() / allowed).nan_to_num(nan=torch.inf).max())


def check(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Check a product against float64."""
    assert share_of_allowed(out, x, weight, bias) <= 1
