"""Names of GGUF files: models of one file or several shards."""

import re
from collections.abc import Iterable
from pathlib import Path

SUFFIX = ".gguf"
_SHARD = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_NO_MODEL = "mmproj"  # prefix of files that hold an image encoder


def models_among(names: Iterable[str]) -> list[str]:
    """Return the names of GGUF files; of the shards of a model, the first."""
    models = sorted(name for name in names if name.endswith(SUFFIX) and not name.startswith(_NO_MODEL))
    return [name for name in models if shards_of(name)[0] == name]


def of_quantization(names: Iterable[str], quantization: str) -> list[str]:
    """Return the names with a quantization, such as "Q4_K_M"; all names for ""."""
    return [name for name in names if not quantization or quantization.lower() in re.split(r"[-.]", name.lower())]


def shards_of(name: str) -> list[str]:
    """Return the names of all shards of a model, given one of them; or the name of a model in one file."""
    shard = _SHARD.fullmatch(name)
    count = int(shard["count"]) if shard is not None else 0
    if shard is None or not 1 <= int(shard["number"]) <= count:
        return [name]
    return [f"{shard['model']}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]


def models_in(folder: Path) -> list[str]:
    """Return the GGUF models of a folder without safetensors; pipes and the like are no models."""
    names = [path.name for path in folder.iterdir() if path.is_file() or not path.exists()]
    return [] if any(".safetensors" in name for name in names) else models_among(names)
