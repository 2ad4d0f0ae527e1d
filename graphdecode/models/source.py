"""Where a model comes from: a folder, the demo that ships with the package, or the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from graphdecode.errors import GraphdecodeError

_DEMO = Path(__file__).parent / "demo"
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
_HUB_IGNORED = ["*/*", "consolidated*"]  # the same weights in other formats: twice the download for nothing


class ModelSourceError(GraphdecodeError, ValueError):
    """No model can be had under the name that was given."""


def resolve_model_path(model: str | Path) -> Path:
    """Return the folder of a model.

    Args:
        model: `"demo"` (a folder of that name is `"./demo"`), a folder, or a Hugging Face repository id, which is
            fetched with a progress bar.

    Raises:
        ModelSourceError: there is no such folder, and no such repository within reach.
    """
    if not isinstance(model, str | Path):
        raise ModelSourceError(f"model must be a folder, a repository id or demo, got {model!r:.80}")
    if model == "demo":
        return _DEMO
    name, path = str(model), Path(model)
    if name and path.is_dir():
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or path.is_absolute():
        raise ModelSourceError(f"model {name!r} is no folder; give a checkpoint folder, a repository id or demo")
    return _fetched(name)


def _fetched(name: str) -> Path:
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
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED))
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
            f"model {name!r} is no folder, and it could not be fetched from the hub: is there a network? ({reason})"
        ) from error
