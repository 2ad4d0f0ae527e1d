"""Observes one run of a step, and reports what no graph can replay, with the operator and the line."""

from __future__ import annotations

import functools
import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from graphdecode.buffers import Batch
from graphdecode.errors import GraphdecodeError
from graphdecode.graphs.errors import CaptureError, Refuse, caller, definition_of
from graphdecode.graphs.inspect.owners import Owners, storage_address, storage_key
from graphdecode.kernels.native.registration import is_own

try:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchsMode  # private: may be removed
except ImportError:

    class TorchsMode:  # type: ignore[no-redef]
        """Placeholder: without torch's mode, steps run only on the eager backend."""

        def __enter__(self) -> None:
            raise GraphdecodeError("this torch has no TorchDispatchMode to watch a step with; use backend='eager'")

        def __exit__(self, *_: object) -> None:
            """Never reached."""


# Tensor methods that read on the host without an operator that a dispatch mode sees
_HOST_NAMES = ("tolist", "numpy", "item", "cpu", "__array__", "__repr__", "__format__")
_HOST_CONVERSIONS = ("__bool__", "__int__", "__float__", "__index__", "__complex__")
# (kind of hazard, name) of each method that is refused
_METHODS = {getattr(Tensor, name): ("host-read", f"Tensor.{name}") for name in (*_HOST_NAMES, *_HOST_CONVERSIONS)} | {
    Tensor.data_ptr: ("raw-pointer", "Tensor.data_ptr"),
    Tensor.__dlpack__: ("raw-pointer", "Tensor.__dlpack__"),
    Tensor.data.__set__: ("moved", "Tensor.data = ..."),  # type: ignore[attr-defined]
}
_HAZARDS = {  # operators that are hazards with any arguments
    **dict.fromkeys(("_local_scalar_dense", "equal", "is_nonzero", "item", "allclose"), "host-read"),
    **dict.fromkeys(("lift_fresh", "lift"), "host-data"),
    **dict.fromkeys(("resize_", "resize_as_", "set_", "set_data"), "moved"),
}
# tagged as dynamic, but only boolean masks make their shape depend on data
_INDEX_OPERATORS = {"aten::index", "aten::_unsafe_index"}
_INDEX_PUT_OPERATORS = {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_SUSPECTS = {*_INDEX_OPERATORS, *_INDEX_PUT_OPERATORS, "aten::_to_copy"}
_MASK_DTYPES = (torch.bool, torch.uint8)


class SchemaArgument(NamedTuple):
    """An argument of an operator's schema."""

    name: str
    is_written: bool
    default: Any


class Schema(NamedTuple):
    """An operator's schema and tags, read once, since each access calls into C++."""

    name: str  # aten::add
    overload: str  # aten.add.Tensor
    arguments: tuple[SchemaArgument, ...]
    is_mutable: bool
    is_aten: bool
    hazard: str | None
    reshapes: bool  # changes only shape and strides (`transpose_`, `unsqueeze_`)
    may_draw: bool  # may use torch's random numbers
    is_dynamic: bool  # the shape of its result depends on data
    is_safe: bool  # no hazard, whatever the arguments


@functools.cache
def schema_of(func: Any) -> Schema:
    """Return an operator's `Schema`."""
    schema, tags = func._schema, func.tags
    hazard = _HAZARDS.get(schema.name.removeprefix("aten::"))
    reshapes, may_draw = torch.Tag.inplace_view in tags, torch.Tag.nondeterministic_seeded in tags
    is_dynamic = torch.Tag.dynamic_output_shape in tags
    return Schema(
        schema.name,
        str(func),
        tuple(
            SchemaArgument(
                argument.name, bool(argument.alias_info and argument.alias_info.is_write), argument.default_value
            )
            for argument in schema.arguments
        ),
        schema.is_mutable,
        func.namespace in ("aten", "prim"),
        hazard,
        reshapes,
        may_draw,
        is_dynamic,
        hazard is None and not (reshapes or may_draw or is_dynamic or schema.name in _SUSPECTS),
    )


class TorchDispatchMode(TorchsMode):
    """torch's mode, without the import of `torch._dynamo` by its first call (70 MB, seconds).

    torch wraps `__torch_dispatch__` to disable the compiler, which is needless before that is imported.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        guarded: Callable[..., Any] | None = cls.__dict__.get("__torch_dispatch__")
        plain = getattr(guarded, "__wrapped__", None)
        if guarded is None or plain is None:
            return

        @functools.wraps(plain)
        def dispatch(*arguments: Any, **keywords: Any) -> Any:
            return (guarded if "torch._dynamo" in sys.modules else plain)(*arguments, **keywords)

        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


class StepObserver(TorchDispatchMode):
    """Checks every operator of one eager run of a step, and raises the first hazard, or collects all.

    Attributes:
        checks_memory: check also which memory operators read and write, which takes most of the time.
        computes: also run the project's own operators that write only floats; if false, their outputs must not be read.
        made: storages that the step made.
        literals: tensors of one number that Python code writes into others (`x[0] = 1.0`).
        written: how often each storage was written.
        depth: nesting of running operators.
        slot_views: ids of the batch's tensors.
    """

    def __init__(
        self, owners: Owners, collect: Refuse | None = None, *, checks_memory: bool = True, computes: bool = True
    ) -> None:
        super().__init__()
        self._collect, self.checks_memory, self._computes = collect, checks_memory, computes
        self.made: dict[int, StorageWeakRef] = {}
        self.literals: dict[int | None, Tensor] = {}
        self.last_operator: str | None = None
        self.depth, self.in_setitem = 0, False
        self.slot_views: set[int] = set()
        self.written: Counter[int | None] = Counter()
        self._device_type = owners.buffers.device.type
        self._slots = owners.slots()
        self._constants = owners.constants_now()
        self._known = (self._slots, self._constants, self.literals)

    def refuse(self, error: CaptureError) -> None:
        """Raise a hazard, or collect it."""
        if self._collect is None:
            raise error
        self._collect(error)

    def owner_of(self, tensor: Tensor) -> str | None:
        """Return the name of the slot or constant whose memory a tensor lies in."""
        return self._slots.name_of(tensor) or self._constants.name_of(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        self.last_operator = schema.overload
        is_literal = self.in_setitem and schema.hazard == "host-data" and args[0].numel() == 1
        if not (is_literal or schema.is_safe):
            self._check_operator(schema, args, kwargs)
        given: Sequence[Given] = ()
        written: Sequence[tuple[Tensor, torch.Size, int | None]] = ()
        if self.checks_memory or not self._computes:
            given = tensor_arguments(schema, args, kwargs)
        if self.checks_memory:
            written = self._check_inputs(schema, given)
        self.depth += 1
        try:
            result = func(*args, **kwargs) if self._computes or not _is_skippable(func, given) else None
        finally:
            self.depth -= 1
        if is_literal:
            self.literals |= {storage_key(tensor): tensor for tensor in tensors_of(result)}
        if not self.checks_memory:
            return result
        self._check_outputs(schema, args, result, written)
        for tensor in tensors_of(result):
            key = storage_key(tensor)
            if key is None or key in self.made or any(key in known for known in self._known):
                continue
            self.made[key] = StorageWeakRef(tensor.untyped_storage())
            self.made_new(key, tensor)
        self.seen(func, args, kwargs, given, result)
        return result

    @contextmanager
    def working(self) -> Iterator[None]:
        """Suspend the observer, inside an operator and for its own reads."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def made_new(self, key: int, tensor: Tensor) -> None:
        """Hook: the step made a storage."""

    def seen(self, func: Any, args: tuple, kwargs: dict, given: Sequence[Given], result: Any) -> None:
        """Hook: an operator was run; `given` are its tensors."""

    def _check_operator(self, schema: Schema, args: tuple, kwargs: dict) -> None:
        hazards = {
            "host-read": schema.hazard == "host-read" or _copies_to_host(schema, args, kwargs),
            "host-data": schema.hazard == "host-data",
            "moved": schema.hazard == "moved" or (schema.reshapes and id(args[0]) in self.slot_views),
            "torch-rng": schema.may_draw and _draws(schema, args, kwargs),
            "data-dependent-shape": self._is_dynamic(schema, args),
        }
        for kind, is_there in hazards.items():
            if is_there:
                self.refuse(CaptureError(kind, schema.overload))

    def _is_dynamic(self, schema: Schema, args: tuple) -> bool:
        if schema.name in _INDEX_OPERATORS:
            return _has_mask(args)
        if schema.name in _INDEX_PUT_OPERATORS:  # one number written under a mask is a masked_fill
            return _has_mask(args) and storage_key(args[2]) not in self.literals
        return schema.is_dynamic

    def _check_inputs(self, schema: Schema, given: Sequence[Given]) -> list[tuple[Tensor, torch.Size, int | None]]:
        """Check the arguments' memory; return those that are written, with their shape and address before."""
        written = []
        for _, tensor, is_written in given:
            key = storage_key(tensor)
            if is_written:
                written.append((tensor, tensor.shape, storage_address(tensor)))
                self.written[key] += 1
            if key is None or key in self._slots or key in self.made or key in self.literals:
                continue
            if schema.hazard == "host-data":
                continue  # already reported
            if key not in self._constants:
                detail = f"shape {list(tensor.shape)}, {tensor.dtype}"
                self.refuse(CaptureError("undeclared-input", schema.overload, detail))
            elif is_written:
                self.refuse(CaptureError("constant-written", schema.overload, self.owner_of(tensor) or ""))
        return written

    def _check_outputs(self, schema: Schema, args: tuple, result: Any, written: Sequence) -> None:
        reports_itself = schema.hazard == "moved" or schema.reshapes
        for tensor, shape, address in written:
            if not reports_itself and (tensor.shape != shape or storage_address(tensor) != address):
                owner = self.owner_of(tensor) or "its output"
                detail = f"{owner}: {list(shape)} became {list(tensor.shape)}"
                self.refuse(CaptureError("moved", schema.overload, detail))
        if not schema.is_aten and any(isinstance(leaf, (int, float)) for leaf in flattened(result)):
            self.refuse(CaptureError("host-read", schema.overload, "it returns a number"))
        if self._device_type != "cpu" and not tensors_of(args):
            for _ in filter(lambda made: made.device.type == "cpu", tensors_of(result)):
                self.refuse(CaptureError("host-data", schema.overload, "made on the CPU"))


class LastOperator(TorchDispatchMode):
    """Remembers the last operator, for error messages; checks nothing."""

    name: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))


class MethodGuard(TorchFunctionMode):
    """Refuses tensor methods that no dispatch mode sees: host reads, addresses, replaced memory."""

    def __init__(self, observer: StepObserver) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._observer.depth:
            return func(*args, **kwargs)
        if func is Tensor.__setitem__:
            self._observer.in_setitem = not isinstance(args[2], Tensor)
            try:
                return func(*args, **kwargs)
            finally:
                self._observer.in_setitem = False
        if func in _METHODS:
            self._observer.refuse(CaptureError(*_METHODS[func]))
        if func is Tensor.to and _names_the_cpu(args, kwargs):
            self._observer.refuse(CaptureError("host-read", "Tensor.to"))
        return func(*args, **kwargs)


class WatchedBatch(Batch):
    """A batch of aliases: changes of shape stay here, and rebinding a slot is refused."""

    def __init__(self, batch: Batch, refuse: Refuse) -> None:
        aliases = {k: v.detach() if isinstance(v, Tensor) else v for k, v in vars(batch).items()}
        self.__dict__.update(aliases, _refuse=refuse, _names=frozenset(aliases))

    def __setattr__(self, name: str, value: Any) -> None:
        # `batch.x += 1` writes in place, and then binds the slot to itself
        if name in self._names and value is not self.__dict__[name]:
            self._refuse(CaptureError("moved", f"batch.{name} = ...", "a slot was rebound"))
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        self._refuse(CaptureError("moved", f"del batch.{name}", "a slot was deleted"))
        del self.__dict__[name]


@contextmanager
def observed(observer: StepObserver, batch: Batch, *, step: Any = None, guards_methods: bool = True) -> Iterator[Batch]:
    """Observe the step that runs over the yielded batch; afterwards, refuse writes by no operator of its thread.

    `step` is for their file and line. `guards_methods` makes some of torch's modules take another path (they ask
    whether torch functions are overridden): turn it off for the bits of an eager step.

    Raises:
        CaptureError: no graph can replay the step, or it raised an error.
    """
    watched = WatchedBatch(batch, observer.refuse)
    observer.slot_views = {id(value) for value in vars(watched).values() if isinstance(value, Tensor)}
    tensors = {name: tensor for name, tensor in vars(batch).items() if isinstance(tensor, Tensor)}
    versions = {name: _version(tensor) for name, tensor in tensors.items()}
    try:
        with (
            torch.no_grad(),
            launches_watched(lambda: observer.depth > 0, observer.refuse),
            MethodGuard(observer) if guards_methods else nullcontext(),
            observer,
        ):
            yield watched
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError.of(error, observer.last_operator) from error
    if not observer.checks_memory:
        return
    location = None if step is None else definition_of(step)
    for name, version in versions.items():
        key = storage_key(tensors[name])
        if _version(tensors[name]) - version > (0 if key is None else observer.written[key]):
            observer.refuse(CaptureError("unseen-work", f"batch.{name}", "it was written in another thread", location))


def _version(tensor: Tensor) -> int:
    """Return torch's count of writes to a tensor; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def values_of(schema: Schema, args: tuple, kwargs: dict) -> list[Any]:
    """Return the value of each argument of an operator's schema, defaults included."""
    rest = schema.arguments[len(args) :]
    return [*args, *(kwargs.get(argument.name, argument.default) for argument in rest)]


Given = tuple[str, Tensor, bool]  # a tensor argument: its name, the tensor, and whether it is written


def tensor_arguments(schema: Schema, args: tuple, kwargs: dict) -> list[Given]:
    """Return each tensor argument of an operator."""
    found: list[Given] = []
    for argument, value in zip(schema.arguments, values_of(schema, args, kwargs), strict=True):
        if isinstance(value, Tensor):
            found.append((argument.name, value, argument.is_written))
        elif isinstance(value, _CONTAINERS):
            found += ((argument.name, tensor, argument.is_written) for tensor in tensors_of(value))
    return found


def _is_skippable(func: Any, given: Sequence[Given]) -> bool:
    """Return whether an operator only writes into given float tensors, so that no index depends on it."""
    return is_own(func) and all(tensor.is_floating_point() for _, tensor, is_written in given if is_written)


def _draws(schema: Schema, args: tuple, kwargs: dict) -> bool:
    """Return whether an operator that may draw random numbers does with these arguments."""
    names = (argument.name for argument in schema.arguments)
    values = dict(zip(names, values_of(schema, args, kwargs), strict=True))
    shares = [values.get(name) for name in ("dropout_p", "dropout", "p")]
    return values.get("train") is not False and not any(isinstance(p, float) and p == 0.0 for p in shares)


def _copies_to_host(schema: Schema, args: tuple, kwargs: dict) -> bool:
    target = kwargs.get("device")
    to_cpu = schema.name == "aten::_to_copy" and target is not None and torch.device(target).type == "cpu"
    return to_cpu and isinstance(args[0], Tensor) and args[0].device.type != "cpu"


def _names_the_cpu(args: tuple, kwargs: dict) -> bool:
    """Return whether `to` names the CPU; `x.to(y.device)` on a CPU does not copy."""
    if not any(isinstance(value, str) and value == "cpu" for value in [*args[1:], kwargs.get("device")]):
        return False
    file, line = caller()
    return file is not None and line is not None and "cpu" in linecache.getline(file, line)


def _has_mask(args: tuple) -> bool:
    indices = args[1] if len(args) > 1 else ()
    return any(isinstance(index, Tensor) and index.dtype in _MASK_DTYPES for index in indices)


_CONTAINERS = (tuple, list, dict)


def flattened(value: Any) -> list[Any]:
    """Return the leaves of nested tuples, lists and dicts, in order."""
    if not isinstance(value, _CONTAINERS):
        return [value]
    members = value.values() if isinstance(value, dict) else value
    return [
        leaf for member in members for leaf in (flattened(member) if isinstance(member, _CONTAINERS) else (member,))
    ]


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors among the leaves."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in flattened(value) if isinstance(leaf, Tensor)]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the leaves of nested containers; named tuples become plain ones."""
    if isinstance(value, dict):
        return {key: mapped(function, member) for key, member in value.items()}
    if isinstance(value, (tuple, list)):
        made = [mapped(function, member) if isinstance(member, _CONTAINERS) else function(member) for member in value]
        return made if isinstance(value, list) else tuple(made)
    return function(value)


def _kernel_classes() -> tuple[Any, ...]:
    if "triton" not in sys.modules:
        return ()
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    return JITFunction, InterpretedFunction


class _Launches:
    """Reports Triton's launches to observers; its classes are patched while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watchers: tuple[tuple[int, Callable[[], bool], Refuse], ...] = ()
        self._originals: dict[Any, Callable[..., Any]] = {}

    @contextmanager
    def watched(self, in_operator: Callable[[], bool], refuse: Refuse) -> Iterator[None]:
        """Refuse kernels that this thread launches outside of an operator."""
        watcher = (threading.get_ident(), in_operator, refuse)
        with self._lock:
            self._watchers = (*self._watchers, watcher)
            for kernel_class in set(_kernel_classes()) - set(self._originals):
                self._originals[kernel_class] = kernel_class.run
                kernel_class.run = self._reporting(kernel_class.run)
        try:
            yield
        finally:
            with self._lock:
                self._watchers = tuple(each for each in self._watchers if each is not watcher)
                while self._originals and not self._watchers:
                    kernel_class, original = self._originals.popitem()
                    kernel_class.run = original

    def _reporting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            for thread, in_operator, refuse in self._watchers:
                if thread == threading.get_ident() and not in_operator():
                    refuse(CaptureError("unregistered-launch", getattr(kernel, "__name__", "triton kernel")))
                    return None
            return original(kernel, *args, **kwargs)

        return run


launches_watched = _Launches().watched  # one per process, since it patches classes
