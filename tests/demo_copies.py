"""Copies of the demo model with other settings."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphdecode.models import resolve_model_path


def demo_copy(folder: Path, **changes: Mapping[str, Any]) -> Path:
    """Copy the demo to a new folder, with other keys in its JSON files, by their stems; "missing" drops a key."""
    shutil.copytree(resolve_model_path("demo"), folder)
    for stem, settings in changes.items():
        file = folder / f"{stem}.json"
        merged = {**json.loads(file.read_text()), **settings}
        file.write_text(json.dumps({key: value for key, value in merged.items() if value != "missing"}))
    return folder
