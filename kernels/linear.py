"""Linear layers, `out = x @ weight.T + bias`, by the path that reads the weight fastest.

A decode step multiplies a few rows with every weight of the model, so its time is the time to read them.
On a CPU torch's plain product reaches a third of the bandwidth at batch 8; weights packed by oneDNN reach
most of it, and int8 weights halve or quarter the bytes. Small matrices are the other way round: there the
packed product's overhead shows. `prepare_linear` measures the paths for a weight's shape and keeps the
winner's copy of the weight alone. On a GPU the plain product is cuBLAS.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .registration import operator

# torch's int8 product is a matrix-vector loop: from this many rows on, a product with the dequantised
# weight is faster. It is vectorised for bf16 alone.
_INT8_DEQUANTISE_ROWS = {torch.bfloat16: 17, torch.float16: 17, torch.float32: 3}
_PACKED_ROWS = 8  # oneDNN's layout for so many rows is as good for one, and a third better than that for one at eight
_REPETITIONS = 7
_PLAIN_MARGIN = 1.15  # the plain product must be so much faster to be chosen: it is the one that load slows down
_PACKED_PRODUCT = torch.ops.mkldnn._linear_pointwise.default._op
_EVICTION_BYTES = 64 * 2**20  # more than a last-level cache slice holds


def bind_linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[], Tensor]:
    """Return the product of fixed tensors with the plain weight; see `linear`."""
    if bias is None:
        return functools.partial(torch.mm, x, weight.t(), out=out)
    return functools.partial(torch.addmm, bias, x, weight.t(), out=out)


def linear_torch(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Multiply with the plain weight; see `linear`."""
    bind_linear(out, x, weight, bias)()


def bind_packed_linear(out: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None) -> Callable[[], Tensor]:
    """Return the product of fixed tensors with a weight packed by oneDNN; see `packed_linear`."""
    product = functools.partial(_PACKED_PRODUCT, x, packed, bias, "none", [], "")
    return lambda: out.copy_(product())


def packed_linear_torch(out: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None) -> None:
    """Multiply with a weight packed by oneDNN; see `packed_linear`."""
    bind_packed_linear(out, x, packed, bias)()


def int8_linear_torch(out: Tensor, x: Tensor, qweight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    """Multiply with an int8 weight; see `int8_linear`."""
    if x.is_cpu and x.shape[0] < _INT8_DEQUANTISE_ROWS[x.dtype]:
        out.copy_(torch._weight_int8pack_mm(x.contiguous(), qweight, scales))
    else:
        torch.mm(x, qweight.to(x.dtype).t(), out=out)
        out.mul_(scales)
    if bias is not None:
        out.add_(bias)


_linear = operator(
    "linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()",
    torch_version=linear_torch,
    bound_version=bind_linear,
)
_packed_linear = operator(
    "packed_linear(Tensor(a!) out, Tensor x, Tensor packed, Tensor? bias) -> ()",
    torch_version=packed_linear_torch,
    bound_version=bind_packed_linear,
    keys=("MkldnnCPU",),
)
_int8_linear = operator(
    "int8_linear(Tensor(a!) out, Tensor x, Tensor qweight, Tensor scales, Tensor? bias) -> ()",
    torch_version=int8_linear_torch,
)


def linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Write `x @ weight.T + bias` into `out`.

    Args:
        out: [rows, out_features], contiguous.
        x: [rows, in_features], of the same dtype.
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """
    _linear(out, x, weight, bias)


def packed_linear(out: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> None:
    """Write `x @ weight.T + bias` into `out`, the weight as oneDNN packed it. CPU alone.

    Args:
        out: [rows, out_features], contiguous.
        x: [rows, in_features], fp32 or bf16; any number of rows.
        packed: what `torch.ops.mkldnn._reorder_linear_weight(weight)` returned: an opaque tensor.
        bias: [out_features] or None.
    """
    _packed_linear(out, x, packed, bias)


def int8_linear(out: Tensor, x: Tensor, qweight: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
    """Write `x @ (qweight * scales[:, None]).T + bias` into `out`: int8 weights, activations untouched.

    Made for bf16 on a CPU: torch's int8 product is vectorised for bf16 alone, and fp32 activations take a product
    with the dequantised weight from three rows on, which saves memory but no time.

    Args:
        out: [rows, out_features], contiguous.
        x: [rows, in_features], fp32, bf16 or fp16.
        qweight: int8 [out_features, in_features].
        scales: [out_features], of x's dtype.
        bias: [out_features] or None.
    """
    _int8_linear(out, x, qweight, scales, bias)


@dataclass(frozen=True)
class LinearWeight:
    """One layer's weight, in the form that its path reads, and the product with it.

    Attributes:
        path: "plain", "packed" or "int8".
        out_features: rows of the weight.
        in_features: columns of the weight.
        weight: the plain weight [out_features, in_features]; None where another form replaced it.
        packed: oneDNN's opaque form, for "packed".
        qweight: int8 [out_features, in_features], for "int8".
        scales: [out_features], for "int8".
        bias: [out_features] or None.
    """

    path: str
    out_features: int
    in_features: int
    weight: Tensor | None = None
    packed: Tensor | None = None
    qweight: Tensor | None = None
    scales: Tensor | None = None
    bias: Tensor | None = None

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        if self.packed is not None:
            _packed_linear(out, x, self.packed, self.bias)
        elif self.qweight is not None:
            _int8_linear(out, x, self.qweight, self.scales, self.bias)
        else:
            _linear(out, x, self.weight, self.bias)

    @property
    def nbytes(self) -> int:
        """How many bytes of weight one product reads."""
        read = (self.packed, None) if self.packed is not None else (self.qweight, self.scales)
        if self.path == "plain":
            read = (self.weight, None)
        return sum(tensor.numel() * tensor.element_size() for tensor in (*read, self.bias) if tensor is not None)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the product may read, to be declared as constants of a recorded step."""
        held = (self.weight, self.packed, self.qweight, self.scales, self.bias)
        return [tensor for tensor in held if tensor is not None]


class LinearTuner:
    """Times the paths of a linear layer on this machine, once per shape, dtype, thread count and batch sizes.

    Args:
        model_bytes: the weights that one step reads in all. Beyond the size of a cache, each timed run
            finds the weight evicted, as it will be in the model.
    """

    def __init__(self, model_bytes: int = 0) -> None:
        self.choices: dict[tuple[object, ...], str] = {}
        """The path chosen for each (shape, dtype, threads, batch sizes, has bias), for reports."""
        cold = model_bytes > _EVICTION_BYTES // 2
        self._eviction = torch.zeros(_EVICTION_BYTES // 4) if cold else None

    def choose(self, weight: Tensor, packed: Tensor, bias: Tensor | None, batch_sizes: tuple[int, ...]) -> str:
        """Return "plain" or "packed", whichever takes less time: the geometric mean over the batch sizes.

        Args:
            weight: the plain weight, on the CPU.
            packed: the same weight packed.
            bias: [out_features] or None.
            batch_sizes: how many rows a decode step may have.
        """
        key = (tuple(weight.shape), weight.dtype, torch.get_num_threads(), batch_sizes, bias is not None)
        if key not in self.choices:
            ratio = 1.0
            for rows in batch_sizes:
                x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
                out = torch.empty(rows, weight.shape[0], dtype=weight.dtype)
                plain_s = self._best_seconds(_linear, out, x, weight, bias)
                packed_s = self._best_seconds(_packed_linear, out, x, packed, bias)
                ratio *= packed_s / plain_s
            self.choices[key] = "packed" if ratio < _PLAIN_MARGIN ** len(batch_sizes) else "plain"
        return self.choices[key]

    def _best_seconds(self, product: Callable[..., None], *arguments: Tensor | None) -> float:
        product(*arguments)
        best = float("inf")
        for _ in range(_REPETITIONS):
            if self._eviction is not None:
                self._eviction.add_(1)
            start = time.perf_counter()
            product(*arguments)
            best = min(best, time.perf_counter() - start)
        return best


def quantise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (int8 [n, k], scales [n] of the weight's dtype): symmetric, one scale per output feature.

    Args:
        weight: [n, k], any float dtype.
    """
    largest = torch.maximum(weight.amax(dim=1), -weight.amin(dim=1)).float()
    scales = (largest / 127).clamp_(min=1e-12).to(weight.dtype)
    qweight = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for start in range(0, weight.shape[0], 4096):  # no second copy of a large weight in fp32
        rows = slice(start, start + 4096)
        qweight[rows] = (weight[rows].float() / scales[rows, None].float()).round_().clamp_(-127, 127)
    return qweight, scales


def prepare_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tuner: LinearTuner,
    batch_sizes: tuple[int, ...] = (1, 8),
    quantize: str | None = None,
    keep_plain: bool = False,
) -> LinearWeight:
    """Return the weight in the form that a decode step reads fastest.

    The plain weight is not kept where another form replaces it; the caller drops its own reference too.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
        tuner: measures, and remembers for the next layer of this shape.
        batch_sizes: the rows of the decode steps that matter; the result is right for any number of rows.
        quantize: None, or "int8" for one byte per weight.
        keep_plain: keep the plain weight as well (an embedding table that is also the output layer).

    Raises:
        ValueError: `quantize` is not known, or `batch_sizes` is empty or not positive.
    """
    if quantize not in (None, "int8"):
        raise ValueError(f"quantize is {quantize!r}; it must be None or 'int8'")
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"batch_sizes is {batch_sizes}; it must hold at least one size, each >= 1")
    out_features, in_features = weight.shape
    kept = weight if keep_plain else None
    if quantize == "int8":
        qweight, scales = quantise_int8(weight)
        return LinearWeight("int8", out_features, in_features, kept, qweight=qweight, scales=scales, bias=bias)
    can_pack = torch.backends.mkldnn.is_available() and weight.dtype in (torch.float32, torch.bfloat16)
    if weight.is_cpu and can_pack:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
        if tuner.choose(weight, packed, bias, tuple(batch_sizes)) == "packed":
            return LinearWeight("packed", out_features, in_features, kept, packed=packed, bias=bias)
    return LinearWeight("plain", out_features, in_features, weight, bias=bias)
