"""One key of a configuration: its section in the file, what it takes, what it means.

A configuration is a frozen dataclass whose fields are made by `key`: the field is all there is to know of the key. The
reader and the writer of files, the checks and the reference are made from these fields.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphdecode.errors import ConfigError, shown

_MOST_NUMBER = 1e30  # an integer of a file may be too large to become a float


class Option(NamedTuple):
    """An option of commands that gives a field.

    Attributes:
        help: of the option.
        flags: left out: the field's name.
        metavar: what stands for the value in the help.
    """

    help: str
    flags: tuple[str, ...] = ()
    metavar: str | None = None


@dataclass(frozen=True)
class Values:
    """What a key takes.

    Attributes:
        expected: in words, as in "must be ...".
        accepts: whether a value is one of these.
        example: one of them, in TOML, for keys whose default is to be left out.
    """

    expected: str
    accepts: Callable[[Any], bool]
    example: str = ""


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        section: of the file.
        name: in the file.
        field: of the dataclass.
        default: None means that the key is left out.
        values: what it takes.
        meaning: one sentence or two, for the reference.
    """

    section: str
    name: str
    field: str
    default: Any
    values: Values
    meaning: str

    def check(self, value: Any, where: str | None = None) -> None:
        """Refuse a value that the key does not take.

        Raises:
            ConfigError: naming the key, or `where` it stands, the value and what it must be.
        """
        if not self.values.accepts(value):
            raise ConfigError(f"{where or self.name} must be {self.values.expected}, got {shown(value)}")


def key(
    section: str, default: Any, values: Values, meaning: str, *, name: str | None = None, flag: str | None = None
) -> Any:
    """Return a dataclass field that is a key, and can be an option of commands.

    Args:
        section: of the file.
        default: of the field.
        values: what the key takes.
        meaning: for the reference.
        name: in the file, where it differs from the field's.
        flag: of the option, where it differs from the field's name.
    """
    first = meaning.partition(". ")[0].rstrip(".")
    taken = f" Takes {values.expected.removeprefix('None or ')}."
    if isinstance(default, (bool, tuple)):
        taken = " May be repeated." if isinstance(default, tuple) else ""
    option = Option(f"{first}.{taken}", () if flag is None else (flag,))
    told = {"section": section, "name": name, "values": values, "meaning": meaning, "option": option}
    return dataclasses.field(default=default, metadata=told)


def keys_of(config: Any) -> tuple[Key, ...]:
    """Return the keys of a configuration (class or instance), in the order of its fields."""
    return tuple(
        Key(told["section"], told["name"] or field.name, field.name, field.default, told["values"], told["meaning"])
        for field in dataclasses.fields(config)
        if (told := field.metadata)
    )


def integer(low: int, high: int = 2**31 - 1) -> Values:
    """Return the integers of a range; a bool is none."""
    return Values(f"an integer in {low}..{high}", lambda value: _is_integer(value) and low <= value <= high)


def long_integer() -> Values:
    """Return the integers of 64 bits; a bool is none."""
    return Values("an integer in -2^63..2^63-1", integer(-(2**63), 2**63 - 1).accepts)


def fraction() -> Values:
    """Return the numbers above 0 and up to 1."""
    return Values(
        "a number above 0 and at most 1",
        lambda value: (_is_integer(value) or isinstance(value, float)) and 0 < value <= 1,
    )


def number(low: float) -> Values:
    """Return the finite numbers from some value on."""
    return Values(
        f"a number >= {low:g}",
        lambda value: (_is_integer(value) or isinstance(value, float)) and low <= value <= _MOST_NUMBER,
    )


def texts() -> Values:
    """Return the lists of texts that are not empty."""
    return Values(
        "a list of texts",
        lambda value: isinstance(value, (list, tuple)) and all(isinstance(item, str) and item for item in value),
    )


def boolean() -> Values:
    """Return True and False."""
    return Values("true or false", lambda value: isinstance(value, bool))


def one_of(*choices: str) -> Values:
    """Return some words."""
    expected = ("one of " if len(choices) > 1 else "") + ", ".join(map(repr, choices))
    return Values(expected, lambda value: isinstance(value, str) and value in choices)


def none_or(values: Values, example: str) -> Values:
    """Return None, which in a file is a key left out, and some other values."""
    return Values(f"None or {values.expected}", lambda value: value is None or values.accepts(value), example)


def auto_or(values: Values) -> Values:
    """Return "auto" and some other values."""
    expected = f"'auto' or {values.expected}"
    return Values(expected, lambda value: (isinstance(value, str) and value == "auto") or values.accepts(value))


def matching(pattern: str, expected: str) -> Values:
    """Return the words that a pattern matches whole."""
    return Values(expected, lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None)


def integers() -> Values:
    """Return the lists of at least one integer >= 1."""
    return Values(
        "a list of at least one integer >= 1",
        lambda value: isinstance(value, (list, tuple)) and bool(value) and all(map(integer(1).accepts, value)),
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
