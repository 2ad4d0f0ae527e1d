"""Where this machine keeps models: with this package, in packages of their own, in folders, in the hub's cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from graphdecode.models.gguf.files import SUFFIX, models_among, shards_of
from graphdecode.models.installable import INSTALLABLE

VARIABLE = "GRAPHDECODE_MODELS"
DEMO = Path(__file__).parent / "demo"


@dataclass(frozen=True)
class LocalModel:
    """A model that is here.

    Attributes:
        name: what a command's `--model` and `LLM` take.
        path: its folder or file.
        place: "shipped", "installed", a folder of GRAPHDECODE_MODELS, or "hub cache".
    """

    name: str
    path: Path
    place: str

    @property
    def disk_bytes(self) -> int:
        """What its files take, each of them once."""
        if self.path.is_file():
            shards = [self.path.with_name(name) for name in shards_of(self.path.name)]
            return sum(shard.stat().st_size for shard in shards if shard.is_file())
        return sum(file.stat().st_size for file in self.path.iterdir() if file.is_file())


def model_folders() -> list[Path]:
    """Return the folders that the environment variable GRAPHDECODE_MODELS names, separated as in PATH."""
    named = os.environ.get(VARIABLE, "").split(os.pathsep)
    return [Path(name).expanduser() for name in named if name]


def in_model_folders(name: str) -> Path | None:
    """Return a folder or file of that name in the folders of GRAPHDECODE_MODELS; `.gguf` may be left out."""
    relative = Path(name)
    if not name or relative.is_absolute() or ".." in relative.parts:
        return None
    candidates = (folder / each for folder in model_folders() for each in (name, name + SUFFIX))
    return next((path for path in candidates if os.path.isdir(path) or os.path.isfile(path)), None)


def hub_cache() -> Path:
    """Return the folder in which huggingface_hub keeps what it has fetched."""
    from huggingface_hub.constants import HF_HUB_CACHE  # here, for it takes a while, and most models need none of it

    return Path(HF_HUB_CACHE)


def local_models() -> list[LocalModel]:
    """Return all models that are here, those that cannot be run as well: nothing but names is looked at."""
    found = [LocalModel("demo", DEMO, "shipped")]
    for package in INSTALLABLE:
        file = package.installed_file()
        if file is not None:
            found.append(LocalModel(package.name, file, "installed"))
    for folder in model_folders():
        found += [LocalModel(str(path.relative_to(folder)), path, str(folder)) for path in _models_below(folder)]
    found += _cached()
    first: dict[str, LocalModel] = {}
    for model in found:  # a name means the first of those that have it
        first.setdefault(model.name, model)
    return list(first.values())


def _models_below(folder: Path, depth: int = 2) -> Iterator[Path]:
    """Yield the models in a folder: subfolders, `owner/name` as well, and files of GGUF, of shards the first."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:  # it is not there, or not to be read
        return
    files = set(models_among(entry.name for entry in entries))
    for entry in entries:
        if (entry.name in files and entry.is_file()) or (entry.is_dir() and (entry / "config.json").is_file()):
            yield entry
        elif entry.is_dir() and depth > 1:
            yield from _models_below(entry, depth - 1)


def _cached() -> Iterator[LocalModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(hub_cache()).repos
    except (CacheNotFound, OSError, ValueError):
        return
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        # what a name without a revision means is "main", if that was ever fetched
        newest = max(repository.revisions, key=lambda each: ("main" in each.refs, each.last_modified))
        yield LocalModel(repository.repo_id, newest.snapshot_path, "hub cache")
