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
[Environment variables](#environment-variables) say where things are, and what the compiled kernels use.
"""
_VARIABLES = [  # name, what it takes, what holds if it is left out, meaning
    (
        "GRAPHDECODE_MODELS",
        "folders, separated as in `PATH`",
        "none",
        "Folders in which [models](shell.md#models) are looked up by name.",
    ),
    ("GRAPHDECODE_API_KEY", "a text", "none", "A bearer token of the server, besides `api_keys`."),
    (
        "GRAPHDECODE_CACHE_DIR",
        "a folder",
        "`graphdecode` in `$XDG_CACHE_HOME` or `~/.cache`",
        "Where compiled kernels and measured choices are kept.",
    ),
    (
        "GRAPHDECODE_NATIVE",
        "0",
        "compiled kernels if there is a C compiler",
        "0 (no, off, false): torch's operators compute instead of [compiled kernels](kernels.md#kernels-in-c), "
        "many times more slowly; nothing is compiled.",
    ),
    (
        "GRAPHDECODE_ISA",
        "on x86-64 `portable`, `avx2`, `avx512`, `avx512_vnni`, `avx512_bf16` or `amx`; on 64-bit Arm `portable`, "
        "`neon`, `neon_dotprod` or `neon_bf16`",
        "the last that the processor has; on Intel's without `amx` the one before `avx512_bf16`",
        "Instructions of the compiled kernels; a set that the processor lacks is refused. Torch's operators do not "
        "follow it.",
    ),
    (
        "GRAPHDECODE_NVRTC",
        "0",
        "CUDA C++ kernels if NVRTC is there",
        "0 (no, off, false): on a GPU no [CUDA C++](kernels.md) is compiled; Triton's kernels serve, and "
        "`steps_per_launch` makes that many launches.",
    ),
    (
        "GRAPHDECODE_CLUSTER_ATTENTION",
        "1",
        "Triton's attention",
        "1 (yes, on, true): on GPUs with clusters a step's attention is the [CUDA C++](kernels.md#kernels-in-cuda-c) "
        "kernel, which no GPU has timed yet.",
    ),
    ("CC", "a command", "the first of `cc`, `gcc` and `clang`", "The C compiler."),
]
_FILE_HEADER = "# graphdecode's defaults: change a copy of this file; every key is optional.\n"


def reference() -> str:
    parts = [_INTRODUCTION]
    for section, keys in _sections():
        rows = [f"| `{key.name}` | {key.values.expected} | {_default(key)} | {key.meaning} |" for key in keys]
        parts.append("\n".join([f"## [{section}]\n", "| key | takes | default | |", "|---|---|---|---|", *rows, ""]))
    rows = [f"| `{name}` | {' | '.join(others)} |" for name, *others in _VARIABLES]
    head = ["## Environment variables\n", "| variable | takes | left out | |", "|---|---|---|---|"]
    end = "\n`graphdecode --version --debug` says what is used, and why.\n"
    return "\n".join([*parts, *head, *rows, end])


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
