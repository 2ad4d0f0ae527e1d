"""What a form of a linear layer's weight is: how it is read, what it holds, and the product with it.

A decode step multiplies a few rows with every weight of the model, so its time is the time to read them. Each form is
one class in one file; `forms.py` lists them, and chooses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from graphdecode.kernels.linear.quantized_linear import QuantizedPanels
from graphdecode.kernels.linear.weight_tiles import WeightTiles
from graphdecode.kernels.model.embedding import quantized_embedding, tiled_embedding
from graphdecode.linear.linear_choice import LinearChoice, LinearTuner
from graphdecode.linear.small_linear_timing import FusedForm

ROWS_AT_ONCE = 512  # of a fused product: more would need more workspace


@dataclass(frozen=True)
class Shard:
    """One of `count` parts of a tensor along an axis, equal up to one row or column.

    Attributes:
        rank: which part, from 0.
        count: parts.
        axis: 0 splits a weight's rows, 1 its columns.
        begin: the first row or column that is split.
        size: how many are split; None: all from `begin` on.
        within: the part along another axis that this is a part of; None: the whole.
    """

    rank: int
    count: int
    axis: int
    begin: int = 0
    size: int | None = None
    within: Shard | None = None

    def slices(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return where the part lies in a tensor."""
        size = shape[self.axis] - self.begin if self.size is None else self.size
        bounds = [self.begin + size * rank // self.count for rank in (self.rank, self.rank + 1)]
        found = [] if self.within is None else list(self.within.slices(shape))
        found += [slice(None)] * (self.axis + 1 - len(found))
        found[self.axis] = slice(*bounds)
        return tuple(found)


class Stored(NamedTuple):
    """A tensor as a source has it."""

    shape: tuple[int, ...]
    dtype: str  # in safetensors' words, such as "BF16", or the source's own


class TensorSource(Protocol):
    """What tensors are read from."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """All that there are, by name."""

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Write one tensor, or a part of it and no more, into `out`, converted to its dtype where that differs."""


class LinearNames(NamedTuple):
    """A layer's tensors, in the order in which they are fused along their rows."""

    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()


class FusedProduct(NamedTuple):
    """A weight's product that does, in one launch, what stands before it or behind it in a layer.

    Attributes:
        product: takes out, x of at most ROWS_AT_ONCE rows, and `gain`, `eps`, `epilogue`, `scale` of `small_linear`.
    """

    product: Callable[..., None]

    def write(self, out: Tensor, x: Tensor, **fused: Any) -> None:
        """Write the product for `x` of any number of rows into `out`."""
        for begin in range(0, x.shape[0], ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            self.product(out[rows], x[rows], **fused)

    def normed(self, out: Tensor, x: Tensor, gain: Tensor, eps: float) -> None:
        """Write the product for the RMSNorm of `x` [rows, in_features], with fp32 gains, into `out`."""
        self.write(out, x, gain=gain, eps=eps)

    def gated(self, out: Tensor, x: Tensor, gain: Tensor | None, eps: float, activation: str) -> None:
        """Write `activation(gate) * up` of that product into `out` [rows, out_features / 2]; no gain is no norm."""
        self.write(out, x, gain=gain, eps=eps, epilogue=activation)

    def added(self, residual: Tensor, x: Tensor, scale: float) -> None:
        """Add `scale` times the product for `x` to `residual` [rows, out_features]."""
        self.write(residual, x, epilogue="add", scale=scale)


class RowTable(NamedTuple):
    """A quantized weight as an embedding, whose rows are dequantized as they are gathered."""

    weight: QuantizedPanels | WeightTiles
    vocab_size: int

    def gather(self, out: Tensor, tokens: Tensor, live: Tensor, scale: float) -> None:
        """Write `scale` times the tokens' rows into `out` [tokens, columns]; see `embedding`."""
        if isinstance(self.weight, WeightTiles):
            tiled_embedding(out, tokens, self.weight, live, scale)
        else:
            quantized_embedding(out, tokens, self.weight, live, self.vocab_size, scale)


@dataclass(frozen=True)
class FormOptions:
    """What the choice of a form, and its making, depend on beside the weight.

    Attributes:
        device: where the weight goes.
        dtype: of the activations.
        tuner: measures, and remembers for the next layer of this shape.
        batch_sizes: the rows of the decode steps that matter; a form is right for any number of rows.
        quantize: None, or the name of the forms that lose precision.
        batch_invariant: take one product for any number of rows, so that a row's bits do not depend on the others:
            slower on a GPU for many rows, and on a CPU for one or two rows with quantized weights.
        row_maxima: for weights that are some columns of a matrix: takes the largest magnitudes of their rows, float32
            [out_features], and returns the matrix's, so that a row is rounded as in the whole.
        in_floats: products are written in float32, whatever the dtype of the activations.
        fused: what a step on a GPU fuses with the product.

    Raises:
        ValueError: `batch_sizes` is empty or not positive.
    """

    device: torch.device
    dtype: torch.dtype
    tuner: LinearTuner
    batch_sizes: tuple[int, ...] = (1, 8)
    quantize: str | None = None
    batch_invariant: bool = False
    row_maxima: Callable[[Tensor], Tensor] | None = None
    in_floats: bool = False
    fused: FusedForm = FusedForm()  # noqa: RUF009 (immutable)

    def __post_init__(self) -> None:
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes is {self.batch_sizes}; it must hold at least one size, each >= 1")


@dataclass(frozen=True)
class StoredForm(ABC):
    """Weights as one product reads them. Forms are frozen dataclasses: their tensors are found by that.

    Attributes:
        path: the form's name in reports.
        shape: [out_features, in_features]; of experts [experts, out_features, in_features].
        bias: [out_features], of experts [experts, out_features], or None.
    """

    path: ClassVar[str]
    shape: tuple[int, ...]
    bias: Tensor | None

    @property
    def gives_floats(self) -> bool:
        """Whether the product takes no longer where it is written in float32, as it was summed up."""
        return False

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the product only reads, to be declared as constants of a recorded step."""
        workspace = {id(tensor) for tensor in self.workspace}
        held = (tensor for entry in fields(self) for tensor in tensors_in(getattr(self, entry.name)))
        return [tensor for tensor in held if id(tensor) not in workspace]

    @property
    def workspace(self) -> list[Tensor]:
        """Tensors that the product leaves as it found them, and writes in between."""
        return []

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that the product reads."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def choice(self, rows: int) -> LinearChoice:
        """Return the path that products of so many rows take, with what was measured, if anything was."""
        return LinearChoice(self.path)


@dataclass(frozen=True)
class WeightForm(StoredForm):
    """One layer's weight as one product reads it.

    Attributes:
        quantize: what `FormOptions.quantize` must be for this form to be taken.
        is_of_source: it holds what a source has quantized, and is taken for that where nothing is asked for, too.
        is_measured: among the forms that could be taken and are measured, the fastest is.
        choices: what was measured for each number of rows.
    """

    quantize: ClassVar[str | None] = None
    is_of_source: ClassVar[bool] = False
    is_measured: ClassVar[bool] = False
    _: KW_ONLY
    choices: Mapping[int, LinearChoice] = field(default_factory=dict)

    @classmethod
    def why_not(cls, options: FormOptions) -> str:
        """Return why weights cannot take this form, for people; "" where they can."""
        return ""

    @classmethod
    @abstractmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Return a plain weight [out_features, in_features] in this form; the caller drops its own reference."""

    @classmethod
    def load(cls, source: TensorSource, names: LinearNames, shard: Shard | None, options: FormOptions) -> WeightForm:
        """Read a layer's tensors, or a part of them and no more, into this form.

        Parts of a layer that is split by columns are added up, so the bias is in the first alone.
        """
        weight = read_fused(source, names.weights, shard, options.dtype, options.device)
        return cls.of(weight, read_bias(source, names, shard, options), options)

    @classmethod
    def keeps(cls, source: TensorSource, names: LinearNames) -> bool:
        """Whether this form holds a layer's tensors as the source has them, which plain copies do not tell."""
        return False

    @abstractmethod
    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features], any number of rows.

        Args:
            out: of x's dtype, or float32: then what was summed up is not rounded.
            x: of the model's dtype.
        """

    def fused(self, rows: int) -> FusedProduct | None:
        """Return the product that does more than `apply` in its one launch; None: there is none for so many rows."""
        return None

    @property
    def row_table(self) -> RowTable | None:
        """The quantized weight as the rows of an embedding; None if it cannot be gathered from."""
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
        """Return the path that products of so many rows take, with what was measured, if anything was."""
        return self.choices.get(rows) or LinearChoice(self.path)

    def rechosen(self, change: Callable[[LinearChoice], LinearChoice | None]) -> WeightForm:
        """Return the same weight with other products where it has several, to be measured beside this one.

        Args:
            change: takes what a number of rows has, and returns what it is to have; None is the plain product.
        """
        return self


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield a tensor, or those of tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_in(part)


def fused_shape(source: TensorSource, names: tuple[str, ...], shard: Shard | None) -> tuple[int, ...]:
    """Return the shape of tensors, or of one part of each, when they are fused along their first dimension."""
    shapes = [source.tensors[name].shape for name in names]
    if shard is not None:
        shapes = [(*torch.empty(shape, device="meta")[shard.slices(shape)].shape,) for shape in shapes]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def read_fused(
    source: TensorSource, names: tuple[str, ...], shard: Shard | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return tensors, or one part of each, fused along their first dimension, in memory of their own."""
    fused = torch.empty(fused_shape(source, names, shard), dtype=dtype, device=device)
    sizes = [fused_shape(source, (name,), shard)[0] for name in names]
    for name, out in zip(names, fused.split(sizes), strict=True):
        source.read(name, out, shard)
    return fused


def read_bias(source: TensorSource, names: LinearNames, shard: Shard | None, options: FormOptions) -> Tensor | None:
    """Return a layer's bias, or what goes with a part of its weight; None where there is none."""
    if not names.biases or (shard is not None and shard.axis == 1 and shard.rank > 0):
        return None
    part = shard if shard is not None and shard.axis == 0 else None
    return read_fused(source, names.biases, part, options.dtype, options.device)
