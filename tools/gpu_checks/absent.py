"""Stand-ins for packages that a GPU machine may lack, so that code that needs only torch, triton and numpy runs.

Imported first, also as a pytest plugin: a test that uses a stand-in is skipped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PACKAGES = frozenset({
    "compressed_tensors", "gguf", "huggingface_hub", "hypothesis", "prompt_toolkit", "regex", "rich",
    "safetensors", "tokenizers", "tqdm", "transformers", "typer",
})  # fmt: skip
WITHOUT = "GPU_CHECK_WITHOUT"  # if set, none of them counts as installed


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()

    def __getitem__(cls, key: Any) -> Any:
        return cls()


class Absent(Exception, metaclass=_Kind):
    """Any attribute of a package: a class, a function, or a decorator that drops a test."""

    __test__ = False

    def __init__(self, *given: Any, **_: Any) -> None:
        super().__init__(*given)
        if type(self) is Absent and "PYTEST_CURRENT_TEST" in os.environ:
            import pytest

            pytest.skip("needs a package that is not installed")

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent()

    def __getitem__(self, key: Any) -> Absent:
        return Absent()

    def __call__(self, *given: Any, **_: Any) -> Absent:
        """Return another stand-in."""
        return Absent(*given)


class _Bar(Absent):
    """A progress bar that shows nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.args[0] if self.args else ())

    def __getattr__(self, name: str) -> _Bar:
        return self

    def __call__(self, *_: Any, **__: Any) -> _Bar:
        return self

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _Module(ModuleType):
    def __getattr__(self, name: str) -> type[Absent]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Bar if self.__name__.startswith("tqdm") else Absent


def pytest_configure(config: Any) -> None:
    """Register the marks of plugins that are not installed."""
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout")


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if top not in PACKAGES or (WITHOUT not in os.environ and PathFinder.find_spec(top) is not None):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


sys.meta_path.insert(0, _Finder())
