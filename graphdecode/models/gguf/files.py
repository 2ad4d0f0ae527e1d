"""Which files of a folder are a model in GGUF: one file, or the shards that one name stands for."""

import re
from collections.abc import Iterable
from pathlib import Path

SUFFIX = ".gguf"
_SHARD = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_NO_MODEL = "mmproj"  # prefix of files that hold an image encoder


def models_among(names: Iterable[str]) -> list[str]:
    """Return the names of GGUF files, of those that are shards of one model the first alone."""
    models = sorted(name for name in names if name.endswith(SUFFIX) and not name.startswith(_NO_MODEL))
    return [name for name in models if shards_of(name)[0] == name]


def of_quantization(names: Iterable[str], wanted: str) -> list[str]:
    """Return those names of models that say a quantization, such as "Q4_K_M"; all of them for ""."""
    return [name for name in names if not wanted or wanted.lower() in re.split(r"[-.]", name.lower())]


def shards_of(name: str) -> list[str]:
    """Return the names of all shards of a model, given that of one; of a model in one file, that file."""
    shard = _shard(name)
    if shard is None:
        return [name]
    count = int(shard["count"])
    return [f"{shard['model']}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]


def models_in(folder: Path) -> list[str]:
    """Return the models in GGUF that a folder holds; none where it holds safetensors, which are a model with them.

    What is there and is no file is none: a pipe would be waited for without end.
    """
    names = [path.name for path in folder.iterdir() if path.is_file() or not path.exists()]
    return [] if any(".safetensors" in name for name in names) else models_among(names)


def _shard(name: str) -> re.Match[str] | None:
    """Return what a name says of a shard; None: it is a model by itself, whose name may hold other numbers."""
    found = _SHARD.fullmatch(name)
    return found if found and 1 <= int(found["number"]) <= int(found["count"]) else None
