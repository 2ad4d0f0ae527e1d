"""The bucket configuration file: capacity, buckets, capture and loop, in TOML."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from graphdecode.buckets import BucketLadder

BACKENDS = ("auto", "cuda", "recorded", "eager")
CAPTURE_TIMES = ("startup", "first-use")


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the file, the key and the line or value."""


def _integer(low: int, high: int = 2**31 - 1) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return None if good else f"an integer in {low}..{high}"

    return check


def _one_of(*choices: str) -> Callable[[Any], str | None]:
    return lambda value: None if value in choices else "one of " + ", ".join(repr(choice) for choice in choices)


def _auto_or(check: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    def either(value: Any) -> str | None:
        expected = None if value == "auto" else check(value)
        return None if expected is None else f"'auto' or {expected}"

    return either


def _fraction(value: Any) -> str | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 < value <= 1.0
    return None if good else "a number above 0 and at most 1"


def _batch_sizes(value: Any) -> str | None:
    good = isinstance(value, (list, tuple)) and value and all(_integer(1)(size) is None for size in value)
    return None if good else "a list of at least one integer >= 1"


# section of the file -> key -> (field of BucketConfig, check)
_KEYS: dict[str, dict[str, tuple[str, Callable[[Any], str | None]]]] = {
    "capacity": {
        "max_batch_size": ("max_batch_size", _integer(1, 65536)),
        "max_sequence_length": ("max_sequence_length", _integer(1)),
        "page_size": ("page_size", _integer(1, 65536)),
        "total_num_pages": ("total_num_pages", _auto_or(_integer(1))),
        "memory_fraction": ("memory_fraction", _fraction),
    },
    "buckets": {
        "batch_sizes": ("batch_sizes", _auto_or(_batch_sizes)),
        "max_graphs": ("max_graphs", _integer(1, 65536)),
    },
    "capture": {
        "when": ("capture_when", _one_of(*CAPTURE_TIMES)),
        "backend": ("backend", _one_of(*BACKENDS)),
        "warmup_steps": ("warmup_steps", _integer(1, 1000)),
    },
    "loop": {"steps_per_launch": ("steps_per_launch", _integer(1, 4096))},
}
_FIELD_CHECKS = {field: (key, check) for keys in _KEYS.values() for key, (field, check) in keys.items()}


@dataclass(frozen=True)
class BucketConfig:
    """Capacity and buckets of a runtime; the fields are the keys of the file.

    Args:
        max_batch_size: rows.
        max_sequence_length: prompt plus generated tokens of one sequence; an engine takes the smaller of this and
            what the model was trained for.
        page_size: tokens of one KV cache page.
        total_num_pages: pages of the pool; `"auto"` fills `memory_fraction` of the memory that is free.
        memory_fraction: see `total_num_pages`.
        batch_sizes: the buckets; `"auto"` chooses them; `max_batch_size` is added where it is missing.
        max_graphs: how many buckets `"auto"` may choose.
        capture_when: `"startup"` or `"first-use"` (key `when`).
        backend: `"auto"`, `"cuda"`, `"recorded"` or `"eager"`.
        warmup_steps: eager steps before a capture.
        steps_per_launch: decode steps for each time that the host looks at the tokens. With more than one, the steps
            of a launch are a loop on the device, which ends when all rows are finished; `graphs.report()` says where
            the driver grants none, and why. Requests join and leave between launches only.

    Raises:
        ConfigError: a value that no runtime could work with.
    """

    max_batch_size: int = 64
    max_sequence_length: int = 4096
    page_size: int = 16
    total_num_pages: int | str = "auto"
    memory_fraction: float = 0.9
    batch_sizes: tuple[int, ...] | list[int] | str = "auto"
    max_graphs: int = 16
    capture_when: str = "startup"
    backend: str = "auto"
    warmup_steps: int = 2
    steps_per_launch: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            key, check = _FIELD_CHECKS[field.name]
            expected = check(getattr(self, field.name))
            if expected is not None:
                raise ConfigError(f"{key} must be {expected}, got {getattr(self, field.name)!r}")
        if not isinstance(self.batch_sizes, str):
            object.__setattr__(self, "batch_sizes", tuple(self.batch_sizes))
            too_large = [size for size in self.batch_sizes if size > self.max_batch_size]
            if too_large:
                raise ConfigError(f"batch_sizes must be at most max_batch_size={self.max_batch_size}, got {too_large}")

    @cached_property
    def ladder(self) -> BucketLadder:
        """The buckets that these settings give."""
        if isinstance(self.batch_sizes, str):
            return BucketLadder.auto(self.max_batch_size, self.max_graphs)
        return BucketLadder(self.batch_sizes, self.max_batch_size)

    @classmethod
    def load(cls, path: str | Path) -> BucketConfig:
        """Read a configuration file; keys that it leaves out keep their defaults.

        Raises:
            ConfigError: the file cannot be read, is no TOML, has an unknown key, a wrong type or an impossible value.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
            document = tomllib.loads(text)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
        values: dict[str, Any] = {}
        for section, keys in document.items():
            if section not in _KEYS or not isinstance(keys, dict):
                known = ", ".join(f"[{name}]" for name in _KEYS)
                raise ConfigError(
                    f"{path}{_line_of(text, section)}: unknown section or key {section!r}; known: {known}"
                )
            for key, value in keys.items():
                where = f"{path}{_line_of(text, section, key)}: [{section}] {key}"
                if key not in _KEYS[section]:
                    raise ConfigError(f"{where}: unknown key; known: {', '.join(_KEYS[section])}")
                field, check = _KEYS[section][key]
                expected = check(value)
                if expected is not None:
                    raise ConfigError(f"{where} must be {expected}, got {value!r}")
                values[field] = value
        try:
            return cls(**values)
        except ConfigError as error:
            key = str(error).partition(" ")[0]
            raise ConfigError(f"{path}{_line_of(text, 'buckets', key)}: {error}") from error

    def to_toml(self) -> str:
        """Return the file that `load` reads back to the same configuration."""
        lines: list[str] = []
        for section, keys in _KEYS.items():
            lines.append(f"[{section}]")
            for key, (field, _) in keys.items():
                value = getattr(self, field)
                lines.append(f"{key} = {_toml_value(value)}")
            lines.append("")
        return "\n".join(lines)

    def with_limits(self, **changes: Any) -> BucketConfig:
        """Return a copy with some fields changed, checked like any other configuration."""
        return replace(self, **changes)


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(str(size) for size in value) + "]"
    return str(value)


def _line_of(text: str, section: str, key: str | None = None) -> str:
    """Return `:line` of a section or of a key in it, or nothing where it was written in another form."""
    target = re.compile(rf"\s*\"?{re.escape(section if key is None else key)}\"?\s*[.=]")
    current = None
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\s*([\w.-]+)\s*\]", line)
        if header:
            current = header.group(1)
            if key is None and current == section:
                return f":{number}"
        elif current == (section if key is not None else None) and target.match(line):
            return f":{number}"
    return ""
