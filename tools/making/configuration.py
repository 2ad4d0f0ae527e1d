"""docs/configuration.md and buckets.toml, from the fields of the configurations."""

from __future__ import annotations

import textwrap
from itertools import groupby

from graphdecode.config.key import Key, keys_of, toml_value
from graphdecode.config.settings import BucketConfig, EngineConfig, ReplicaConfig, ServerConfig
from harness import ROOT

_COLUMNS = 100
_INTRODUCTION = """\
# Configuration

<!-- Written by `tools/make configuration` from the fields of the configurations: change those. -->

One TOML file holds all settings. `LLM(model, config=...)` takes its path, an `EngineConfig`, or a `BucketConfig`;
`--config` of the commands takes the path. Every section and key is optional. A keyword of `LLM`, or an option of a
command, overrides the file. The keys of `EngineConfig` are `LLM`'s keywords. `BucketConfig.load` takes the first four
sections. [server] is only for `graphdecode serve`, [replicas] for it and for `graphdecode batch --ray`.

An unknown key, a wrong type and an impossible value are errors (`ConfigError`) that name the file, the line, the key
and the values that it takes. `buckets.toml` at the root of the repository holds all keys at their defaults.
"""
_FILE_HEADER = "# graphdecode's defaults: change a copy of this file; every key is optional.\n"


def reference() -> str:
    parts = [_INTRODUCTION]
    for section, keys in _sections():
        rows = [f"| `{key.name}` | {key.values.expected} | {_default(key)} | {key.meaning} |" for key in keys]
        parts.append("\n".join([f"## [{section}]\n", "| key | takes | default | |", "|---|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def default_file() -> str:
    parts = [_FILE_HEADER]
    for section, keys in _sections():
        lines = [f"[{section}]"]
        for key in keys:
            lines += [f"# {line}" for line in textwrap.wrap(f"{key.meaning} Takes {key.values.expected}.", _COLUMNS)]
            left_out = key.default is None
            value = key.values.example if left_out else toml_value(key.default)
            lines.append(f"{'# ' if left_out else ''}{key.name} = {value}")
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


def _sections() -> list[tuple[str, list[Key]]]:
    keys = [*keys_of(BucketConfig), *keys_of(EngineConfig), *keys_of(ServerConfig), *keys_of(ReplicaConfig)]
    return [(section, list(group)) for section, group in groupby(keys, lambda key: key.section)]


def _default(key: Key) -> str:
    return "left out" if key.default is None else f"`{toml_value(key.default)}`"


def main() -> None:
    (ROOT / "docs" / "configuration.md").write_text(reference(), encoding="utf-8")
    (ROOT / "buckets.toml").write_text(default_file(), encoding="utf-8")
