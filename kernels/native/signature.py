"""An operation's signature, stated once: the annotations of its function, read into what others are made of.

From one signature come the operator's schema, the order in which its arguments go through torch's dispatcher, the
function that callers see, and the C struct that a compiled kernel is given. A NamedTuple of tensors is one argument of
the function, and one argument for each field everywhere else.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from inspect import Parameter as Given
from inspect import signature
from string import ascii_lowercase
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

T = TypeVar("T")


class OneOf(tuple[str, ...]):
    """The values that a string may have; C is given the place of the value."""


Written = Annotated[T, "written"]  # the operation writes into it
Int32 = Annotated[Tensor, torch.int32]
Int64 = Annotated[Tensor, torch.int64]
Float32 = Annotated[Tensor, torch.float32]
Bfloat16 = Annotated[Tensor, torch.bfloat16]
AnyElement = Annotated[Tensor, "any"]  # a tensor whose dtype need not be that of the other unmarked ones
Wide = Annotated[Tensor, "wide"]  # of their dtype, or float32 beside narrower ones, which C is told

_DIMENSIONS = 4  # of the tensors that compiled kernels take
_NO_TENSOR = (0,) * (2 + 2 * _DIMENSIONS)
_MISSING = tuple((0,) * (_DIMENSIONS - given) for given in range(_DIMENSIONS + 1))
_C_TYPES = {torch.int32: "int32_t", torch.int64: "int64_t", torch.float32: "float", torch.bfloat16: "uint16_t"}
CODES = {torch.float8_e4m3fn: 1, torch.int8: 2}  # types of 8 bits that C tells apart; the others are 0
WIDE_CODE = 3  # of a `Wide` tensor in float32


class Field(NamedTuple):
    """One argument as the dispatcher and C see it.

    Attributes:
        name: as in the function, or as in the NamedTuple that it is part of.
        kind: Tensor, int, float, bool or str.
        is_optional: whether it may be None; tensors alone.
        is_written: whether the operation writes into it.
        dtype: of a tensor, if there is only one; None for the element type that all such tensors share; a mark where it
            need not be that: "any" or "wide".
        choices: of a string.
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
        dtypes = [mark for mark in marks if isinstance(mark, torch.dtype) or mark in ("any", "wide")]
        choices = [mark for mark in marks if isinstance(mark, OneOf)]
        return cls(
            name,
            kind,
            is_optional or may_miss,
            is_written or "written" in marks,
            dtypes[0] if dtypes else None,
            choices[0] if choices else None,
        )

    @property
    def c_declaration(self) -> str | None:
        """Return the struct member; None for what C is not given."""
        if self.kind is Tensor:
            const = "" if self.is_written else "const "
            element = "void" if not isinstance(self.dtype, torch.dtype) else _C_TYPES[self.dtype]
            return f"    TENSOR({const}{element}) {self.name};\n"
        if self.kind is str and self.choices is None:
            return None
        return f"    {'double' if self.kind is float else 'int64_t'} {self.name};\n"


@dataclass(frozen=True)
class Parameter:
    """One argument as the function has it; `group` is the NamedTuple that it is, or None."""

    name: str
    fields: tuple[Field, ...]
    group: type | None
    is_keyword: bool

    @classmethod
    def of(cls, given: Given, annotation: Any) -> "Parameter":
        """Read one parameter of a function."""
        kind, marks, is_optional = _unwrapped(annotation)
        is_keyword = given.kind is Given.KEYWORD_ONLY
        if not hasattr(kind, "_fields"):
            return cls(given.name, (Field.of(given.name, annotation),), None, is_keyword)
        hints = get_type_hints(kind, include_extras=True)
        fields = tuple(Field.of(name, hints[name], is_optional, "written" in marks) for name in kind._fields)
        return cls(given.name, fields, kind, is_keyword)

    @property
    def spread(self) -> str:
        """Return the source of its fields, given the function's argument."""
        return f"*({self.name} or ({'None, ' * len(self.fields)}))" if self.group else self.name

    def value_of(self, field: Field) -> str:
        """Return the source of one of its fields, given the function's argument."""
        return f"{self.name}.{field.name}" if self.group else field.name

    @property
    def gathered(self) -> str:
        """Return the source of the function's argument, given its fields."""
        if self.group is None:
            return f"{self.name}={self.name}" if self.is_keyword else self.name
        whole = f"group_{self.name}({', '.join(field.name for field in self.fields)})"
        first = self.fields[0]
        value = f"None if {first.name} is None else {whole}" if first.is_optional else whole
        return f"{self.name}={value}" if self.is_keyword else value


class Signature:
    """What the annotations of one function say.

    Attributes:
        name: of the function, the operator and the kernel.
        parameters: as the function has them.
        fields: the same one by one, as the dispatcher and C have them.
        has_element: whether there are tensors that share an element type.

    Raises:
        ValueError: two fields have the same name.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__.lstrip("_")  # where callers see another function around it
        self._function = function
        hints = get_type_hints(function, include_extras=True)
        given = signature(function).parameters
        self.parameters = [Parameter.of(given[name], hints[name]) for name in given]
        self.fields = [field for parameter in self.parameters for field in parameter.fields]
        names = [field.name for field in self.fields]
        if len(set(names)) < len(names):
            raise ValueError(f"{self.name} has two arguments of one name among {', '.join(names)}")
        self.has_element = any(field.kind is Tensor and field.dtype in (None, "wide") for field in self.fields)
        codes = "".join(_codes(field) for field in self.fields)
        self._layout = struct.Struct(f"@{codes}")

    @property
    def schema(self) -> str:
        """Return the operator's schema in torch's language."""
        letters = iter(ascii_lowercase)
        arguments = []
        for field in self.fields:
            written = f"({next(letters)}!)" if field.is_written else ""
            arguments.append(f"{field.kind.__name__}{written}{'?' if field.is_optional else ''} {field.name}")
        return f"{self.name}({', '.join(arguments)}) -> ()"

    @property
    def c_struct(self) -> str:
        """Return the declaration of the struct that the compiled kernel is given."""
        members = "".join(field.c_declaration or "" for field in self.fields)
        return f"typedef struct {{\n{members}}} {self.name}_args;\n"

    @property
    def choices(self) -> dict[str, int]:
        """What the values of strings are in C, by the names that they have there."""
        return {
            f"{field.name}_{choice}".upper(): place
            for field in self.fields
            for place, choice in enumerate(field.choices or ())
        }

    def face(self, registered: Callable[..., None]) -> Callable[..., None]:
        """Return the function that callers see: it takes what the function takes and calls the operator."""
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
        """Return a version of the function that takes its fields one by one, as the dispatcher hands them over."""
        if not any(parameter.group or parameter.is_keyword for parameter in self.parameters):
            return version
        names = ", ".join(field.name for field in self.fields)
        gathered = ", ".join(parameter.gathered for parameter in self.parameters)
        return self._made(f"def made({names}):\n    return version({gathered})\n", version=version)

    def packed(self, values: Sequence[Any]) -> tuple[bytes, torch.dtype | None] | None:
        """Return the fields as the C struct, and their element type; None where a dtype is not what C expects."""
        element: torch.dtype | None = None
        has_floats = False  # among the wide ones
        members: list[int | float] = []
        for (_, kind, _, _, dtype, choices), value in zip(self.fields, values, strict=True):
            if value is None:
                members += _NO_TENSOR
            elif kind is Tensor:
                code = CODES.get(value.dtype, 0)
                if dtype == "wide" and value.dtype == torch.float32:
                    has_floats, code = True, WIDE_CODE
                elif dtype is None or dtype == "wide":
                    element = element or value.dtype
                    if value.dtype != element:
                        return None
                elif dtype not in (value.dtype, "any"):
                    return None
                shape = value.shape
                rank = len(shape)
                if rank > _DIMENSIONS:
                    return None
                missing = _MISSING[rank]
                members += (value.data_ptr(), *shape, *missing, *value.stride(), *missing, code)
            elif kind is not str:
                members.append(value)
            elif choices is not None:
                members.append(choices.index(value))
        return self._layout.pack(*members), torch.float32 if element is None and has_floats else element

    def _made(self, source: str, **names: Any) -> Any:
        """Return the function of a source text; its frames count as the operation's file."""
        names |= {f"group_{parameter.name}": parameter.group for parameter in self.parameters}
        names |= {f"choices_{field.name}": field.choices for field in self.fields}
        names["unknown"] = _unknown_choice
        exec(compile(source, self._function.__code__.co_filename, "exec"), names)
        return names["made"]


def _unwrapped(annotation: Any) -> tuple[Any, list[Any], bool]:
    """Return what an annotation is about, its marks, and whether it may be None."""
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


def _codes(field: Field) -> str:
    if field.kind is Tensor:
        return f"{len(_NO_TENSOR)}q"
    return "" if field.c_declaration is None else "d" if field.kind is float else "q"


def _unknown_choice(name: str, value: Any, choices: OneOf) -> ValueError:
    return ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")
