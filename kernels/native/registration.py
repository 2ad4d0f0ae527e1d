"""Registration of `torch.library` operators.

The decorated function defines the operator: its annotations are the signature, its docstring describes the arguments,
and its body computes with torch operators, as the reference of the tests. The schema, the dispatcher's argument order,
the callers' function and the C struct of a compiled kernel are derived from the signature. A NamedTuple is one argument
of the function, and one argument per field everywhere else.

An operator may have a Triton version, for CUDA tensors, and a C kernel of the same name, for CPUs with a C compiler.
Registered operators can be recorded on a CPU, traced by FakeTensor and checked by `torch.library.opcheck`.
"""

import functools
import inspect
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from operator import itemgetter
from string import ascii_lowercase
from types import FunctionType, UnionType
from typing import (
    Annotated,
    Any,
    NamedTuple,
    ParamSpec,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor

from . import library
from .library import CODES, WIDE_CODE, NativeCall, NativeSequence

T = TypeVar("T")


class OneOf(tuple[str, ...]):
    """The values of a string argument; C gets the index."""


Written = Annotated[T, "written"]  # the operator writes into it
Int32 = Annotated[Tensor, torch.int32]
Int64 = Annotated[Tensor, torch.int64]
Float32 = Annotated[Tensor, torch.float32]
Bfloat16 = Annotated[Tensor, torch.bfloat16]
_ANY, _WIDE = "any", "wide"
AnyElement = Annotated[Tensor, _ANY]  # a tensor of any dtype
Wide = Annotated[Tensor, _WIDE]  # of the element type or float32; C gets which

_KEYWORD_ONLY, _ANY_NUMBER = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL
_NO_DEFAULT = inspect.Parameter.empty
_data_ptr = Tensor.__base__.data_ptr  # type: ignore[union-attr]  # `Tensor`'s is patched while a step is observed
_DIMENSIONS = 4  # most dimensions of compiled kernels' tensors
_NO_TENSOR = (0,) * (2 + 2 * _DIMENSIONS)
_MISSING = tuple((0,) * (_DIMENSIONS - count) for count in range(_DIMENSIONS + 1))
_C_TYPES = {torch.int32: "int32_t", torch.int64: "int64_t", torch.float32: "float", torch.bfloat16: "uint16_t"}


class Field(NamedTuple):
    """One argument in the dispatcher and in C.

    Attributes:
        name: name in the function or NamedTuple.
        kind: Tensor, int, float, bool or str.
        is_optional: a tensor that may be None.
        is_written: the operator writes into it.
        dtype: a tensor's required dtype; None: the element type, which such tensors share; "any" or "wide": see
            `AnyElement` and `Wide`.
        choices: values of a string.
    """

    name: str
    kind: type
    is_optional: bool
    is_written: bool
    dtype: torch.dtype | str | None
    choices: OneOf | None

    @classmethod
    def of(cls, name: str, annotation: Any, is_optional: bool = False, is_written: bool = False) -> "Field":
        """Read one annotation."""
        kind, marks, may_be_none = _unwrapped(annotation)
        dtype = next((mark for mark in marks if isinstance(mark, torch.dtype) or mark in (_ANY, _WIDE)), None)
        choices = next((mark for mark in marks if isinstance(mark, OneOf)), None)
        return cls(name, kind, is_optional or may_be_none, is_written or "written" in marks, dtype, choices)

    @property
    def c_declaration(self) -> str | None:
        """Return the struct member; None if C does not get the argument."""
        if self.kind is Tensor:
            const = "" if self.is_written else "const "
            element = "void" if not isinstance(self.dtype, torch.dtype) else _C_TYPES[self.dtype]
            return f"    TENSOR({const}{element}) {self.name};\n"
        if self.kind is str and self.choices is None:
            return None
        return f"    {'double' if self.kind is float else 'int64_t'} {self.name};\n"


@dataclass(frozen=True)
class Parameter:
    """One parameter of the function; `record`: its NamedTuple type, or None."""

    name: str
    fields: tuple[Field, ...]
    record: Any
    is_optional: bool
    is_keyword: bool

    @classmethod
    def of(cls, parameter: inspect.Parameter, annotation: Any) -> "Parameter":
        """Read one parameter of a function."""
        kind, marks, is_optional = _unwrapped(annotation)
        is_keyword = parameter.kind is _KEYWORD_ONLY
        if not hasattr(kind, "_fields"):
            return cls(parameter.name, (Field.of(parameter.name, annotation),), None, is_optional, is_keyword)
        fields = _fields_of(kind, is_optional, "written" in marks)
        return cls(parameter.name, fields, kind, is_optional, is_keyword)

    @property
    def c_declaration(self) -> str:
        """Return the struct's members; a record's members are also members of the struct."""
        members = "".join(field.c_declaration or "" for field in self.fields)
        if self.record is None:
            return members
        return f"    union {{\n    struct {{\n{members}    }};\n    {self.record.__name__} {self.name};\n    }};\n"


class Signature:
    """The signature of one function, from its annotations.

    Attributes:
        name: name of the function, the operator and the kernel.
        parameters: the function's arguments.
        fields: the flattened arguments, for the dispatcher and C.
        has_element: whether tensors share an element type.
        module: the function's module.
        part: the part of the compiled kernels that it belongs to.

    Raises:
        ValueError: two fields have the same name.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__.lstrip("_")  # a leading underscore: callers use another function around it
        self.function = function
        hints = get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters
        self.parameters = [Parameter.of(parameters[name], hints[name]) for name in parameters]
        self.fields = [field for parameter in self.parameters for field in parameter.fields]
        names = [field.name for field in self.fields]
        if len(set(names)) < len(names):
            raise ValueError(f"{self.name} has two arguments of one name among {', '.join(names)}")
        self.has_element = any(field.kind is Tensor and field.dtype in (None, _WIDE) for field in self.fields)
        self.module = function.__module__
        self.part = library.part_of(self.module, has_element=self.has_element)
        codes = "".join(_codes(field) for field in self.fields)
        self._layout = struct.Struct(f"@{codes}")
        self._packed = [(field.kind, field.dtype, field.choices) for field in self.fields]

    @property
    def schema(self) -> str:
        """The operator's schema in torch's language."""
        letters = iter(ascii_lowercase)
        arguments = []
        for field in self.fields:
            written = f"({next(letters)}!)" if field.is_written else ""
            arguments.append(f"{field.kind.__name__}{written}{'?' if field.is_optional else ''} {field.name}")
        return f"{self.name}({', '.join(arguments)}) -> ()"

    @property
    def c_struct(self) -> str:
        """The argument struct of the compiled kernel, with records as members."""
        members = "".join(parameter.c_declaration for parameter in self.parameters)
        return f"typedef struct {{\n{members}}} {self.name}_args;\n"

    @property
    def c_records(self) -> dict[str, str]:
        """The structs of the records among its arguments, by name."""
        records = {}
        for record in {parameter.record for parameter in self.parameters if parameter.record is not None}:
            members = "".join(field.c_declaration or "" for field in _fields_of(record))
            records[record.__name__] = f"typedef struct {{\n{members}}} {record.__name__};\n"
        return records

    @property
    def choices(self) -> dict[str, int]:
        """The C constants of string values."""
        return {
            f"{field.name}_{choice}".upper(): index
            for field in self.fields
            for index, choice in enumerate(field.choices or ())
        }

    def caller(self, registered: Callable[..., None]) -> Callable[..., None]:
        """Return the callers' function, which has the same arguments and calls the operator."""
        has_keywords = any(parameter.is_keyword for parameter in self.parameters)
        count = -1 if has_keywords else len(self.parameters)  # of positional arguments that are all of them
        records = [
            (at, slice(at, at + 1), (None,) * len(parameter.fields))
            for at, parameter in enumerate(self.parameters)
            if parameter.record is not None
        ][::-1]  # from the last one, so that a record's fields move no record before it
        choices = [(at, field.name, field.choices) for at, field in enumerate(self.fields) if field.choices]
        in_order = self._in_order()

        def call(*arguments: Any, **named: Any) -> None:
            if named or len(arguments) != count:
                registered(*in_order(arguments, named))
            else:
                registered(*arguments)

        def call_with_fields(*arguments: Any, **named: Any) -> None:
            values = in_order(arguments, named) if named or len(arguments) != count else [*arguments]
            for at, index, no_fields in records:
                values[index] = values[at] or no_fields
            for at, name, allowed in choices:
                if values[at] not in allowed:
                    raise ValueError(f"{name} is {values[at]!r}; it must be one of {', '.join(allowed)}")
            registered(*values)

        return _named_like(self.function, call_with_fields if records or choices else call)

    def _in_order(self) -> Callable[[tuple[Any, ...], Mapping[str, Any]], list[Any]]:
        """Return a function of positional and named arguments that returns all of them in order."""
        function, declared = self.function, [*inspect.signature(self.function).parameters.values()]
        num_positional = sum(not parameter.is_keyword for parameter in self.parameters)
        others = []  # by the number of positional arguments: the others' defaults, and which of them have none
        for count in range(num_positional + 1):
            defaults = {parameter.name: parameter.default for parameter in declared[count:]}
            required = {name for name, default in defaults.items() if default is _NO_DEFAULT}
            others.append((defaults, required))

        def in_order(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> list[Any]:
            if len(arguments) <= num_positional:
                defaults, required = others[len(arguments)]
                if not (named or required):
                    return [*arguments, *defaults.values()]
                values = {**defaults, **named}
                if len(values) == len(defaults) and required <= named.keys():
                    return [*arguments, *values.values()]
            return function(*arguments, **named)  # raises the TypeError of a call that does not fit

        return in_order

    def flat(self, version: Callable[..., Any]) -> Callable[..., Any]:
        """Return a version, which takes some of the arguments, as a function of all fields."""
        accepted = inspect.signature(version).parameters
        kinds = {name: parameter.kind for name, parameter in accepted.items()}
        is_flat = not any(parameter.record or parameter.is_keyword for parameter in self.parameters)
        if (is_flat and [*kinds] == [field.name for field in self.fields]) or _ANY_NUMBER in kinds.values():
            return version
        ends = accumulate(len(parameter.fields) for parameter in self.parameters)
        fields_of = {
            parameter.name: (parameter, slice(end - len(parameter.fields), end))
            for parameter, end in zip(self.parameters, ends, strict=True)
            if parameter.name in kinds
        }
        in_order = [name for name in takewhile(fields_of.__contains__, kinds) if kinds[name] is not _KEYWORD_ONLY]
        by_name = [name for name in fields_of if name not in in_order]
        passed = [fields_of[name] for name in (*in_order, *by_name)]
        records = [
            (at, functools.partial(tuple.__new__, parameter.record), parameter.is_optional)
            for at, (parameter, _) in enumerate(passed)
            if parameter.record is not None
        ]
        pick = _picker([fields if parameter.record is not None else fields.start for parameter, fields in passed])
        num_in_order = len(in_order)

        def call(*fields: Any) -> Any:
            return version(*pick(fields))

        def call_with_records(*fields: Any) -> Any:
            values = [*pick(fields)]
            for at, record, is_optional in records:
                values[at] = None if is_optional and values[at][0] is None else record(values[at])
            if not by_name:
                return version(*values)
            return version(*values[:num_in_order], **dict(zip(by_name, values[num_in_order:], strict=True)))

        return _named_like(version, call_with_records if records or by_name else call)

    def packed(self, values: Sequence[Any]) -> tuple[bytes, torch.dtype | None] | None:
        """Return the fields as C struct, and the element type; None if C does not support a dtype."""
        element: torch.dtype | None = None
        has_floats = False  # whether a wide tensor is float32
        members: list[int | float] = []
        for (kind, dtype, choices), value in zip(self._packed, values, strict=True):
            if value is None:
                members += _NO_TENSOR
            elif kind is Tensor:
                stored, shape = value.dtype, value.shape
                code = CODES.get(stored, 0)
                if dtype is _WIDE and stored is torch.float32:
                    has_floats, code = True, WIDE_CODE
                elif dtype is None or dtype is _WIDE:
                    element = element or stored
                    if stored is not element:
                        return None
                elif dtype is not stored and dtype is not _ANY:
                    return None
                if len(shape) > _DIMENSIONS:
                    return None
                missing = _MISSING[len(shape)]
                members += (_data_ptr(value), *shape, *missing, *value.stride(), *missing, code)
            elif kind is not str:
                members.append(value)
            elif choices is not None:
                members.append(choices.index(value))
        return self._layout.pack(*members), torch.float32 if element is None and has_floats else element


def _unwrapped(annotation: Any) -> tuple[Any, list[Any], bool]:
    """Return an annotation's type, its marks, and whether it may be None."""
    marks: list[Any] = []
    is_optional = False
    while True:
        if get_origin(annotation) is Annotated:
            marks += annotation.__metadata__
            annotation = annotation.__origin__
        elif get_origin(annotation) in (Union, UnionType):
            (annotation,) = (kind for kind in get_args(annotation) if kind is not type(None))
            is_optional = True
        else:
            return annotation, marks, is_optional


@functools.cache
def _fields_of(record: Any, is_optional: bool = False, is_written: bool = False) -> tuple[Field, ...]:
    hints = get_type_hints(record, include_extras=True)
    return tuple(Field.of(name, hints[name], is_optional, is_written) for name in record._fields)


def _codes(field: Field) -> str:
    if field.kind is Tensor:
        return f"{len(_NO_TENSOR)}q"
    return "" if field.c_declaration is None else "d" if field.kind is float else "q"


def _picker(indices: Sequence[Any]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that returns some items and slices of a sequence."""
    if len(indices) > 1:
        return itemgetter(*indices)
    (index,) = indices
    return lambda values: (values[index],)


def _named_like(function: Callable[..., Any], closure: Any) -> Any:
    """Give a closure the name, file and line of a function, in tracebacks, profiles and debuggers."""
    if isinstance(function, FunctionType):
        code, closure_code = function.__code__, closure.__code__
        units = len(closure_code.co_code) // 2
        # all of it is at the function's first line: for each 8 units, no columns and 0 lines on (CPython, locations.md)
        lines = b"".join(bytes((0xE8 | min(units - at, 8) - 1, 0)) for at in range(0, units, 8))
        closure.__code__ = closure_code.replace(
            co_name=code.co_name, co_qualname=code.co_qualname, co_filename=code.co_filename,
            co_firstlineno=code.co_firstlineno, co_linetable=lines,
        )  # fmt: skip
    return functools.update_wrapper(closure, function)


NAMESPACE = "graphdecode"
P = ParamSpec("P")
NativeVersion: TypeAlias = Callable[..., NativeCall | NativeSequence | None]
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


class Versions(NamedTuple):
    """The versions of one operator, with flattened arguments.

    Attributes:
        torch: computes with torch operators.
        triton: launches the Triton kernel; the torch version if there is none.
        native: returns the compiled kernel over these tensors, or None if it does not support them; None: no kernel.
    """

    torch: Callable[..., None]
    triton: Callable[..., None]
    native: NativeVersion | None


_VERSIONS: dict[Any, Versions] = {}  # filled while operators are imported


def operator(
    *,
    triton_version: Callable[..., Any] | None = None,
    is_compiled: Callable[..., bool] | bool = False,
    constants: dict[str, int] | None = None,
    keys: tuple[str, ...] = (),
    parts: Callable[..., Sequence[tuple[str, Sequence[Any]]]] | None = None,
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return a decorator that registers a function as an operator, and replaces it by the callers' function.

    Args:
        triton_version: version for CUDA tensors, with the same arguments.
        is_compiled: takes some of the arguments and returns whether the C kernel supports them, apart from dtypes;
            True: always; False: no C kernel.
        constants: integers declared to C by name.
        keys: further dispatch keys of the torch version (packed CPU weights have one).
        parts: returns operators, by name with flattened arguments, that together do the same; they run instead if all
            of them have compiled kernels.
    """

    def registered(function: Callable[P, None]) -> Callable[P, None]:
        signature = Signature(function)
        on_torch = signature.flat(function)
        native: NativeVersion | None = None
        if is_compiled is not False:
            library.declare(signature, (constants or {}) | signature.choices)
            native = _native(signature, None if is_compiled is True else signature.flat(is_compiled))
        if parts is not None:
            native = _sequence(signature, signature.flat(parts))
        on_host = on_torch if native is None else _native_or_torch(signature, native, on_torch)
        on_device = on_torch if triton_version is None else signature.flat(triton_version)
        _LIBRARY.define(signature.schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", *keys):
            _LIBRARY.impl(signature.name, on_host, key)
        _LIBRARY.impl(
            signature.name, on_torch if triton_version is None else _on_its_device(signature, on_device), "CUDA"
        )
        # it only writes into its arguments, so the fake does nothing
        _LIBRARY.impl(signature.name, lambda *_: None, "Meta")
        overload = getattr(getattr(torch.ops, NAMESPACE), signature.name).default
        _VERSIONS[overload] = Versions(on_torch, on_device, native)
        return signature.caller(overload)

    return registered


def _on_its_device(signature: Signature, launches: Callable[..., None]) -> Callable[..., None]:
    """Make the tensors' device current; unlike torch's operators, Triton launches on the current device."""
    at = next(at for at, field in enumerate(signature.fields) if field.kind is Tensor and not field.is_optional)

    def launch(*arguments: Any) -> None:
        device = arguments[at].device
        if device.index == torch.cuda.current_device():
            launches(*arguments)
        else:
            with torch.cuda.device(device):
                launches(*arguments)

    return _named_like(launches, launch)


def _native(signature: Signature, is_served: Callable[..., bool] | None) -> NativeVersion:
    name, part, has_element, packed = signature.name, signature.part, signature.has_element, signature.packed

    def native(*arguments: Any) -> NativeCall | None:
        if is_served is not None and not is_served(*arguments):
            return None
        args_struct = packed(arguments)
        if args_struct is None or (has_element and args_struct[1] not in library.ELEMENTS):
            return None
        if library.library(args_struct[1], part) is None:
            return None
        return NativeCall(library.kernel(name, args_struct[1]), args_struct[0], arguments)

    return _named_like(signature.function, native)


def _sequence(signature: Signature, parts: Callable[..., Sequence[tuple[str, Sequence[Any]]]]) -> NativeVersion:
    def sequence(*arguments: Any) -> NativeSequence | None:
        calls: list[NativeCall] = []
        for name, values in parts(*arguments):
            native = versions(name).native
            call = None if native is None else native(*values)
            if not isinstance(call, NativeCall):
                return None
            calls.append(call)
        return NativeSequence(calls)

    return _named_like(signature.function, sequence)


def _native_or_torch(signature: Signature, native: NativeVersion, on_torch: Callable[..., None]) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        call = native(*arguments)
        if call is None:
            on_torch(*arguments)
        else:
            call()

    return _named_like(signature.function, run)


def versions(name: str) -> Versions:
    """Return the versions of an imported operator."""
    return _VERSIONS[getattr(getattr(torch.ops, NAMESPACE), name).default]


def is_registered(registered: Any) -> bool:
    """Whether an operator was registered here; these write into their arguments and return nothing."""
    return registered in _VERSIONS


def bind(registered: Any, *arguments: Any) -> Callable[[], Any] | None:
    """Return a function that runs an operator over these CPU tensors, natively if supported; None if it is not ours.

    It bypasses the dispatcher, which costs more than some operators.
    """
    version = _VERSIONS.get(registered)
    if version is None:
        return None
    call = None if version.native is None else version.native(*arguments)
    return call or functools.partial(version.torch, *arguments)
