"""What was measured on this machine, kept on disk, so that the next start need not measure it again."""

import hashlib
import json
import platform
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from graphdecode.kernels import native
from graphdecode.kernels.native.cache_folder import cache_folder
from graphdecode.kernels.native.instructions import instructions

_FILE = "choices.json"


def processor_name(device: torch.device) -> str:
    """Return the name of a GPU, or that of the CPU with the instructions and the number of threads that are used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {instructions().name}, {torch.get_num_threads()} threads"


def software() -> str:
    """Return what a measurement is good for: versions of torch and Triton, and a hash of the sources of products."""
    try:
        triton_version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton_version = "none"
    source = hashlib.sha256()
    kernels = Path(native.__file__).parents[1]
    for folder in (Path(__file__).parent, *(kernels / name for name in ("linear", "moe", "native"))):
        for file in sorted(folder.glob("*.[pch]*")):
            source.update(file.read_bytes())
    return f"torch {torch.__version__}, triton {triton_version}, source {source.hexdigest()[:12]}"


class ChoiceCache:
    """A JSON file of measured choices by key. A file that cannot be read or written costs a measurement, never a run.

    Args:
        folder: where the file is; None means `cache_folder()`. It is made when something is first written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = (folder or cache_folder()) / _FILE
        self._choices = self._read()
        self._own: dict[str, Any] = {}

    def get(self, key: str) -> Any | None:
        """Return what was put for a key, by whichever process; None if nothing was."""
        return self._choices.get(key)

    def put(self, key: str, value: Any) -> None:
        """Keep a value that JSON can hold, beside what other processes have written meanwhile."""
        self._own[key] = value
        self._choices = self._read() | self._own  # an entry lost to a process that wrote at the same time comes back
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, suffix=".tmp", delete=False) as file:
                json.dump(self._choices, file, indent=1, sort_keys=True)
            Path(file.name).replace(self._file)  # readers see the old file or the new one, whole
        except OSError:
            return

    def _read(self) -> dict[str, Any]:
        try:
            choices = json.loads(self._file.read_text())
        except (OSError, ValueError, RecursionError):  # not there, no JSON, or nested too deeply
            return {}
        return choices if isinstance(choices, dict) else {}
