"""Keys of configurations: section in the file, values and meaning; reading and writing of files in TOML.

A configuration is a frozen dataclass whose fields are made by `key`, from which reading and writing of files, checks
and the reference are derived.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

from graphdecode.errors import ConfigError, cause, resembling, shown

_MOST_INTEGER = 2**31 - 1
_MOST_NUMBER = 1e30  # well within float32, the dtype of slots


class Option(NamedTuple):
    """A command-line option for a field."""

    help: str
    flags: tuple[str, ...] = ()  # default: the field's name
    metavar: str | None = None  # shown for the value in the help; default: its type
    default: str | None = None  # in the help; None: it is not shown


@dataclass(frozen=True)
class Values:
    """The values that a key accepts."""

    expected: str  # in words, as in "must be ..."
    accepts: Callable[[Any], bool]
    example: str = ""  # in TOML, for keys without a default
    metavar: str | None = None  # in a command's help; default: its type
    limits: str = ""  # range of numbers, for a command's help


@dataclass(frozen=True)
class Key:
    """One key."""

    section: str  # in the file
    name: str  # in the file
    field: str  # in the dataclass
    default: Any  # None: the key is left out
    values: Values
    meaning: str  # one sentence or two, for the reference

    def check(self, value: Any, where: str | None = None) -> None:
        """Raise a ConfigError, which names `where` or the key, for a value that the key does not accept."""
        if not self.values.accepts(value):
            raise ConfigError(f"{where or self.name} must be {self.values.expected}, got {shown(value)}")


def key(
    section: str,
    default: Any,
    values: Values,
    meaning: str,
    *,
    name: str | None = None,
    flag: str | None = None,
    help: str | None = None,
) -> Any:
    """Return a dataclass field for a key; `name` (in files), `flag` and `help` (of commands) override defaults."""
    shown_help = help or meaning.partition(". ")[0].rstrip(".") + "."
    limits = "May be repeated." if isinstance(default, tuple) else values.limits
    has_default = default is not None and not isinstance(default, (bool, tuple))
    option = Option(
        f"{shown_help} {limits}".rstrip(),
        () if flag is None else (flag,),
        None if isinstance(default, bool) else values.metavar,
        str(default) if has_default else None,
    )
    metadata = {"section": section, "name": name, "values": values, "meaning": meaning, "option": option}
    return dataclasses.field(default=default, metadata=metadata)


def keys_of(config: Any) -> tuple[Key, ...]:
    """Return the keys of a configuration's class or instance."""
    return tuple(
        Key(
            metadata["section"],
            metadata["name"] or field.name,
            field.name,
            field.default,
            metadata["values"],
            metadata["meaning"],
        )
        for field in dataclasses.fields(config)
        if (metadata := field.metadata)
    )


def check_keys(config: Any) -> None:
    """Make numbers Python's own and lists tuples in a new configuration; raise ConfigError for an invalid value."""
    for each in keys_of(config):
        value = getattr(config, each.field)
        value = [_as_python(item) for item in value] if isinstance(value, (list, tuple)) else _as_python(value)
        each.check(value)
        object.__setattr__(config, each.field, tuple(value) if isinstance(value, list) else value)


def _as_python(value: Any) -> Any:
    """Return a number, numpy's for example, as Python's, which can be written as TOML; anything else as it is."""
    if type(value) in (bool, int, float) or not isinstance(value, Real):
        return value
    try:
        return int(value) if isinstance(value, Integral) else float(value)
    except OverflowError:  # a fraction beyond all floats, which no key takes
        return value


def is_integer(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether a value is an integer, numpy's too, in a range."""
    return isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high


def is_number(value: Any, low: float = -_MOST_NUMBER, high: float = _MOST_NUMBER) -> bool:
    """Whether a value is a finite number in a range."""
    # an integer may be too large to become a float
    return isinstance(value, Real) and not isinstance(value, bool) and bool(low <= value <= high)  # type: ignore[operator]


BOOLEAN = Values("true or false", lambda value: isinstance(value, bool))
LONG_INTEGER = Values("an integer in -2^63..2^63-1", lambda value: is_integer(value, -(2**63), 2**63 - 1))
FRACTION = Values(
    "a number above 0 and at most 1", lambda value: is_number(value, 0, 1) and value > 0, limits="Above 0, at most 1."
)
INTEGERS = Values(
    "a list of at least one integer >= 1",
    lambda value: isinstance(value, (list, tuple)) and bool(value) and all(is_integer(each, 1) for each in value),
)


def integer(low: int, high: int = _MOST_INTEGER) -> Values:
    """Return the integers of a range; bools are not accepted."""
    limits = f"At least {low}." if high == _MOST_INTEGER else f"{low} to {high}."
    return Values(f"an integer in {low}..{high}", lambda value: is_integer(value, low, high), limits=limits)


def number(low: float, high: float = _MOST_NUMBER) -> Values:
    """Return the finite numbers of a range."""
    expected = f"a number >= {low:g}" if high == _MOST_NUMBER else f"a number in [{low:g}, {high:g}]"
    return Values(expected, lambda value: is_number(value, low, high), limits=f"At least {low:g}.")


def texts(metavar: str = "TEXT") -> Values:
    """Return the lists of non-empty texts."""
    return Values(
        "a list of texts",
        lambda value: isinstance(value, (list, tuple)) and all(isinstance(item, str) and item for item in value),
        metavar=metavar,
    )


def one_of(*choices: str) -> Values:
    """Return the values of an enumeration."""
    expected = ("one of " if len(choices) > 1 else "") + ", ".join(map(repr, choices))
    return Values(expected, lambda value: isinstance(value, str) and value in choices, metavar="|".join(choices))


def none_or(values: Values, example: str = "") -> Values:
    """Return the values, and None (a key left out in a file)."""
    expected = f"None or {values.expected}"
    return replace(values, expected=expected, accepts=lambda v: v is None or values.accepts(v), example=example)


def auto_or(values: Values) -> Values:
    """Return the values, and "auto"."""
    expected = f"'auto' or {values.expected}"
    return replace(values, expected=expected, accepts=lambda v: (type(v) is str and v == "auto") or values.accepts(v))


def matching(pattern: str, expected: str, metavar: str | None = None) -> Values:
    """Return the texts that match a whole pattern."""
    return Values(expected, lambda v: isinstance(v, str) and bool(re.fullmatch(pattern, v)), metavar=metavar)


class ConfigDocument:
    """The checked keys of a configuration in TOML, or of a dict of its sections.

    `text` is the file's, for line numbers in errors; `values` is section -> field of the configuration -> value.
    Unknown keys and invalid values are a ConfigError.
    """

    def __init__(self, name: str, document: Mapping[str, Any], keys: Iterable[Key], text: str = "") -> None:
        self._name, self._text = name, text
        sections: dict[str, dict[str, Key]] = {}
        for key in keys:
            sections.setdefault(key.section, {})[key.name] = key
        self.values: dict[str, dict[str, Any]] = {name: {} for name in sections}
        for section, entries in document.items():
            if section not in sections or not isinstance(entries, Mapping):
                known = ", ".join(f"[{name}]" for name in sections)
                unknown = f"unknown section or key {shown(section)}"
                unknown += _section_hint(section, sections) or resembling(section, sections)
                raise ConfigError(f"{self._location(section)}: {unknown}; known: {known}")
            for name, value in entries.items():
                where = f"{self._location(section, name)}: [{section}] {name}"
                if name not in sections[section]:
                    hint = _section_hint(name, sections) or resembling(name, sections[section])
                    unknown = f"unknown key{hint}"
                    raise ConfigError(f"{where}: {unknown}; known: {', '.join(sections[section])}")
                key = sections[section][name]
                key.check(value, where)
                self.values[section][key.field] = value

    @classmethod
    def read(cls, path: str | Path, keys: Iterable[Key]) -> ConfigDocument:
        """Read a file; raises ConfigError if it cannot be used."""
        try:
            text = Path(path).read_text(encoding="utf-8")
            return cls(str(path), tomllib.loads(text), keys, text)
        except ConfigError:
            raise
        except RecursionError as error:
            raise ConfigError(f"{path}: it is nested too deeply") from error
        except (OSError, ValueError) as error:  # not UTF-8, not TOML, or a number with thousands of digits
            raise ConfigError(f"{path}: {cause(error)}") from error

    def blamed(self, error: ConfigError) -> ConfigError:
        """Return an error about several keys, with its location in the document."""
        name = str(error).partition(" ")[0]
        section = next((section for section, values in self.values.items() if name in values), "")
        return ConfigError(f"{self._location(section, name)}: {error}")

    def _location(self, section: str, name: str | None = None) -> str:
        return f"{self._name}{_line_of(self._text, section, name)}"


def _section_hint(name: str, sections: Mapping[str, Mapping[str, Key]]) -> str:
    """Return in which section a key is that stands in none, or in another one."""
    return next((f"; it is a key of [{section}]" for section, keys in sections.items() if name in keys), "")


def written(config: Any, keys: Iterable[Key]) -> str:
    """Return the text of a file with some of a configuration's keys; None is left out."""
    lines: list[str] = []
    section = None
    for key in keys:
        if key.section != section:
            lines += [""] * (section is not None) + [f"[{key.section}]"]
            section = key.section
        value = getattr(config, key.field)
        if value is not None:
            lines.append(f"{key.name} = {toml_value(value)}")
    return "\n".join([*lines, ""])


def toml_value(value: Any) -> str:
    """Return a value in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):  # JSON's escapes are TOML's, except for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return str(value)


def _line_of(text: str, section: str, name: str | None) -> str:
    """Return `:line` of a section or of a key in it, or "" if it was not found."""
    target = re.compile(rf"\s*\"?{re.escape(section if name is None else name)}\"?\s*[.=]")
    current = None
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\s*([\w.-]+)\s*\]", line)
        if header:
            current = header.group(1)
            if name is None and current == section:
                return f":{number}"
        elif current == (section if name is not None else None) and target.match(line):
            return f":{number}"
    return ""
