"""What weights of few bits cost on a CPU beside plain ones of their shapes: timed where a report asks for it.

A product is timed as a step has it: behind others, with no Python in between. So it is run over copies of its weight,
which together are more than the caches hold, one after another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphdecode.graphs.inspect.observer import TorchDispatchMode, named_arguments
from graphdecode.kernels.native.calls import joined
from graphdecode.kernels.native.registration import bind
from graphdecode.linear.expert_form import NO_GATE, ExpertForm, ExpertNames, Gate
from graphdecode.linear.linear_choice import Timing
from graphdecode.linear.plain_experts import PlainExperts, stacked
from graphdecode.linear.weight_form import FormOptions, WeightForm

_PLAIN_BYTES = 8 << 20  # of a plain weight that is made to be measured and dropped
_CACHED_BYTES = 64 << 20  # more than the caches hold
_COPIES = 32
_ROWS_OF_READING = 16  # with more of them, arithmetic takes the time, and not reading
_REPETITIONS = 2
_GATE = Gate("silu")

Held = TypeVar("Held", WeightForm, ExpertForm)


def compared(form: WeightForm, plain: Callable[[Tensor], WeightForm], options: FormOptions) -> WeightForm:
    """Return a weight of few bits with what it takes beside a plain one; others, and those of a GPU, as they are.

    Args:
        form: the weight.
        plain: returns a plain weight in the form that it would have.
        options: of the forms.
    """
    key = torch.empty(form.shape, dtype=options.dtype, device="meta")
    if options.device.type != "cpu" or form.nbytes >= key.nbytes:
        return form

    def timing(held: WeightForm, share: float) -> Timing:
        copies = _copies(held, options)

        def timed(rows: int) -> float:
            x = torch.ones(rows, form.in_features, dtype=options.dtype)
            out = x.new_empty(rows, held.out_features)
            return share * seconds_of([partial(each.apply, out, x) for each in _some(copies, rows)])

        return timed

    def of_plain() -> Timing:
        part = max(1, min(form.out_features, _PLAIN_BYTES // (form.in_features * options.dtype.itemsize)))
        ones = torch.ones(part, form.in_features, dtype=options.dtype)
        return timing(plain(ones), form.out_features / part)

    timings = (lambda: timing(form, 1.0), of_plain)
    choices = options.tuner.compare(form.kind, key, options.report_sizes, timings, lambda _: form.nbytes)
    return replace(form, choices=choices)


def compared_experts(form: ExpertForm, names: ExpertNames, options: FormOptions) -> ExpertForm:
    """Return the experts' weights of few bits with what a product takes beside plain ones; others as they are.

    A step's tokens are taken to go to as many experts as they can, each to as many tokens as any other.
    """
    experts, out_features, in_features = form.shape
    key = torch.empty(form.shape, dtype=options.dtype, device="meta")
    if options.device.type != "cpu" or form.nbytes >= key.nbytes:
        return form
    slots, gate = (names.slots, _GATE) if names.is_gated else (1, NO_GATE)

    def taken(tokens: int) -> int:
        return min(tokens * names.slots, experts)

    def timing(held: ExpertForm) -> Timing:
        copies = _copies(held, options)
        count, rows, _ = held.shape

        def timed(tokens: int) -> float:
            """Return the time of what these experts have to do, times what they lack of all outputs."""
            there = min(taken(tokens), count)
            pairs = -(-tokens * names.slots * there // taken(tokens))
            share = slots if pairs % slots == 0 else 1
            ends = [pairs * min(expert, there) // there for expert in range(count + 1)]
            order, offsets = torch.arange(pairs, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)
            x = torch.ones(pairs // share, in_features, dtype=options.dtype)
            out = x.new_empty(pairs, rows // 2 if names.is_gated else rows)
            calls = [
                partial(each.apply, out, x, order, offsets, slots=share, gate=gate)
                for each in _some(copies, pairs // there)
            ]
            return seconds_of(calls) * taken(tokens) / there * out_features / rows

        return timed

    def of_plain() -> Timing:
        outputs = _PLAIN_BYTES // (in_features * options.dtype.itemsize)
        rows = out_features if outputs >= out_features else max(2, outputs // 2 * 2)
        count = max(1, min(experts, outputs // out_features))
        own = (torch.ones(rows, in_features, dtype=options.dtype) for _ in range(count))
        whole = stacked(own, count, is_gated=names.is_gated)
        return timing(PlainExperts((count, rows, in_features), None, whole, options.batch_invariant))

    kind, timings = f"{form.kind} of which {names.slots}", (lambda: timing(form), of_plain)
    choices = options.tuner.compare(
        kind, key, options.report_sizes, timings, lambda tokens: form.nbytes * taken(tokens) // experts
    )
    return replace(form, choices=choices)


def _copies(held: Held, options: FormOptions) -> list[Held]:
    """Return a weight and so many copies of it that none is in a cache when its turn comes, if a model's is in none."""
    wanted = -(-_CACHED_BYTES // max(held.nbytes, 1)) if options.tuner.is_cold else 1
    copies = [held]
    copies += [deepcopy(held) for _ in range(min(wanted, _COPIES) - 1)]
    return copies


def _some(copies: list[Held], rows: int) -> list[Held]:
    """Return fewer copies where rows are many: a product of them takes as long as several of few."""
    return copies[: max(1, len(copies) * _ROWS_OF_READING // max(rows, _ROWS_OF_READING))]


def seconds_of(calls: Sequence[Callable[[], None]]) -> float:
    """Return the shortest time of a call in seconds, over all of them one after another."""
    with torch.no_grad(), _Binding() as binding:
        for call in calls:
            call()
    bound, best = joined(binding.calls), float("inf")
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        for each in bound:
            each()
        best = min(best, time.perf_counter() - start)
    return best / len(calls)


class _Binding(TorchDispatchMode):
    """Keeps the operators that are run, bound to the tensors that they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = bind(func, *(value for _, value in named_arguments(func, args, kwargs)))
        self.calls.append(partial(func, *args, **kwargs) if own is None else own)
        return func(*args, **kwargs)
