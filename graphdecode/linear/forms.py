"""The forms that a weight can take, and which of them it takes: the one place where that is decided."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.extensions import BRING_YOUR_OWN, EntryPoints, refuse_taken
from graphdecode.linear.experts import ExpertForm, ExpertNames, ExpertPanels, ExpertTiles, PlainExperts
from graphdecode.linear.kept import KeptPanels
from graphdecode.linear.linear_choice import Choices, Product
from graphdecode.linear.plain import Int8, Packed, Panels, Plain
from graphdecode.linear.tiles import Int8Tiles, KeptTiles
from graphdecode.linear.weight_form import FormOptions, LinearNames, Shard, TensorSource, WeightForm, fused_shape

FORMS: list[type[WeightForm]] = [  # the first that can be taken is; filled while files are imported, and then read
    Int8Tiles,
    Int8,
    KeptTiles,
    KeptPanels,
    Panels,
    Packed,
    Plain,
]


def register_form(form: type[WeightForm], *, replace: bool = False) -> None:
    """Let weights take another form, before those that are known.

    Args:
        form: the class.
        replace: even before one that reports or `quantize` call by the same name.

    Raises:
        ArgumentError: there is a form of that name.
    """
    names = {form.path, form.quantize or form.path}
    taken = names & {name for each in FORMS for name in (each.path, each.quantize)}
    refuse_taken("a form", min(taken, default=""), bool(taken), replace)
    FORMS.insert(0, form)


_OUTSIDE = EntryPoints("graphdecode.forms", lambda _, form: register_form(form), FORMS)


def _known_forms() -> list[type[WeightForm]]:
    _OUTSIDE.find()
    return FORMS


def check_options(options: FormOptions, others: tuple[str, ...] = ()) -> list[type[WeightForm]]:
    """Return the forms that can be taken, the preferred one first.

    Args:
        options: of the forms.
        others: what `quantize` may be beside the names of forms, where it is none of these.

    Raises:
        ValueError: `quantize` is not known, or cannot be had here.
    """
    wanted = options.quantize
    asked = [form for form in _known_forms() if form.quantize == wanted or (wanted is None and form.is_of_source)]
    if not asked:
        names = dict.fromkeys((*(form.quantize for form in FORMS), *others))
        known = " or ".join(["None", *(repr(name) for name in names if name)])
        raise ArgumentError(f"quantize must be {known}, got {options.quantize!r}; a form {BRING_YOUR_OWN}")
    able = [form for form in asked if not form.why_not(options)]
    if not able:
        raise ArgumentError(f"quantize={options.quantize!r} {asked[-1].why_not(options)}")
    return able


def has_form(options: FormOptions) -> bool:
    """Whether a form is asked for by the name that `quantize` has, and can be taken."""
    return any(form.quantize == options.quantize and not form.why_not(options) for form in _known_forms())


def load_linear(source: TensorSource, names: LinearNames, shard: Shard | None, options: FormOptions) -> WeightForm:
    """Read a layer's tensors, or a part of them, in the form that a decode step reads fastest."""
    form, choices = keeping(source, names, options), Choices()
    if form is None:
        form, choices = _chosen(fused_shape(source, names.weights, shard), bool(names.biases), options)
    return _with(form.load(source, names, shard, options), choices)


def load_experts(source: TensorSource, names: ExpertNames, bias: Tensor | None, options: FormOptions) -> ExpertForm:
    """Read the weights of all experts of a layer for one of their products, in few bits where the source has them so.

    Args:
        source: of the weights.
        names: of these.
        bias: [experts, out_features], the gate first, or None.
        options: of the forms.

    Raises:
        ValueError: a form is asked for that experts do not have.
    """
    if options.quantize not in (None, KeptPanels.quantize):
        raise ArgumentError(f"quantize={options.quantize!r} cannot be had for a model with experts")
    held = (form.load(source, names, bias, options) for form in (ExpertTiles, ExpertPanels, PlainExperts))
    return next(form for form in held if form is not None)


def linear_of(weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
    """Return a plain weight [out_features, in_features] in the form that a decode step reads fastest."""
    form, choices = _chosen(tuple(weight.shape), bias is not None, options)
    return _with(form.of(weight, bias, options), choices)


def keeps(source: TensorSource, names: LinearNames, options: FormOptions) -> bool:
    """Whether the preferred form holds a layer's tensors as the source has them."""
    return check_options(options)[0].keeps(source, names)


def tied_linear(weight: Tensor, source: TensorSource, names: LinearNames, options: FormOptions) -> WeightForm:
    """Return the product with a plain weight that was read before; read again for a form that keeps what is stored."""
    if keeping(source, names, options) is not None:
        return load_linear(source, names, None, options)
    return linear_of(weight, None, options)


def keeping(source: TensorSource, names: LinearNames, options: FormOptions) -> type[WeightForm] | None:
    """Return the form that holds a layer's tensors as the source has them; None: they are to be read as plain ones."""
    return next((form for form in check_options(options) if form.keeps(source, names)), None)


def _chosen(shape: tuple[int, ...], has_bias: bool, options: FormOptions) -> tuple[type[WeightForm], Choices]:
    """Return the preferred form, or the fastest if it is one that is measured; and what was measured."""
    known = check_options(options)
    able = [form for form in known if not form.is_of_source] or known
    rivals = {form.path: form for form in able if form.is_measured}
    if not able[0].is_measured or len(rivals) == 1:
        return able[0], {}
    bias = torch.zeros(shape[0], dtype=options.dtype, device=options.device) if has_bias else None

    def product_of(form: type[WeightForm]) -> Product:
        return form.of(torch.ones(shape, dtype=options.dtype, device=options.device), bias, options).apply

    key = torch.empty(shape, dtype=options.dtype, device=options.device)  # never written: it takes no memory
    paths = {path: partial(product_of, form) for path, form in rivals.items()}
    choices = options.tuner.choose(key, bias, options.batch_sizes, paths)
    return rivals[choices[options.batch_sizes[0]].path], choices


def _with(form: WeightForm, choices: Choices) -> WeightForm:
    return replace(form, choices=choices) if choices else form
