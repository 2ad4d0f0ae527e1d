"""The folder for what is made once on a machine: compiled kernels, measured choices."""

import os
from pathlib import Path

FOLDER_VARIABLE = "GRAPHDECODE_CACHE_DIR"


def cache_folder() -> Path:
    """Return `$GRAPHDECODE_CACHE_DIR`, else `graphdecode` in `$XDG_CACHE_HOME`, else in `~/.cache`.

    Raises:
        FileNotFoundError: this user has no home.
    """
    if os.environ.get(FOLDER_VARIABLE):
        return Path(os.environ[FOLDER_VARIABLE])
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphdecode"
    except RuntimeError as error:
        raise FileNotFoundError(f"this user has no home: {error}") from error
