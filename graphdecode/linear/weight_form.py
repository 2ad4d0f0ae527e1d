"""The interface of weight forms: how a linear layer's weight is read and laid out, and its product.

A decode step multiplies a few rows with every weight: its time is that of reading the weights. `forms.py` lists the
forms and chooses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from graphdecode.kernels.linear.quantized_linear import QuantizedPanels
from graphdecode.kernels.linear.weight_tiles import WeightTiles
from graphdecode.kernels.model.embedding import quantized_embedding, tiled_embedding
from graphdecode.linear.linear_choice import LinearChoice, LinearTuner
from graphdecode.linear.small_linear_timing import FusedForm

# dtypes of unquantized weights, by safetensors' names
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CHUNK_ROWS = 512  # most rows of a fused product, which its workspace limits


@dataclass(frozen=True)
class Shard:
    """One of `count` parts of a tensor along an axis, equal up to one row or column."""

    rank: int  # index of the part
    count: int  # number of parts
    axis: int  # 0 splits a weight's rows, 1 its columns
    begin: int = 0  # first row or column that is split
    size: int | None = None  # rows or columns that are split; None: all from `begin` on
    within: Shard | None = None  # a shard along another axis, of which this is a shard

    def slices(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the shard's indices in a tensor of a shape."""
        size = shape[self.axis] - self.begin if self.size is None else self.size
        bounds = [self.begin + size * rank // self.count for rank in (self.rank, self.rank + 1)]
        slices = [] if self.within is None else list(self.within.slices(shape))
        slices += [slice(None)] * (self.axis + 1 - len(slices))
        slices[self.axis] = slice(*bounds)
        return tuple(slices)


class Stored(NamedTuple):
    """Shape and dtype of a tensor in a source."""

    shape: tuple[int, ...]
    dtype: str  # safetensors' name, such as "BF16", or the source's own


class TensorSource(Protocol):
    """Tensors by name."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """All tensors."""

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Write a tensor, or a shard of it, into `out`, converted to its dtype; nothing else is read."""


class LinearNames(NamedTuple):
    """A layer's tensors, fused along their rows in this order."""

    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()


class FusedProduct(NamedTuple):
    """A product that includes the norm before it, or an epilogue, in its launch."""

    # takes out, x of at most CHUNK_ROWS rows, and `gain`, `eps`, `epilogue`, `scale` of `small_linear`
    product: Callable[..., None]

    def write(self, out: Tensor, x: Tensor, **fused: Any) -> None:
        """Write the product for any number of rows `x` into `out`."""
        for begin in range(0, x.shape[0], CHUNK_ROWS):
            rows = slice(begin, begin + CHUNK_ROWS)
            self.product(out[rows], x[rows], **fused)

    def normed(self, out: Tensor, x: Tensor, gain: Tensor, eps: float) -> None:
        """Write the product for RMSNorm(x), x [rows, in_features], with float32 gains, into `out`."""
        self.write(out, x, gain=gain, eps=eps)

    def gated(self, out: Tensor, x: Tensor, gain: Tensor | None, eps: float, activation: str) -> None:
        """Write `activation(gate) * up` of that product into `out` [rows, out_features / 2]; None: no norm."""
        self.write(out, x, gain=gain, eps=eps, epilogue=activation)

    def added(self, residual: Tensor, x: Tensor, scale: float) -> None:
        """Add `scale` times the product for `x` to `residual` [rows, out_features]."""
        self.write(residual, x, epilogue="add", scale=scale)


# takes out [rows, out_features / 2], x and an activation of `act_mul`; writes `activation(gate) * up` of the product
GatedProduct: TypeAlias = Callable[[Tensor, Tensor, str], None]


class RowTable(NamedTuple):
    """A quantized embedding; rows are dequantized when gathered."""

    weight: QuantizedPanels | WeightTiles
    vocab_size: int

    def gather(self, out: Tensor, tokens: Tensor, live: Tensor, scale: float) -> None:
        """Write `scale` times the rows of `tokens` into `out` [tokens, columns]; see `embedding`."""
        if isinstance(self.weight, WeightTiles):
            tiled_embedding(out, tokens, self.weight, live, scale)
        else:
            quantized_embedding(out, tokens, self.weight, live, self.vocab_size, scale)


@dataclass(frozen=True)
class FormOptions:
    """Options of weight forms."""

    device: torch.device  # of the weight
    dtype: torch.dtype  # of the activations
    tuner: LinearTuner  # measures products, once per shape
    batch_sizes: tuple[int, ...] = (1, 8)  # rows of decode steps to measure
    quantize: str | None = None  # name of the forms that quantize weights; None: none
    # use one product for any number of rows, so that a row's bits do not depend on the others; slower on a GPU for many
    # rows, and on a CPU for one or two rows with quantized weights
    batch_invariant: bool = False
    # for a shard of columns: maps its rows' largest magnitudes, float32 [out_features], to those of the whole matrix,
    # so that all ranks round alike
    row_maxima: Callable[[Tensor], Tensor] | None = None
    in_floats: bool = False  # products are written in float32
    fused: FusedForm = FusedForm()  # noqa: RUF009 (immutable); what a step on a GPU fuses with the product

    def __post_init__(self) -> None:
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes is {self.batch_sizes}; it must hold at least one size, each >= 1")


@dataclass(frozen=True)
class StoredForm(ABC):
    """Weights in the layout that a product reads: a frozen dataclass whose fields hold the tensors."""

    path: ClassVar[str]  # the form's name in reports
    shape: tuple[int, ...]  # [out_features, in_features]; for experts [experts, out_features, in_features]
    bias: Tensor | None  # [out_features]; for experts [experts, out_features]

    @property
    def gives_floats(self) -> bool:
        """Whether writing the product in float32, its accumulator's dtype, is free."""
        return False

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the product only reads."""
        workspace = {id(tensor) for tensor in self.workspace}
        tensors = (tensor for entry in fields(self) for tensor in tensors_in(getattr(self, entry.name)))
        return [tensor for tensor in tensors if id(tensor) not in workspace]

    @property
    def workspace(self) -> list[Tensor]:
        """Tensors that the product writes temporarily, and restores."""
        return []

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that the product reads."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def choice(self, rows: int) -> LinearChoice:
        """Return the path of products with this many rows, and its measurements, if any."""
        return LinearChoice(self.path)


@dataclass(frozen=True)
class WeightForm(StoredForm):
    """The weight of one linear layer."""

    quantize: ClassVar[str | None] = None  # value of `FormOptions.quantize` that selects this form
    is_of_source: ClassVar[bool] = False  # it keeps weights quantized as stored, also without `quantize`
    is_strided: ClassVar[bool] = False  # the rows of its output may be strided; else they are contiguous
    _: KW_ONLY
    choices: Mapping[int, LinearChoice] = field(default_factory=dict)  # measurements by number of rows

    @classmethod
    def unavailable_reason(cls, options: FormOptions) -> str:
        """Return why the form is not available; "" if it is."""
        return ""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Return an unquantized weight [out_features, in_features] in this form; the caller drops its reference."""
        raise TypeError(f"{cls.__name__} is not made of a weight")

    @classmethod
    def load(cls, source: TensorSource, names: LinearNames, options: FormOptions) -> WeightForm:
        """Read a layer's tensors into this form."""
        weight = read_fused(source, names.weights, options.dtype, options.device)
        return cls.of(weight, read_bias(source, names, options), options)

    @classmethod
    def keeps(cls, source: TensorSource, names: LinearNames) -> bool:
        """Whether this form keeps a layer's tensors quantized as stored."""
        return False

    @abstractmethod
    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features], any number of rows.

        Args:
            out: of x's dtype, or float32 (unrounded).
            x: of the model's dtype.
        """

    @property
    def gated(self) -> GatedProduct | None:
        """The product that includes its gate; None if there is none."""
        return None

    def fused(self, rows: int) -> FusedProduct | None:
        """Return a product for this many rows that fuses norm or epilogue; None if there is none."""
        return None

    @property
    def row_table(self) -> RowTable | None:
        """The quantized weight as an embedding; None if rows cannot be gathered."""
        return None

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.shape[0]

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.shape[1]

    def choice(self, rows: int) -> LinearChoice:
        return self.choices.get(rows) or LinearChoice(self.path)


def tensors_in(value: Any) -> list[Tensor]:
    """Return a tensor, a form's tensors, or those in nested tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, StoredForm):
        return value.tensors
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, tuple) else []


def fused_shape(source: TensorSource, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the shape of tensors fused along their first dimension."""
    shapes = [source.tensors[name].shape for name in names]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def read_fused(source: TensorSource, names: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return tensors fused along their first dimension, in new memory."""
    fused = torch.empty(fused_shape(source, names), dtype=dtype, device=device)
    sizes = [source.tensors[name].shape[0] for name in names]
    for name, out in zip(names, fused.split(sizes), strict=True):
        source.read(name, out)
    return fused


def read_bias(source: TensorSource, names: LinearNames, options: FormOptions) -> Tensor | None:
    """Return a layer's bias, if any."""
    return read_fused(source, names.biases, options.dtype, options.device) if names.biases else None
