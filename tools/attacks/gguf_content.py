"""Writes GGUF headers from fields and tensors, optionally corrupted; the layout is ggml's docs/gguf.md."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf

from attacks.mutation import hostile_value

UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SIZES = [0, 1, 2, 31, 32, 63, 65, 258, 260, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1]
_MORE = [  # fields that are read, but missing in the file
    "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.dimension_count", "llama.expert_count",
    "llama.attention.key_length", "llama.attention.value_length", "general.alignment", "llama.expert_used_count",
    "llama.rope.scaling.original_context_length", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.tokens",
]  # fmt: skip

Field = tuple[str, int, Any]  # key, number of the value's type, value


def _encoded(kind: int, value: Any) -> bytes:
    """Encode a value as the type of a number; a value of another type as the most similar one."""
    if kind == STRING:
        text = (value if isinstance(value, str) else repr(value)[:200]).encode(errors="surrogatepass")
        return struct.pack("<Q", len(text)) + text
    if kind == ARRAY:
        entries = value if isinstance(value, list) else [value]
        inner = _kind_of(entries[0]) if entries else UINT32
        return struct.pack("<IQ", inner, len(entries)) + b"".join(_encoded(inner, entry) for entry in entries)
    number = value if isinstance(value, (bool, int, float)) else 7
    try:
        return struct.pack(f"<{_FORMATS[kind]}", number)
    except (struct.error, OverflowError):
        return b"\xff" * struct.calcsize(_FORMATS[kind])


def _kind_of(value: Any) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return UINT32 if 0 <= value < 2**32 else 11
    if isinstance(value, float):
        return 12 if abs(value) > 3e38 else FLOAT32
    return ARRAY if isinstance(value, list) else STRING


def spoil_field(rng: random.Random, fields: list[Field]) -> None:
    """Corrupt one field."""
    at = rng.randrange(len(fields))
    key, kind, value = fields[at]
    way = rng.randrange(7)
    if way < 3:
        value = hostile_value(rng)
        fields[at] = key, rng.choice([_kind_of(value), kind, rng.randrange(13)]), value
        if fields[at][1] not in _FORMATS and fields[at][1] not in (STRING, ARRAY):
            fields[at] = key, kind, value
    elif way == 3:
        del fields[at]
    elif way == 4:
        value = rng.choice([hostile_value(rng), 2, 1.5, "linear", "yarn", True, [0], ["a"]])
        fields.insert(at, (rng.choice([*_MORE, key]), _kind_of(value), value))
    elif isinstance(value, list) and value:
        changed = list(value)
        place = rng.randrange(len(changed))
        changed[place] = rng.choice([changed[0], changed[-1], hostile_value(rng), 3, 0.5])
        fields[at] = key, kind, rng.choice([changed, changed, changed[:-1], changed[:place], changed * 2])
    elif isinstance(value, str):
        fields[at] = key, kind, rng.choice([value + "a", value[:-1], value * 50, "qwen2", "smollm3", "granite", "mpt"])
    elif isinstance(value, int | float):
        fields[at] = key, kind, rng.choice([value + 1, value - 1, value * 2, value // 2, value * 0, value * 1000])


def header_of(fields: list[Field], infos: list[list[Any]], counts: tuple[int, int], version: int) -> bytes:
    """Return the bytes before the tensors."""
    parts = [b"GGUF", struct.pack("<IQQ", version, *counts)]
    for key, kind, value in fields:
        parts += [_encoded(STRING, key), struct.pack("<I", kind), _encoded(kind, value)]
    for name, shape, kind, offset in infos:
        parts += [_encoded(STRING, name), struct.pack(f"<I{len(shape)}Q", len(shape), *(n % 2**64 for n in shape))]
        parts.append(struct.pack("<IQ", kind % 2**32, offset % 2**64))
    return b"".join(parts)


def fields_of(file: Path) -> tuple[list[Field], gguf.GGUFReader]:
    """Return the fields that the gguf library reads from a file."""
    reader = gguf.GGUFReader(file)
    found = (field for field in reader.fields.values() if not field.name.startswith("GGUF."))
    return [(field.name, int(field.types[0]), field.contents()) for field in found], reader
