"""Watches one run of a step and refuses what no graph can replay, naming the operator and the line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphdecode.graphs.errors import CaptureError

# Tensor methods that read on the host without any operator that a dispatch mode could see
_HOST_METHODS = {
    getattr(Tensor, name): name
    for name in ("tolist", "numpy", "item", "__array__", "__repr__", "__format__", "__bool__", "__int__", "__float__")
}
_HOST_OPERATORS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item", "aten::allclose"}
_DATA_OPERATORS = {"aten::lift_fresh", "aten::lift"}
_MOVING_OPERATORS = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::set_data"}
# tagged as dynamic, but only boolean masks make their shape depend on data
_INDEX_OPERATORS = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_MASK_DTYPES = (torch.bool, torch.uint8)


def storage_key(tensor: Tensor) -> int | None:
    """Return what identifies a tensor's storage; None for opaque tensors, which have none."""
    if tensor.layout != torch.strided or tensor.is_mkldnn:
        return None
    return tensor.untyped_storage()._cdata


def raise_refusal(error: CaptureError) -> None:
    """Stop at the first hazard."""
    raise error


class HostReadGuard(TorchFunctionMode):
    """Refuses the tensor methods that read on the host.

    Args:
        refuse: what to do with a hazard; a checker collects them, a capture raises.
    """

    def __init__(self, refuse: Callable[[CaptureError], None] = raise_refusal) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _HOST_METHODS:
            self._refuse(CaptureError("host-read", f"Tensor.{_HOST_METHODS[func]}"))
        return func(*args, **(kwargs or {}))


class StepObserver(TorchDispatchMode):
    """Checks every operator of one eager run of a step.

    Args:
        owned: the tensors that the step may read and write: slots and adopted tensors.
        constants: the tensors that it may only read.
        refuse: what to do with a hazard; a checker collects them, a capture raises.
    """

    def __init__(
        self,
        owned: Iterable[Tensor],
        constants: Iterable[Tensor],
        refuse: Callable[[CaptureError], None] = raise_refusal,
    ) -> None:
        super().__init__()
        self.refuse = refuse
        self._known = {storage_key(tensor) for tensor in owned}
        self._constants = {storage_key(tensor) for tensor in constants}
        self.made: dict[int, Tensor] = {}  # storages made by the step; kept alive, so that none is mistaken for another

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        self._check_operator(func, name, args, kwargs)
        for index, value in enumerate([*args, *kwargs.values()]):
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor):
                    self._check_input(func, tensor, index)
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                key = storage_key(tensor)
                if key is not None and key not in self._known and key not in self._constants:
                    self.made.setdefault(key, tensor)
        self.seen(func, args, kwargs, result)
        return result

    def seen(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Take note of an operator that was run; a recorder keeps it."""

    def _check_operator(self, func: Any, name: str, args: tuple, kwargs: dict) -> None:
        hazards = {
            "host-read": name in _HOST_OPERATORS or _copies_to_host(name, args, kwargs),
            "host-data": name in _DATA_OPERATORS,
            "moved": name in _MOVING_OPERATORS,
            "torch-rng": torch.Tag.nondeterministic_seeded in func.tags,
            "data-dependent-shape": torch.Tag.dynamic_output_shape in func.tags and _is_dynamic(name, args),
        }
        for kind, is_there in hazards.items():
            if is_there:
                self.refuse(CaptureError(kind, str(func)))

    def _check_input(self, func: Any, tensor: Tensor, index: int) -> None:
        key = storage_key(tensor)
        if key is None or key in self._known or key in self.made:
            return
        if key not in self._constants:
            self.refuse(CaptureError("undeclared-input", str(func), f"shape {list(tensor.shape)}, {tensor.dtype}"))
            return
        arguments = func._schema.arguments
        alias = arguments[index].alias_info if index < len(arguments) else None
        if alias is not None and alias.is_write:
            self.refuse(CaptureError("constant-written", str(func)))


def _copies_to_host(name: str, args: tuple, kwargs: dict) -> bool:
    target = kwargs.get("device")
    to_cpu = name == "aten::_to_copy" and target is not None and torch.device(target).type == "cpu"
    return to_cpu and isinstance(args[0], Tensor) and args[0].device.type != "cpu"


def _is_dynamic(name: str, args: tuple) -> bool:
    if name not in _INDEX_OPERATORS:
        return True
    indices = args[1] if len(args) > 1 else ()
    return any(isinstance(index, Tensor) and index.dtype in _MASK_DTYPES for index in indices)
