"""A layer's weight in the form that a decode step reads fastest, and the product with it.

A decode step multiplies a few rows with every weight of the model, so its time is the time to read them.
`prepare_linear` keeps the fastest form alone: on a CPU panels where there are compiled kernels, else the form that
proves fastest for the weight's shape. On a GPU the weight stays as it is, and the product is chosen for each number of
rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from graphdecode.kernels.linear.int8_linear import int8_linear, quantise_int8
from graphdecode.kernels.linear.linear import linear
from graphdecode.kernels.linear.native_linear import can_panel, native_linear, to_panels
from graphdecode.kernels.linear.packed_linear import can_pack, pack, packed_linear
from graphdecode.kernels.linear.small_linear import small_linear
from graphdecode.kernels.linear.small_linear_config import SmallLinearConfig, fixed_config
from graphdecode.linear.linear_choice import LinearChoice, LinearTuner, Product

_FIXED_ROWS = 512  # that the invariant product takes at a time: more would need more workspace


@dataclass(frozen=True)
class LinearWeight:
    """One layer's weight, in the form that its path reads, and the product with it.

    Attributes:
        path: "plain", "packed", "native", "int8", or "fixed": the small product with one configuration for any number
            of rows.
        out_features: rows of the weight.
        in_features: columns of the weight.
        weight: the plain weight [out_features, in_features]; None where another form replaced it.
        packed: oneDNN's opaque form, for "packed".
        panels: what `to_panels` made of the weight, for "native", or of the int8 weight, for "int8".
        qweight: int8 [out_features, in_features], for "int8" where there are no compiled kernels.
        scales: [out_features], for "int8".
        bias: [out_features] or None.
        choices: what was measured for each number of rows; on a GPU those rows take the path that it names.
        config: for "fixed".
        counters: int32, the workspace of small products with splits; shared by all weights of a model.
    """

    path: str
    out_features: int
    in_features: int
    weight: Tensor | None = None
    packed: Tensor | None = None
    panels: Tensor | None = None
    qweight: Tensor | None = None
    scales: Tensor | None = None
    bias: Tensor | None = None
    choices: Mapping[int, LinearChoice] = field(default_factory=dict)
    config: SmallLinearConfig | None = None
    counters: Tensor | None = None

    def choice(self, rows: int) -> LinearChoice:
        """Return the path that products of so many rows take, with what was measured, if anything was."""
        return self.choices.get(rows) or LinearChoice(self.path, self.config)

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        if self.panels is not None:
            native_linear(out, x, self.panels, self.scales, self.bias)
        elif self.packed is not None:
            packed_linear(out, x, self.packed, self.bias)
        elif self.qweight is not None and self.scales is not None:
            int8_linear(out, x, self.qweight, self.scales, self.bias)
        elif self.weight is not None:
            config = self.choice(x.shape[0]).config
            if config is None:
                linear(out, x, self.weight, self.bias)
            else:
                for begin in range(0, x.shape[0], _FIXED_ROWS):
                    rows = slice(begin, begin + _FIXED_ROWS)
                    small_linear(out[rows], x[rows], self.weight, self.bias, self.counters, config)

    @property
    def nbytes(self) -> int:
        """How many bytes of weight one product reads."""
        other_forms = (self.packed, self.panels, self.qweight)
        read = (self.weight,) if self.path in ("plain", "fixed") else other_forms
        held = (*read, self.scales, self.bias)
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the product may read, to be declared as constants of a recorded step."""
        held = (self.weight, self.packed, self.panels, self.qweight, self.scales, self.bias)
        return [tensor for tensor in held if tensor is not None]


def prepare_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tuner: LinearTuner,
    batch_sizes: tuple[int, ...] = (1, 8),
    quantize: str | None = None,
    keep_plain: bool = False,
    batch_invariant: bool = False,
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
        batch_invariant: on a GPU, take one configuration for any number of rows, so that a row's bits do not depend on
            the others; slower than the plain product for many rows.

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
        if can_panel(weight):
            panels = to_panels(qweight)
            return LinearWeight("int8", out_features, in_features, kept, panels=panels, scales=scales, bias=bias)
        return LinearWeight("int8", out_features, in_features, kept, qweight=qweight, scales=scales, bias=bias)
    if weight.is_cuda:
        counters = tuner.counters(weight.device)
        if batch_invariant:
            config = fixed_config(out_features, in_features, weight.element_size())
            return LinearWeight("fixed", out_features, in_features, weight, bias=bias, config=config, counters=counters)
        choices = tuner.choose_small(weight, bias, tuple(batch_sizes))
        return LinearWeight("plain", out_features, in_features, weight, bias=bias, choices=choices, counters=counters)
    if can_panel(weight):
        # at the memory's bandwidth for any shape; and oneDNN's threads beside the kernels' own would cost more than
        # they gain
        return LinearWeight("native", out_features, in_features, kept, panels=to_panels(weight), bias=bias)
    forms: dict[str, Callable[[], LinearWeight]] = {}
    if can_pack(weight):
        forms["packed"] = lambda: LinearWeight(
            "packed", out_features, in_features, kept, packed=pack(weight), bias=bias
        )
    forms["plain"] = lambda: LinearWeight("plain", out_features, in_features, weight, bias=bias)
    if len(forms) == 1:
        return forms["plain"]()
    products = {path: partial(_product_of, make) for path, make in forms.items()}
    choices = tuner.choose(weight, bias, tuple(batch_sizes), products)
    return replace(forms[choices[batch_sizes[0]].path](), choices=choices)


def _product_of(make: Callable[[], LinearWeight]) -> Product:
    return make().apply
