"""Observes one run of a step, and reports what no graph can replay, with the operator and the line."""

from __future__ import annotations

import functools
import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphdecode.buffers import StepSlots
from graphdecode.errors import GraphdecodeError
from graphdecode.graphs.errors import CaptureError, Refuse, caller, definition_of
from graphdecode.graphs.inspect.owners import (
    Owners,
    TensorInfo,
    can_be_moved,
    is_wrapper,
    storage_address,
    storage_key,
)
from graphdecode.kernels.native.registration import is_registered

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
# kind of hazard of each method and function that is refused
_METHODS: dict[tuple[Any, str], str] = {
    **{(Tensor, name): "host-read" for name in (*_HOST_NAMES, *_HOST_CONVERSIONS)},
    **{(torch.UntypedStorage, name): "host-read" for name in ("tolist", "cpu", "__getitem__")},
    **dict.fromkeys(
        ((Tensor, "data_ptr"), (Tensor, "__dlpack__"), (torch.UntypedStorage, "data_ptr"), (torch, "to_dlpack")),
        "raw-pointer",
    ),
}
# these read an argument of integers on the host, without an operator
_READ_SIZES = {(owner, "tensor_split") for owner in (Tensor, torch)} | {
    (owner, name)
    for owner, names in (
        (sys.modules.get("torch._VF"), ("lstm", "gru", "rnn_tanh", "rnn_relu", "_pad_packed_sequence")),
        (torch, ("_reshape_from_tensor",)),
    )
    for name in names
    if hasattr(owner, name)
}
_HAZARDS = {  # operators that are hazards with any arguments
    **dict.fromkeys(("_local_scalar_dense", "equal", "is_nonzero", "item", "allclose"), "host-read"),
    **dict.fromkeys(("_pack_padded_sequence", "_nested_tensor_from_mask_left_aligned"), "host-read"),
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
    tensors: tuple[tuple[int, str, bool], ...]  # arguments with tensors: index, name, and whether they are written
    is_mutable: bool
    is_aten: bool
    is_registered: bool  # of the project: it writes into given tensors alone
    operator: Any
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
    arguments = tuple(
        SchemaArgument(
            argument.name, bool(argument.alias_info and argument.alias_info.is_write), argument.default_value
        )
        for argument in schema.arguments
    )
    takes_tensors = ["Tensor" in str(argument.type) for argument in schema.arguments]
    return Schema(
        schema.name,
        str(func),
        arguments,
        tuple((index, *arguments[index][:2]) for index, takes in enumerate(takes_tensors) if takes),
        schema.is_mutable,
        func.namespace in ("aten", "prim"),
        is_registered(func),
        func,
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
        original = getattr(guarded, "__wrapped__", None)
        if guarded is None or original is None:
            return

        @functools.wraps(original)
        def dispatch(*arguments: Any, **keywords: Any) -> Any:
            return (guarded if "torch._dynamo" in sys.modules else original)(*arguments, **keywords)

        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


class StepObserver(TorchDispatchMode):
    """Checks every operator of one eager run of a step, and raises the first hazard, or collects all.

    Attributes:
        binds_native: `on_operator` runs the project's own operators, where their outputs are read.
        created: storages that the step made.
        literals: tensors of one number that Python code writes into others (`x[0] = 1.0`).
        written: how often each storage was written.
        depth: nesting of running operators.
        slot_views: ids of the batch's tensors.
    """

    binds_native = False

    def __init__(self, owners: Owners, collect: Refuse | None = None) -> None:
        super().__init__()
        self._collect = collect
        self.created: dict[int, StorageWeakRef] = {}
        self.literals: dict[int | None, Tensor] = {}
        self.last_operator: str | None = None
        self.depth, self.in_setitem = 0, False
        self.slot_views: set[int] = set()
        self.written: Counter[int | None] = Counter()
        self._device_type = owners.buffers.device.type
        self._slots = owners.slots()
        self._constants = owners.constants_now()
        self._slot_infos: dict[int, TensorInfo] = {}  # slots by the ids of their tensors
        self._opaque: dict[int, Tensor] = {}  # refused results, by their ids

    @property
    def declared(self) -> dict[str, Tensor]:
        """All slots, adopted tensors and constants."""
        slots = {f"batch.{name}": tensor for name, tensor in self._slots.tensors.items()}
        return slots | self._constants.tensors

    def lost_result(self, result: Any, location: tuple[str | None, int | None]) -> CaptureError | None:
        """Return why nobody can read what a step has computed; None if it is in slots or adopted tensors."""
        lost = [tensor for tensor in tensors_of(result) if storage_key(tensor) in {None, *self.created}]
        if lost:
            detail = f"it returns a tensor of shape {list(lost[0].shape)}"
        elif self.last_operator is not None and not any(key in self._slots for key in self.written):
            detail = "it writes no slot"
        else:
            return None
        return CaptureError("lost-result", "the step", detail, location)

    def refuse(self, error: CaptureError) -> None:
        """Raise a hazard, or collect it."""
        if self._collect is None:
            raise error
        self._collect(error)

    def owner_of(self, tensor: Tensor) -> str | None:
        """Return the name of the slot or constant whose memory a tensor lies in."""
        return self._slots.name_of(tensor) or self._constants.name_of(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # its own operators are observed
        self.depth += 1
        try:
            return self._observe(func, args, kwargs or {})
        finally:
            self.depth -= 1

    def _observe(self, func: Any, args: tuple, kwargs: dict) -> Any:
        schema = schema_of(func)
        self.last_operator = schema.overload
        is_literal = self.in_setitem and schema.hazard == "host-data" and args[0].numel() == 1
        if not (is_literal or schema.is_safe):
            self._check_operator(schema, args, kwargs)
        inputs = self._inputs(schema, args, kwargs)
        written, result = [], None
        for _, tensor, is_written, key in inputs:
            if is_written:
                written.append(tensor)
                self.written[key] += 1
        if not (schema.is_registered and self.binds_native):
            before = [(tensor, tensor.shape, storage_address(tensor)) for tensor in written]
            result = func(*args, **kwargs)
            if is_literal:
                self.literals |= {storage_key(tensor): tensor for tensor in tensors_of(result)}
            if written or not schema.is_aten or self._device_type != "cpu":
                self._check_outputs(schema, args, result, before)
            self._note_results(schema, inputs, result)
        if not (isinstance(result, Tensor) and result.is_meta):
            self.on_operator(schema, args, kwargs, inputs, result)
        return result

    def _note_results(self, schema: Schema, inputs: Sequence[TensorArg], result: Any) -> None:
        """Note what an operator made; refuse what no graph's memory can hold."""
        new: list[Tensor] = []
        for tensor in tensors_of(result):
            key = storage_key(tensor)
            if key is None and any(tensor is each for _, each, *_ in inputs):
                continue  # written in place
            if key is None or not self._is_tracked(key):
                if can_be_moved(tensor):
                    new.append(tensor)
                    continue
                if not tensor.is_meta:  # that has no memory
                    detail = f"{str(tensor.layout).removeprefix('torch.')}, {tensor.dtype}"
                    self.refuse(CaptureError("opaque-memory", schema.overload, detail))
                    self._opaque[id(tensor)] = tensor
                if key is not None:
                    self.created[key] = StorageWeakRef(tensor.untyped_storage())
        if new:
            self.on_new_tensors(schema, new)
        for tensor in new:
            storage = tensor.untyped_storage()
            self.created[storage._cdata] = StorageWeakRef(storage)

    def _is_tracked(self, key: int) -> bool:
        return key in self.created or key in self._slots or key in self._constants or key in self.literals

    def on_new_tensors(self, schema: Schema, tensors: Sequence[Tensor]) -> None:
        """Hook: an operator returned tensors in new memory."""

    def on_operator(self, schema: Schema, args: tuple, kwargs: dict, inputs: Sequence[TensorArg], result: Any) -> None:
        """Hook: an operator was run; `inputs` are its tensors."""

    def _check_operator(self, schema: Schema, args: tuple, kwargs: dict) -> None:
        hazards = {
            "host-read": schema.hazard == "host-read" or _copies_to_host(schema, args, kwargs),
            "host-data": schema.hazard == "host-data",
            "moved": schema.hazard == "moved" or (schema.reshapes and id(args[0]) in self.slot_views),
            "torch-rng": schema.may_draw and _draws(schema, args, kwargs),
            "data-dependent-shape": self._is_dynamic(schema, args),
        }
        for kind, applies in hazards.items():
            if applies:
                self.refuse(CaptureError(kind, schema.overload))

    def _is_dynamic(self, schema: Schema, args: tuple) -> bool:
        if schema.name in _INDEX_OPERATORS:
            return _has_mask(args)
        if schema.name in _INDEX_PUT_OPERATORS:  # one number written under a mask is a masked_fill
            return _has_mask(args) and storage_key(args[2]) not in self.literals
        return schema.is_dynamic

    def _inputs(self, schema: Schema, args: tuple, kwargs: dict) -> list[TensorArg]:
        """Return the tensor arguments of an operator, checked."""
        inputs: list[TensorArg] = []
        values, slots, constants = values_of(schema, args, kwargs), self._slot_infos, self._constants.infos
        for index, name, is_written in schema.tensors:
            value = values[index]
            if isinstance(value, Tensor):
                info = slots.get(id(value)) or (None if is_written else constants.get(id(value)))
                key = self._checked(schema, value, is_written) if info is None else info.key
                inputs.append((name, value, is_written, key))
            elif value is not None:
                inputs += ((name, t, is_written, self._checked(schema, t, is_written)) for t in tensors_of(value))
        return inputs

    def _checked(self, schema: Schema, tensor: Tensor, is_written: bool) -> int | None:
        """Return the key of an argument's storage; refuse memory that was not declared."""
        key = storage_key(tensor)
        if schema.hazard == "host-data" or id(tensor) in self._opaque:
            return key  # reported already
        if key in self.created or key in self.literals:
            return key
        if key in self._slots:
            self._slot_infos[id(tensor)] = TensorInfo.of(tensor, self._slots.name_of(tensor))
        elif not (self._constants.names(tensor) if key is None else key in self._constants):
            detail = f"shape {list(tensor.shape)}, {tensor.dtype}"
            self.refuse(CaptureError("undeclared-input", schema.overload, detail))
        elif is_written:
            owner = "" if key is None else self.owner_of(tensor) or ""
            self.refuse(CaptureError("constant-written", schema.overload, owner))
        elif self._constants.names(tensor):
            self._constants.infos[id(tensor)] = TensorInfo.of(tensor, self._constants.name_of(tensor))
        return key

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
            for _ in filter(lambda tensor: tensor.device.type == "cpu", tensors_of(result)):
                self.refuse(CaptureError("host-data", schema.overload, "made on the CPU"))


class LastOperator(TorchDispatchMode):
    """Remembers the last operator, for error messages; checks nothing."""

    name: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))


class _Watched:
    """A batch of aliases: changes of shape stay here, and rebinding a slot is refused."""

    _refuse: Refuse
    _names: frozenset[str]

    def __setattr__(self, name: str, value: Any) -> None:
        # `batch.x += 1` writes in place, and then binds the slot to itself
        if name in self._names and value is not self.__dict__[name]:
            self._refuse(CaptureError("moved", f"batch.{name} = ...", "a slot was rebound"))
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        self._refuse(CaptureError("moved", f"del batch.{name}", "a slot was deleted"))
        del self.__dict__[name]


@functools.cache
def _watched_class(kind: Any) -> Any:
    return type(f"Watched{kind.__name__}", (_Watched, kind), {})


def watched(batch: StepSlots, refuse: Refuse) -> Any:
    """Return a batch of aliases, of the same class, that refuses to rebind slots."""
    aliases = {k: v.detach() if isinstance(v, Tensor) else v for k, v in vars(batch).items()}
    kind: Any = type(batch)
    other = object.__new__(_watched_class(kind))
    vars(other).update(aliases, _refuse=refuse, _names=frozenset(aliases))
    return other


@contextmanager
def observed(observer: StepObserver, batch: StepSlots, *, step: Any = None) -> Iterator[Any]:
    """Observe the step that runs over the yielded batch; afterwards, refuse writes by no operator of its thread.

    `step` is for their file and line.

    Raises:
        CaptureError: no graph can replay the step, or it raised an error.
    """
    aliases = watched(batch, observer.refuse)
    observer.slot_views = {id(value) for value in vars(aliases).values() if isinstance(value, Tensor)}
    tensors = observer.declared
    versions = {name: _version(tensor) for name, tensor in tensors.items()}
    try:
        with (
            torch.no_grad(),
            launches_watched(lambda: observer.depth > 0, observer.refuse, partial(setattr, observer, "in_setitem")),
            observer,
        ):
            yield aliases
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError.of(error, observer.last_operator) from error
    location = None if step is None else definition_of(step)
    for name, version in versions.items():
        key = storage_key(tensors[name])
        if _version(tensors[name]) - version > observer.written[key] + observer.written[None]:
            observer.refuse(CaptureError("unseen-work", name, "it was written in another thread", location))


def _version(tensor: Tensor) -> int:
    """Return torch's count of writes to a tensor; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def values_of(schema: Schema, args: tuple, kwargs: dict) -> Sequence[Any]:
    """Return the value of each argument of an operator's schema, defaults included."""
    if len(args) == len(schema.arguments):
        return args
    others = schema.arguments[len(args) :]
    return [*args, *(kwargs.get(argument.name, argument.default) for argument in others)]


# a tensor argument: its name, the tensor, whether it is written, and its storage's key
TensorArg = tuple[str, Tensor, bool, int | None]


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


def _counts(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


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
        members = [
            mapped(function, member) if isinstance(member, _CONTAINERS) else function(member) for member in value
        ]
        return members if isinstance(value, list) else tuple(members)
    return function(value)


class _Watcher(NamedTuple):
    """A thread that observes a step, and what to call."""

    thread: int
    in_operator: Callable[[], bool]
    refuse: Refuse
    in_setitem: Callable[[bool], None]


def _kernel_classes() -> tuple[Any, ...]:
    if "triton" not in sys.modules:
        return ()
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    return JITFunction, InterpretedFunction


class _Watches:
    """Reports Triton's launches and methods of tensors to observers; their classes are patched while there are any.

    A `TorchFunctionMode` would see the methods, too, but some of torch's modules take another path under one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watchers: tuple[_Watcher, ...] = ()
        self._originals: dict[tuple[Any, str], Any] = {}  # what the class itself had; None: it inherits the attribute

    @contextmanager
    def watched(
        self, in_operator: Callable[[], bool], refuse: Refuse, in_setitem: Callable[[bool], None] = lambda _: None
    ) -> Iterator[None]:
        """Refuse kernels and methods that this thread runs outside of an operator, and tell of writes by index."""
        watcher = _Watcher(threading.get_ident(), in_operator, refuse, in_setitem)
        with self._lock:
            self._watchers = (*self._watchers, watcher)
            patches = {(each, "run"): self._launch(each.run) for each in _kernel_classes()} | {
                (owner, name): self._method(owner, name, getattr(owner, name))
                for owner, name in (
                    *_METHODS,
                    *_READ_SIZES,
                    *((Tensor, name) for name in ("data", "to", "__setitem__")),
                )
            }
            for owner, name in patches.keys() - self._originals.keys():
                self._originals[owner, name] = vars(owner).get(name)
                setattr(owner, name, patches[owner, name])
        try:
            yield
        finally:
            with self._lock:
                self._watchers = tuple(each for each in self._watchers if each is not watcher)
                while self._originals and not self._watchers:
                    (owner, name), original = self._originals.popitem()
                    if original is None:
                        delattr(owner, name)
                    else:
                        setattr(owner, name, original)

    def _mine(self) -> list[_Watcher]:
        thread = threading.get_ident()
        return [each for each in self._watchers if each.thread == thread and not each.in_operator()]

    def _launch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            for watcher in self._mine():
                watcher.refuse(CaptureError("unregistered-launch", getattr(kernel, "__name__", "triton kernel")))
                return None
            return original(kernel, *args, **kwargs)

        return run

    def _method(self, owner: Any, name: str, original: Any) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            for watcher in self._mine():
                if (kind := _METHODS.get((owner, name))) is not None:
                    watcher.refuse(CaptureError(kind, f"{owner.__name__}.{name}"))
                elif (owner, name) in _READ_SIZES:
                    if any(isinstance(value, Tensor) and _counts(value) for value in (*args[1:], *kwargs.values())):
                        watcher.refuse(CaptureError("host-read", f"torch.{name}", "it reads sizes from a tensor"))
                elif name == "to" and _names_the_cpu(args, kwargs):
                    watcher.refuse(CaptureError("host-read", "Tensor.to"))
            return original(*args, **kwargs)

        def setitem(*args: Any) -> None:
            watchers = self._mine()
            for watcher in watchers:
                watcher.in_setitem(not isinstance(args[2], Tensor))
            try:
                original(*args)
            finally:
                for watcher in watchers:
                    watcher.in_setitem(False)

        def set_data(tensor: Tensor, value: Tensor) -> None:
            for watcher in self._mine():
                watcher.refuse(CaptureError("moved", "Tensor.data = ..."))
            original.__set__(tensor, value)

        if name == "data":
            return property(original.__get__, set_data)
        return setitem if name == "__setitem__" else method


launches_watched = _Watches().watched  # one per process, since it patches classes
