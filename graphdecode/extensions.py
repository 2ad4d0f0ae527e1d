"""Extensions from outside: entry points of installed packages, and single files, which register what they bring.

Nothing of it is imported before somebody looks into a registry: a command that loads no model pays nothing.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

from graphdecode.errors import ArgumentError, GraphdecodeError, shown

BRING_YOUR_OWN = "of your own comes by --load-module FILE, LLM(load_modules=[FILE]) or a package's entry points"
_LOG = logging.getLogger(__name__)
_TAKING = threading.RLock()  # what is imported may look into the registries itself
_LOADED: dict[Path, ModuleType] = {}  # files of this process, each of them once
_Registry = dict[str, Any] | list[Any]
_REGISTRIES: list[_Registry] = []  # that may be registered in from outside


class EntryPoints:
    """The entry points of a group.

    Each leads to a module, which registers what it brings in `registry` when it is imported, or to an object, which is
    handed to `register` with the entry point's name.
    """

    def __init__(self, group: str, register: Callable[[str, Any], None], registry: _Registry) -> None:
        self._group, self._register = group, register
        self._is_finding = self._found = False
        _REGISTRIES.append(registry)

    def find(self) -> None:
        """Take them, the first time; one that cannot be taken is a line of the log, and the others serve."""
        if self._found:  # where another thread is at it, it is waited for
            return
        with _TAKING:
            if self._is_finding:
                return
            self._is_finding = True
            for entry in entry_points(group=self._group):
                try:
                    given = entry.load()
                    if not isinstance(given, ModuleType):
                        self._register(entry.name, given)
                except (Exception, SystemExit) as error:  # of a stranger's module, which must not stop all models
                    _LOG.warning("graphdecode: %s is left out: %s", _named(entry), " ".join(_told(error).split()))
            self._found = True


def load_modules(files: Sequence[str | Path]) -> None:
    """Import files that register what they bring, each once in a process; an ArgumentError says why one cannot be."""
    for file in files:
        path = Path(file).expanduser().resolve()
        with _TAKING:
            if path not in _LOADED:
                _LOADED[path] = _imported(path)


def refuse_taken(what: str, name: str, taken: bool, replace: bool) -> None:
    """Raise an ArgumentError for a name that is registered already, unless it is to be replaced."""
    if taken and not replace:
        raise ArgumentError(f"{what} {shown(name, plain=True)} is registered already; replace=True takes its place")


def _imported(path: Path) -> ModuleType:
    name = f"graphdecode_module_{len(_LOADED)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path) if path.suffix == ".py" and path.is_file() else None
    if spec is None or spec.loader is None:
        raise ArgumentError(f"load_modules must name files of Python that exist, got {shown(str(path))}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    before = [registry.copy() for registry in _REGISTRIES]
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a stranger's file raises
        del sys.modules[name]
        _restore(before, name)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f"{path}:{lines[-1]}" if lines else str(path)
        raise ArgumentError(f"load_modules: {place}: {_told(error)}") from error
    return module


def _restore(before: list[_Registry], failed: str) -> None:
    """Take back what a module registered; of registries that it was the first to import, what it defines itself."""
    for registry, saved in zip_longest(_REGISTRIES, before):
        held = registry.copy() if saved is None else saved
        registry.clear()
        if isinstance(registry, dict):
            registry.update((k, v) for k, v in dict(held).items() if getattr(v, "__module__", None) != failed)
        else:
            registry.extend(value for value in held if getattr(value, "__module__", None) != failed)


def _named(entry: EntryPoint) -> str:
    package = "" if entry.dist is None else f" of {entry.dist.name}"
    return f"entry point {entry.name} = {entry.value}{package} in {entry.group}"


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, GraphdecodeError) else f"{type(error).__name__}: {error}"
