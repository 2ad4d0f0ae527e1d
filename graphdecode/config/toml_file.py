"""Reading and writing of configurations in TOML, with line numbers in errors."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from graphdecode.config.key import Key
from graphdecode.errors import ConfigError, cause, shown


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
                raise ConfigError(f"{self._location(section)}: unknown section or key {shown(section)}; known: {known}")
            for name, value in entries.items():
                where = f"{self._location(section, name)}: [{section}] {name}"
                if name not in sections[section]:
                    raise ConfigError(f"{where}: unknown key; known: {', '.join(sections[section])}")
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
