"""Registration of `torch.library` operators.

The decorated function defines the operator: its annotations are the signature, its docstring describes the arguments,
and its body computes with torch operators, as the reference of the tests. The schema, the dispatcher's argument order,
the callers' function and the C struct of a compiled kernel are derived from the signature. A NamedTuple is one argument
of the function, and one argument per field everywhere else.

An operator may have a Triton version, for CUDA tensors, and a C kernel of the same name, for CPUs with a C compiler.
Registered operators can be recorded on a CPU, traced by FakeTensor and checked by `torch.library.opcheck`.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from inspect import Parameter as Given
from inspect import signature
from string import ascii_lowercase
from types import UnionType
from typing import Annotated, Any, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

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

_data_ptr = Tensor.__base__.data_ptr  # type: ignore[union-attr]  # `Tensor`'s is patched while a step is observed
_DIMENSIONS = 4  # most dimensions of compiled kernels' tensors
_NO_TENSOR = (0,) * (2 + 2 * _DIMENSIONS)
_MISSING = tuple((0,) * (_DIMENSIONS - given) for given in range(_DIMENSIONS + 1))
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
        kind, marks, may_miss = _unwrapped(annotation)
        dtype = next((mark for mark in marks if isinstance(mark, torch.dtype) or mark in (_ANY, _WIDE)), None)
        choices = next((mark for mark in marks if isinstance(mark, OneOf)), None)
        return cls(name, kind, is_optional or may_miss, is_written or "written" in marks, dtype, choices)

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
    """One argument of the function; `group`: its NamedTuple type, or None."""

    name: str
    fields: tuple[Field, ...]
    group: type | None
    is_optional: bool
    is_keyword: bool

    @classmethod
    def of(cls, given: Given, annotation: Any) -> "Parameter":
        """Read one parameter of a function."""
        kind, marks, is_optional = _unwrapped(annotation)
        is_keyword = given.kind is Given.KEYWORD_ONLY
        if not hasattr(kind, "_fields"):
            return cls(given.name, (Field.of(given.name, annotation),), None, is_optional, is_keyword)
        fields = _fields_of(kind, is_optional, "written" in marks)
        return cls(given.name, fields, kind, is_optional, is_keyword)

    @property
    def spread(self) -> str:
        """Return source code of its fields, given the function's argument."""
        return f"*({self.name} or ({'None, ' * len(self.fields)}))" if self.group else self.name

    def value_of(self, field: Field) -> str:
        """Return source code of one of its fields, given the function's argument."""
        return f"{self.name}.{field.name}" if self.group else field.name

    @property
    def c_declaration(self) -> str:
        """Return the struct's members; a record's members are also members of the struct."""
        members = "".join(field.c_declaration or "" for field in self.fields)
        if self.group is None:
            return members
        return f"    union {{\n    struct {{\n{members}    }};\n    {self.group.__name__} {self.name};\n    }};\n"

    @property
    def gathered(self) -> str:
        """Return source code of the function's keyword argument, given its fields."""
        if self.group is None:
            return f"{self.name}={self.name}"
        whole = f"group_{self.name}({', '.join(field.name for field in self.fields)})"
        return f"{self.name}={f'None if {self.fields[0].name} is None else {whole}' if self.is_optional else whole}"


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
        self._function = function
        hints = get_type_hints(function, include_extras=True)
        given = signature(function).parameters
        self.parameters = [Parameter.of(given[name], hints[name]) for name in given]
        self.fields = [field for parameter in self.parameters for field in parameter.fields]
        names = [field.name for field in self.fields]
        if len(set(names)) < len(names):
            raise ValueError(f"{self.name} has two arguments of one name among {', '.join(names)}")
        self.has_element = any(field.kind is Tensor and field.dtype in (None, _WIDE) for field in self.fields)
        self.module = function.__module__
        self.part = library.part_of(self.module, has_element=self.has_element)
        codes = "".join(_codes(field) for field in self.fields)
        self._layout = struct.Struct(f"@{codes}")

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
        for group in {parameter.group for parameter in self.parameters if parameter.group is not None}:
            members = "".join(field.c_declaration or "" for field in _fields_of(group))
            records[group.__name__] = f"typedef struct {{\n{members}}} {group.__name__};\n"
        return records

    @property
    def choices(self) -> dict[str, int]:
        """The C constants of string values."""
        return {
            f"{field.name}_{choice}".upper(): place
            for field in self.fields
            for place, choice in enumerate(field.choices or ())
        }

    def face(self, registered: Callable[..., None]) -> Callable[..., None]:
        """Return the callers' function, which has the same arguments and calls the operator."""
        body = "".join(
            f"    if {parameter.value_of(field)} not in choices_{field.name}: "
            f"raise unknown({field.name!r}, {parameter.value_of(field)}, choices_{field.name})\n"
            for parameter in self.parameters
            for field in parameter.fields
            if field.choices
        )
        parameters = ", ".join(
            ("*, " if parameter.is_keyword and not before.is_keyword else "") + parameter.name
            for before, parameter in zip([self.parameters[0], *self.parameters], self.parameters, strict=False)
        )
        spread = ", ".join(parameter.spread for parameter in self.parameters)
        face = self._made(f"def made({parameters}):\n{body}    registered({spread})\n", registered=registered)
        face.__defaults__, face.__kwdefaults__ = self._function.__defaults__, self._function.__kwdefaults__
        return update_wrapper(face, self._function)

    def flat(self, version: Callable[..., Any]) -> Callable[..., Any]:
        """Return a version, which has some of the arguments as keywords, as a function of all fields."""
        taken = signature(version).parameters
        is_flat = not any(parameter.group or parameter.is_keyword for parameter in self.parameters)
        if is_flat and [*taken] == [field.name for field in self.fields]:
            return version
        names = ", ".join(field.name for field in self.fields)
        gathered = ", ".join(parameter.gathered for parameter in self.parameters if parameter.name in taken)
        return self._made(f"def made({names}):\n    return version({gathered})\n", version=version)

    def packed(self, values: Sequence[Any]) -> tuple[bytes, torch.dtype | None] | None:
        """Return the fields as C struct, and the element type; None if C does not support a dtype."""
        element: torch.dtype | None = None
        has_floats = False  # whether a wide tensor is float32
        members: list[int | float] = []
        for (_, kind, _, _, dtype, choices), value in zip(self.fields, values, strict=True):
            if value is None:
                members += _NO_TENSOR
            elif kind is Tensor:
                found, shape = value.dtype, value.shape
                code = CODES.get(found, 0)
                if dtype is _WIDE and found is torch.float32:
                    has_floats, code = True, WIDE_CODE
                elif dtype is None or dtype is _WIDE:
                    element = element or found
                    if found is not element:
                        return None
                elif dtype is not found and dtype is not _ANY:
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

    def _made(self, source: str, **names: Any) -> Any:
        """Compile a function from source text, with the operator's file in tracebacks."""
        names |= {f"group_{parameter.name}": parameter.group for parameter in self.parameters}
        names |= {f"choices_{field.name}": field.choices for field in self.fields}
        names["unknown"] = _unknown_choice
        exec(compile(source, self._function.__code__.co_filename, "exec"), names)
        return names["made"]


def _unwrapped(annotation: Any) -> tuple[Any, list[Any], bool]:
    """Return an annotation's type, its marks, and whether it may be None."""
    marks: list[Any] = []
    is_optional = False
    while True:
        if get_origin(annotation) is Annotated:
            marks += annotation.__metadata__
            annotation = annotation.__origin__
        elif get_origin(annotation) in (Union, UnionType):
            (annotation,) = (given for given in get_args(annotation) if given is not type(None))
            is_optional = True
        else:
            return annotation, marks, is_optional


@functools.cache
def _fields_of(group: Any, is_optional: bool = False, is_written: bool = False) -> tuple[Field, ...]:
    hints = get_type_hints(group, include_extras=True)
    return tuple(Field.of(name, hints[name], is_optional, is_written) for name in group._fields)


def _codes(field: Field) -> str:
    if field.kind is Tensor:
        return f"{len(_NO_TENSOR)}q"
    return "" if field.c_declaration is None else "d" if field.kind is float else "q"


def _unknown_choice(name: str, value: Any, choices: OneOf) -> ValueError:
    return ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


NAMESPACE = "graphdecode"
P = ParamSpec("P")
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
    native: Callable[..., NativeCall | NativeSequence | None] | None


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
        plain = signature.flat(function)
        native: Callable[..., NativeCall | NativeSequence | None] | None = None
        if is_compiled is not False:
            library.declare(signature, (constants or {}) | signature.choices)
            native = functools.partial(_native, signature, None if is_compiled is True else signature.flat(is_compiled))
        if parts is not None:
            native = functools.partial(_sequence, signature.flat(parts))
        on_host = plain if native is None else functools.partial(_run_on_host, native, plain)
        on_device = plain if triton_version is None else signature.flat(triton_version)
        _LIBRARY.define(signature.schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", *keys):
            _LIBRARY.impl(signature.name, on_host, key)
        _LIBRARY.impl(signature.name, plain if triton_version is None else _where_its_tensors_are(on_device), "CUDA")
        # it only writes into its arguments, so the fake does nothing
        _LIBRARY.impl(signature.name, lambda *_: None, "Meta")
        overload = getattr(getattr(torch.ops, NAMESPACE), signature.name).default
        _VERSIONS[overload] = Versions(plain, on_device, native)
        return signature.face(overload)

    return registered


def _where_its_tensors_are(launches: Callable[..., None]) -> Callable[..., None]:
    """Make the tensors' device current; unlike torch's operators, Triton launches on the current device."""

    def launched(*arguments: Any) -> None:
        with torch.cuda.device(next(given.device for given in arguments if isinstance(given, torch.Tensor))):
            launches(*arguments)

    return launched


def _native(signature: Signature, serves: Callable[..., bool] | None, *arguments: Any) -> NativeCall | None:
    packed = None if serves is not None and not serves(*arguments) else signature.packed(arguments)
    if packed is None or (signature.has_element and packed[1] not in library.ELEMENTS):
        return None
    if library.library(packed[1], signature.part) is None:
        return None
    return NativeCall(library.kernel(signature.name, packed[1]), packed[0], arguments)


def _sequence(parts: Callable[..., Sequence[tuple[str, Sequence[Any]]]], *arguments: Any) -> NativeSequence | None:
    calls: list[NativeCall] = []
    for name, given in parts(*arguments):
        native = versions(name).native
        call = None if native is None else native(*given)
        if not isinstance(call, NativeCall):
            return None
        calls.append(call)
    return NativeSequence(calls)


def _run_on_host(
    native: Callable[..., NativeCall | NativeSequence | None], otherwise: Callable[..., None], *arguments: Any
) -> None:
    call = native(*arguments)
    if call is None:
        otherwise(*arguments)
    else:
        call()


def versions(name: str) -> Versions:
    """Return the versions of an imported operator."""
    return _VERSIONS[getattr(getattr(torch.ops, NAMESPACE), name).default]


def is_own(registered: Any) -> bool:
    """Whether an operator was registered here; these write into their arguments and return nothing."""
    return registered in _VERSIONS


def bind(registered: Any, *arguments: Any) -> Callable[[], Any] | None:
    """Return a function that runs an operator over these CPU tensors, natively if supported; None if it is not ours.

    It bypasses the dispatcher, which costs more than some operators.
    """
    found = _VERSIONS.get(registered)
    if found is None:
        return None
    call = None if found.native is None else found.native(*arguments)
    return call or functools.partial(found.torch, *arguments)
