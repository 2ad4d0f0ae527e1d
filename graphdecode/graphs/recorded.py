"""`RecordedStepGraph`: the semantics of a CUDA graph on a machine without one.

One run of the step is recorded operator by operator, with the actual tensors; replay runs that flat list again into
the same storages, with no Python of the step in between. What a CUDA graph would get wrong (a baked number, a stale
pointer) this gets wrong in the same way; what it cannot hold, this refuses.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from graphdecode.graphs.observer import HostReadGuard, StepObserver
from graphdecode.kernels.registration import bind

# factories whose contents nobody has written yet: their memory is part of the graph, and there is nothing to replay
_UNINITIALISED = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::empty_permuted",
}


class Recorder(StepObserver):
    """An observer that keeps what it sees as a flat list of calls without arguments."""

    def __init__(self, owned: Iterable[Tensor], constants: Iterable[Tensor]) -> None:
        super().__init__(owned, constants)
        self.calls: list[Callable[[], Any]] = []
        self.nodes: Counter[str] = Counter()

    def seen(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Keep a call that does again what the operator did, into the same memory."""
        schema = func._schema
        if schema.name in _UNINITIALISED or _is_view(schema):
            return
        self.nodes[str(func)] += 1
        own = bind(func, *_with_defaults(schema, args, kwargs))
        if own is not None:
            self.calls.append(own)
        elif schema.is_mutable:
            self.calls.append(functools.partial(func._op, *args, **kwargs))
        else:
            self.calls.append(_into_recorded_outputs(func, args, kwargs, result))


def _is_view(schema: Any) -> bool:
    returns = schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _with_defaults(schema: Any, args: tuple, kwargs: dict) -> list[Any]:
    rest = schema.arguments[len(args) :]
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in rest)]


def _into_recorded_outputs(func: Any, args: tuple, kwargs: dict, result: Any) -> Callable[[], Any]:
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    out_version = _out_version(func)
    if out_version is not None and len(outputs) == len(out_version.names):
        targets = dict(zip(out_version.names, outputs, strict=True))
        return functools.partial(out_version.operator, *args, **kwargs, **targets)
    return functools.partial(_compute_and_copy, func._op, args, kwargs, outputs)


def _compute_and_copy(operator: Any, args: tuple, kwargs: dict, outputs: list[Tensor]) -> None:
    fresh = [leaf for leaf in tree_leaves(operator(*args, **kwargs)) if isinstance(leaf, Tensor)]
    for target, source in zip(outputs, fresh, strict=True):
        target.copy_(source)


@dataclass(frozen=True)
class _OutVersion:
    operator: Any
    names: list[str]


def _out_version(func: Any) -> _OutVersion | None:
    """Return the overload of an operator that writes into given outputs, if it takes the same other arguments."""
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        candidate = getattr(func.overloadpacket, overload)
        written = [a for a in candidate._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        others = [(a.name, str(a.type)) for a in candidate._schema.arguments if a not in written]
        if written and all(argument.kwarg_only for argument in written) and others == wanted:
            return _OutVersion(candidate._op, [argument.name for argument in written])
    return None


class RecordedStepGraph:
    """One bucket's step as a flat list of operators over fixed memory.

    Attributes:
        nodes: operator -> how often the step runs it.
        pool_bytes: memory of the intermediates.
    """

    def __init__(self, step: Callable[[], None], owned: Iterable[Tensor], constants: Iterable[Tensor]) -> None:
        recorder = Recorder(owned, constants)
        with torch.no_grad(), HostReadGuard(), recorder:
            step()
        self._calls = recorder.calls
        self._pool = list(recorder.made.values())
        self.nodes: Counter[str] = recorder.nodes
        self.pool_bytes = sum(tensor.untyped_storage().nbytes() for tensor in self._pool)

    def replay(self) -> None:
        """Run the recorded operators again, into the same memory."""
        with torch.no_grad():
            for call in self._calls:
                call()

    def poison(self) -> None:
        """Fill all intermediates with NaN or the largest integer; a replay may not depend on what they hold."""
        for tensor in self._pool:
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            if tensor.dtype == torch.bool:
                whole.fill_(True)
            else:
                whole.fill_(float("nan") if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).max)

    def close(self) -> None:
        """Release the memory."""
        self._calls = []
        self._pool = []
