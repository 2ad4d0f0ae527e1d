"""The registry of weight forms, and which of them a weight takes."""

from __future__ import annotations

from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.extensions import HOW_TO_REGISTER, EntryPoints, refuse_duplicate
from graphdecode.linear.experts import ExpertForm, ExpertNames, ExpertPanels, ExpertTiles, UnquantizedExperts
from graphdecode.linear.quantized_linear import Int8PanelLinear, PanelLinear
from graphdecode.linear.tiled_linear import Int8TiledLinear, TiledLinear
from graphdecode.linear.unquantized import Packed, Panels, UnquantizedLinear
from graphdecode.linear.weight_form import FormOptions, LinearNames, TensorSource, WeightForm

FORMS: list[type[WeightForm]] = [  # in order of preference
    Int8TiledLinear,
    Int8PanelLinear,
    TiledLinear,
    PanelLinear,
    Panels,
    Packed,
    UnquantizedLinear,
]


def register_form(form: type[WeightForm], *, replace: bool = False) -> None:
    """Register a weight form, the new first choice; `replace` one of the same `path` or `quantize`.

    Raises:
        ArgumentError: the name is taken.
    """
    names = {form.path, form.quantize or form.path}
    conflicts = names & {name for each in FORMS for name in (each.path, each.quantize)}
    refuse_duplicate("a form", min(conflicts, default=""), bool(conflicts), replace)
    FORMS.insert(0, form)


_OUTSIDE = EntryPoints("graphdecode.forms", lambda _, form: register_form(form), FORMS)


def _forms() -> list[type[WeightForm]]:
    if not _OUTSIDE.is_loaded:
        _OUTSIDE.find()
    return FORMS


def _candidates(options: FormOptions) -> list[type[WeightForm]]:
    quantize = options.quantize
    return [form for form in _forms() if form.quantize == quantize or (quantize is None and form.is_of_source)]


def check_options(options: FormOptions, others: tuple[str, ...] = ()) -> None:
    """Raise ArgumentError if `quantize` names no form, or none that is available.

    `others`: further values of `quantize`, for the message.
    """
    candidates = _candidates(options)
    if not candidates:
        names = dict.fromkeys((*(form.quantize for form in FORMS), *others))
        allowed = " or ".join(["None", *(repr(name) for name in names if name)])
        raise ArgumentError(f"quantize must be {allowed}, got {options.quantize!r}; a form or format {HOW_TO_REGISTER}")
    if all(form.unavailable_reason(options) for form in candidates):
        raise ArgumentError(f"quantize={options.quantize!r} {candidates[-1].unavailable_reason(options)}")


def has_form(options: FormOptions) -> bool:
    """Whether `quantize` names an available form."""
    return any(form.quantize == options.quantize and not form.unavailable_reason(options) for form in _forms())


def load_linear(source: TensorSource, names: LinearNames, options: FormOptions) -> WeightForm:
    """Read a layer's tensors in the fastest form for decode steps."""
    form = quantized_form(source, names, options) or _default_form(options)
    return form.load(source, names, options)


def load_experts(source: TensorSource, names: ExpertNames, bias: Tensor | None, options: FormOptions) -> ExpertForm:
    """Read one product's weights of all experts of a layer; they stay quantized if a form supports that.

    `bias` is [experts, out_features], gate first, or None. Raises ValueError if experts have no form `quantize`.
    """
    if options.quantize not in (None, PanelLinear.quantize):
        raise ArgumentError(f"quantize={options.quantize!r} is not available for a model with experts")
    forms = (form.load(source, names, bias, options) for form in (ExpertTiles, ExpertPanels, UnquantizedExperts))
    return next(form for form in forms if form is not None)


def linear_of(weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
    """Return an unquantized weight [out_features, in_features] in the fastest form for decode steps."""
    return _default_form(options).of(weight, bias, options)


def tied_linear(weight: Tensor, source: TensorSource, names: LinearNames, options: FormOptions) -> WeightForm:
    """Return the product with the tied embedding; a quantized one is read again."""
    if quantized_form(source, names, options) is not None:
        return load_linear(source, names, options)
    return linear_of(weight, None, options)


def quantized_form(source: TensorSource, names: LinearNames, options: FormOptions) -> type[WeightForm] | None:
    """Return the form that keeps a layer's weights quantized as stored; None: they are read as unquantized weights."""
    return next(
        (form for form in _candidates(options) if form.keeps(source, names) and not form.unavailable_reason(options)),
        None,
    )


def _default_form(options: FormOptions) -> type[WeightForm]:
    """Return the first available form of unquantized weights."""
    check_options(options)
    available = [
        form for form in _candidates(options) if not form.unavailable_reason(options)
    ]  # the preferred one first
    return next((form for form in available if not form.is_of_source), available[0])
