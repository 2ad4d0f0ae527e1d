"""Linear layers of a few rows on a GPU, `out = x @ weight.T + bias`, made to read the weight at full bandwidth.

Two kernels (`small_linear_kernels.py`): one multiplies tiles of 16 to 64 rows on the tensor cores, the other one or two
rows on the CUDA cores. Both deal the weight's rows to programs in blocks, and its columns in `splits` parts, so that
there is work for the whole chip; the last program of a block to arrive adds the parts up, in their order. Nothing
depends on who that is: the same inputs give the same bits. The tensor-core kernel adds up a row in the same order
whatever stands in the other rows and however many there are, so that one configuration is batch-invariant.

What stands before and behind the product in a layer can be part of the same launch: RMSNorm of the activations, and
behind the product the gate of an MLP, or the sum with the residual.

With an early start (see `early_start`) a program asks for its part of the weight before it waits for the activations.

The kernels have been run in Triton's interpreter and compiled ahead of time by the tests.
"""

from typing import Annotated, Any

import torch
from torch import Tensor

from ..model.act_mul import ACTIVATIONS, gated
from ..native.optional_triton import triton
from ..native.registration import operator
from ..native.signature import Float32, OneOf, Written
from ..norm.rms_norm import normed
from .linear import plain_product
from .small_linear_config import GEMV_ROWS, SmallLinearConfig
from .small_linear_kernels import dot_linear_kernel, gemv_linear_kernel

KINDS = ("dot", "gemv")
EPILOGUES = OneOf(("store", "add", *ACTIVATIONS))
PREFETCH_BYTES = 64 << 10  # of one program: two on each multiprocessor then ask for 4 us of reading at 4 TB/s
_PARTS_AT_ONCE = 8  # partial sums of each place that are on their way at a time, as far as registers reach:
_PART_REGISTERS = 32  # of a thread
FP16_RANGE = 1 / 16  # gains are multiplied by this where products with them could leave the range of fp16


def parts_at_once(sums: int, num_warps: int) -> int:
    """Return how many parts of a program's sums are asked for at a time where columns are split."""
    return min(max(32 * num_warps * _PART_REGISTERS // sums, 1), _PARTS_AT_ONCE)


def small_linear_triton(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor | None,
    partial: Tensor | None,
    counters: Tensor | None,
    eps: float,
    epilogue: str,
    scale: float,
    config: SmallLinearConfig,
) -> None:
    """Launch the kernel; see `small_linear` for the arguments."""
    rows, depth = x.shape
    kind, block_n, block_k, splits, num_warps, num_stages, pdl, block_m = config
    width = out.shape[1]
    part = triton.cdiv(triton.cdiv(depth, block_k), splits) * block_k
    splits = triton.cdiv(depth, part)  # none is empty
    is_even = depth % block_k == 0
    sizes = {"BLOCK_N": block_n, "BLOCK_K": block_k, "EVEN_K": is_even, "SPLIT": splits > 1}
    sizes["AT_ONCE"] = parts_at_once(block_n * (block_m if kind == "dot" else rows), num_warps)
    options: dict[str, Any] = {"PDL": pdl, "PREFETCH": pdl and is_even, "EPILOGUE": epilogue, "num_warps": num_warps}
    if pdl:
        options["launch_pdl"] = True
    operands = (out, x, weight, bias, gain, partial, counters)
    ahead = PREFETCH_BYTES // block_n // weight.element_size()
    values = (width, depth, x.stride(0), splits, part, ahead, eps, scale)
    blocks = triton.cdiv(weight.shape[0], block_n)
    if kind == "dot":
        reach = FP16_RANGE if x.dtype == torch.float16 else 1.0
        dot_linear_kernel[(triton.cdiv(rows, block_m), blocks, splits)](
            *operands, rows, *values, BLOCK_M=block_m, RANGE=reach, num_stages=num_stages, **sizes, **options
        )
    else:
        gemv_linear_kernel[(blocks, 1, splits)](  # of narrow blocks a vocabulary has more than 65,535
            *operands, *values, ROWS=rows, STAGES=num_stages, **sizes, **options
        )


@operator(triton_version=small_linear_triton)
def _small_linear(
    out: Written[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Float32 | None,
    partial: Written[Tensor] | None,
    counters: Written[Tensor] | None,
    eps: float,
    epilogue: Annotated[str, EPILOGUES],
    scale: float,
    config: SmallLinearConfig,
) -> None:
    """Compute with torch's own operators, which need none of the configuration; see `small_linear`."""
    given = x if gain is None else normed(x, gain, eps).to(x.dtype)
    if epilogue == "store":
        plain_product(out, given, weight, bias)
        return
    product = torch.empty((x.shape[0], weight.shape[0]), dtype=out.dtype, device=out.device)
    plain_product(product, given, weight, bias)
    if epilogue == "add":
        out.copy_(out.float().add_(product, alpha=scale))
    else:
        gated(out, product, epilogue)


def small_linear(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counters: Tensor | None,
    config: SmallLinearConfig,
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    epilogue: str = "store",
    scale: float = 1.0,
) -> None:
    """Write `x @ weight.T + bias` into `out`, or do more with it; sums are fp32.

    Args:
        out: [rows, out_features], contiguous; half as many columns for a gate.
        x: [rows, in_features], fp32, fp16 or bf16; rows may be strided.
        weight: [out_features, in_features], of the same dtype, contiguous; no kernel that still runs may write it.
        bias: [out_features] or None, like the weight.
        counters: int32, at least `config.counters(rows, out_features)`, all 0, and 0 again afterwards; products that
            run one after another share them. None where the configuration has one split.
        config: how the work is dealt out.
        gain: fp32 [in_features]: the product is that of the RMSNorm of `x`; None: of `x` itself.
        eps: of the norm, added to the mean square.
        epilogue: "store"; "add": `out += scale * product`; or an activation of `act_mul`: `activation(gate) * up`, the
            gate being the first half of the product.
        scale: of the sum.

    Raises:
        ValueError: more rows than the kind takes, too few counters, or an epilogue that is not known.
    """
    rows, out_features = out.shape[0], weight.shape[0]
    if config.kind not in KINDS:
        raise ValueError(f"config.kind is {config.kind!r}; it must be one of {', '.join(KINDS)}")
    if config.kind == "gemv" and rows > GEMV_ROWS:
        raise ValueError(f"x has {rows} rows; the gemv kernel takes 1..{GEMV_ROWS}")
    partial = partial_sums(config, x, out_features, counters)
    _small_linear(out, x, weight, bias, gain, partial, counters, eps, epilogue, scale, config)


def partial_sums(config: SmallLinearConfig, x: Tensor, out_features: int, counters: Tensor | None) -> Tensor | None:
    """Return the memory for what splits have summed up, fp32 [splits, rows, columns]; None where there is one split.

    Raises:
        ValueError: too few counters.
    """
    needed = config.counters(x.shape[0], out_features)
    if needed > (0 if counters is None else counters.numel()):
        raise ValueError(f"counters holds {0 if counters is None else counters.numel()}; {needed} are needed")
    if config.splits == 1:
        return None
    columns = -(-out_features // config.block_n) * (config.block_n + 1)  # one more of a block: the sum of squares
    return torch.empty((config.splits, x.shape[0], columns), dtype=torch.float32, device=x.device)
