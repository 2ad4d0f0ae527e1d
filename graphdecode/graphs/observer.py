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
_HOST_OPERATORS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item"}
_DATA_OPERATORS = {"aten::lift_fresh", "aten::lift"}
# tagged as dynamic, but only boolean masks make their shape depend on data
_INDEX_OPERATORS = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_MASK_DTYPES = (torch.bool, torch.uint8)


def storage_key(tensor: Tensor) -> int | None:
    """Return what identifies a tensor's storage; None for opaque tensors, which have none."""
    if tensor.layout != torch.strided or tensor.is_mkldnn:
        return None
    return tensor.untyped_storage()._cdata


def host_read(operator: str) -> CaptureError:
    """Return the error for a step that reads device memory on the host."""
    return CaptureError(
        "host-read",
        operator,
        "the step reads device memory on the host, where nothing is replayed: the value at capture would stand for ever",
        "keep the value on the device and compute with it there (torch.where, a mask, a kernel)",
    )


class HostReadGuard(TorchFunctionMode):
    """Refuses the tensor methods that read on the host."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _HOST_METHODS:
            raise host_read(f"Tensor.{_HOST_METHODS[func]}")
        return func(*args, **(kwargs or {}))


class StepObserver(TorchDispatchMode):
    """Checks every operator of one eager run of a step.

    Args:
        owned: the tensors that the step may read and write: slots and adopted tensors.
        constants: the tensors that it may only read.
    """

    def __init__(self, owned: Iterable[Tensor], constants: Iterable[Tensor]) -> None:
        super().__init__()
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
                    self._check_input(func, name, tensor, index)
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
        if name in _HOST_OPERATORS:
            raise host_read(str(func))
        if name in _DATA_OPERATORS:
            raise CaptureError(
                "host-data",
                str(func),
                "the step makes a tensor from host data: a graph would replay a copy of what the host held at capture",
                "declare a slot (or a constant) and write it before the replay, or use a torch factory such as full",
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureError(
                "torch-rng",
                str(func),
                "torch's generator is advanced by the host: a replay would not draw what an eager step draws",
                "use a counter-based generator that reads its seed and position from slots",
            )
        if torch.Tag.dynamic_output_shape in func.tags and _is_dynamic(name, args):
            raise CaptureError(
                "data-dependent-shape",
                str(func),
                "the shape of the result depends on the data, and a graph has fixed shapes",
                "work on the whole capacity with a mask (torch.where)",
            )
        target = kwargs.get("device")
        if name == "aten::_to_copy" and target is not None and torch.device(target).type == "cpu":
            source = args[0]
            if isinstance(source, Tensor) and source.device.type != "cpu":
                raise host_read(str(func))

    def _check_input(self, func: Any, name: str, tensor: Tensor, index: int) -> None:
        key = storage_key(tensor)
        if key is None or key in self._known or key in self.made:
            return
        if key in self._constants:
            arguments = func._schema.arguments
            alias = arguments[index].alias_info if index < len(arguments) else None
            if alias is not None and alias.is_write:
                raise CaptureError(
                    "constant-written",
                    str(func),
                    "the step writes into a constant, which other graphs and steps read",
                    "declare it as a slot, or adopt it into the buffers",
                )
            return
        raise CaptureError(
            "undeclared-input",
            str(func),
            f"the step reads a tensor {list(tensor.shape)} that is no slot, no constant and not made in the step: "
            "a graph would go on reading its address after it was freed or replaced",
            "declare it as a Slot, adopt it into the buffers, or pass it in constants",
        )


def _is_dynamic(name: str, args: tuple) -> bool:
    if name not in _INDEX_OPERATORS:
        return True
    indices = args[1] if len(args) > 1 else ()
    return any(isinstance(index, Tensor) and index.dtype in _MASK_DTYPES for index in indices)
