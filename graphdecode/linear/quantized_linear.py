"""Forms of quantized weights: the base class, and the form of compiled CPU kernels."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from graphdecode.kernels.linear.quantized_linear import QuantizedPanels, quantized_linear
from graphdecode.kernels.native import library as native
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.quantization.compressed_tensors import INT8_ROWS, quantized_groups
from graphdecode.linear.quantization.gguf import GgufBlocks
from graphdecode.linear.quantization.quantized_weight import QuantizedSource, QuantizedWeight, one_thread, read_parts
from graphdecode.linear.quantization.registry import has_kernels
from graphdecode.linear.unquantized import Panels
from graphdecode.linear.weight_form import (
    FormOptions,
    LinearNames,
    RowTable,
    TensorSource,
    WeightForm,
    fused_shape,
    read_bias,
)


@dataclass(frozen=True)
class QuantizedLinear(WeightForm):
    """A weight that stays quantized as stored."""

    quantize = "gguf"
    is_of_source = True
    is_strided = True
    device: ClassVar[str]  # the type of the devices whose kernels multiply it
    unquantized: ClassVar[type[WeightForm]]  # the form for all other weights

    @classmethod
    def unavailable_reason(cls, options: FormOptions) -> str:
        """Return a reason on other devices than those whose kernels multiply it."""
        device_type = options.device.type
        return "" if device_type == cls.device else f"needs a {cls.device} device, the device is {device_type}"

    @classmethod
    @abstractmethod
    def of_parts(
        cls, shape: tuple[int, ...], bias: Tensor | None, parts: list[QuantizedWeight], options: FormOptions
    ) -> Self | None:
        """Return the form of a weight in parts, concatenated by rows; None if one is not supported."""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Return an unquantized weight in the unquantized form."""
        return cls.unquantized.of(weight, bias, options)

    @classmethod
    def keeps(cls, source: TensorSource, names: LinearNames) -> bool:
        """Whether kernels multiply all of a layer's tensors as they are stored."""
        dtypes = {source.tensors[name].dtype for name in names.weights}
        return isinstance(source, QuantizedSource) and all(has_kernels(dtype, cls.device) for dtype in dtypes)

    @classmethod
    def load(cls, source: TensorSource, names: LinearNames, options: FormOptions) -> WeightForm:
        """Read a layer's tensors; in the unquantized form if they cannot be fused or converted."""
        form = None
        if cls.keeps(source, names):
            with one_thread():
                parts = read_parts(source, names)
                if parts is not None:
                    shape, bias = fused_shape(source, names.weights), read_bias(source, names, options)
                    form = cls.of_parts(shape, bias, parts, options)
        return super().load(source, names, options) if form is None else form


class Int8Linear(QuantizedLinear):
    """An unquantized weight that is rounded to int8, with a scale per row, when it is loaded."""

    path = quantize = INT8_ROWS.name
    is_of_source = False

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Return the weight in int8; unquantized, but rounded, if kernels do not support its columns."""
        groups = quantized_groups(weight, INT8_ROWS, options.row_maxima)
        with one_thread():
            form = cls.of_parts(tuple(weight.shape), bias, [groups], options)
        return form or cls.unquantized.of(groups.dequantized().to(weight.dtype), bias, options)

    @classmethod
    def keeps(cls, source: TensorSource, names: LinearNames) -> bool:
        """Return False: quantized weights are dequantized, and rounded again."""
        return False


@dataclass(frozen=True)
class PanelLinear(QuantizedLinear):
    """A quantized weight in panels; fused tensors of several types are parts, each with its own product."""

    path = "panels"
    device = "cpu"
    unquantized = Panels
    parts: tuple[QuantizedPanels, ...]
    sizes: tuple[int, ...]  # output features of the parts
    order: Tensor | None  # int32 [in_features], the input feature of each column; None: in order
    layout: str  # `QuantizedWeight.path`
    batch_invariant: bool
    gives_floats = True

    @classmethod
    def unavailable_reason(cls, options: FormOptions) -> str:
        missing = "" if native.library(options.dtype, "linear") is not None else "needs compiled kernels"
        return super().unavailable_reason(options) or missing

    @classmethod
    def of_parts(
        cls, shape: tuple[int, ...], bias: Tensor | None, parts: list[QuantizedWeight], options: FormOptions
    ) -> Self | None:
        panels = [each for part in parts if (each := part.panels()) is not None]
        if len(panels) < len(parts):
            return None
        first, sizes = parts[0], tuple(part.shape[0] for part in parts)
        order = None if first.order is None else first.order.clone()
        return cls(shape, bias, tuple(panels), sizes, order, first.path, options.batch_invariant)

    @property
    def row_table(self) -> RowTable | None:
        """The weight, if it is GGUF blocks in one part."""
        is_one = len(self.parts) == 1 and self.layout == GgufBlocks.path
        return RowTable(self.parts[0], self.out_features) if is_one else None

    def choice(self, rows: int) -> LinearChoice:
        """Return the layout of the source."""
        return LinearChoice(self.layout)

    def apply(self, out: Tensor, x: Tensor) -> None:
        if self.order is not None:
            x = torch.index_select(x, 1, self.order)
        biases = [None] * len(self.sizes) if self.bias is None else self.bias.split(self.sizes)
        columns = [out] if len(self.parts) == 1 else out.split(self.sizes, dim=1)
        for part, bias, of_part in zip(self.parts, biases, columns, strict=True):
            quantized_linear(of_part, x, part, bias, batch_invariant=self.batch_invariant)


@dataclass(frozen=True)
class Int8PanelLinear(Int8Linear, PanelLinear):
    """An int8 weight in panels."""

    def choice(self, rows: int) -> LinearChoice:
        return LinearChoice(self.path)
