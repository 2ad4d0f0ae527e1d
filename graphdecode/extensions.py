"""Extensions: entry points of installed packages, and files, that register families, sources, weight forms or steps.

They are imported when a registry is first read, so that commands without a model do not wait for them.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

from graphdecode.errors import ArgumentError, GraphdecodeError, shown

HOW_TO_REGISTER = "of your own comes by --load-module FILE, LLM(load_modules=[FILE]) or a package's entry points"
_LOG = logging.getLogger(__name__)
_LOCK = threading.RLock()  # reentrant: imported modules may read registries
LOADED: dict[Path, ModuleType] = {}
_Registry = dict[str, Any] | list[Any]
_REGISTRIES: list[_Registry] = []


def version_of(package: str) -> str:
    """Return the version of an installed package; "none" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


class EntryPoints:
    """The entry points of a group.

    Each names a module that registers in `registry` when it is imported, or an object for which `register` is called
    with the entry point's name.
    """

    def __init__(self, group: str, register: Callable[[str, Any], None], registry: _Registry) -> None:
        self._group, self._register, self._registry = group, register, registry
        self._is_finding = self.is_loaded = False  # the latter: when all are loaded
        _REGISTRIES.append(registry)

    def find(self) -> None:
        """Load the entry points, unless `is_loaded`; one that fails is logged and skipped."""
        with _LOCK:
            if self._is_finding:  # called by a module that is being imported
                return
            self._is_finding = True
            for entry in entry_points(group=self._group):
                loaded = None
                try:
                    loaded = entry.load()
                    if not isinstance(loaded, ModuleType):
                        self._register(entry.name, loaded)
                except (Exception, SystemExit) as error:  # whatever the module raises
                    if loaded is not None and self._has(loaded):  # its module registered it
                        continue
                    reason = " ".join(_message_of(error).split())
                    _LOG.warning("graphdecode: %s is left out: %s", _named(entry), reason)
            self.is_loaded = True

    def _has(self, loaded: Any) -> bool:
        """Whether an object, or an instance of it, is registered."""
        registered = self._registry.values() if isinstance(self._registry, dict) else self._registry
        return any(each is loaded or type(each) is loaded for each in registered)


def load_modules(files: Sequence[str | Path]) -> None:
    """Import files, each once per process; raises ArgumentError if one cannot be imported."""
    for file in files:
        path = Path(file).expanduser().resolve()
        with _LOCK:
            if path not in LOADED:
                LOADED[path] = _imported(path)


def refuse_duplicate(kind: str, name: str, is_registered: bool, replace: bool) -> None:
    """Raise an ArgumentError if a name is taken, unless `replace`."""
    if is_registered and not replace:
        raise ArgumentError(f"{kind} {shown(name, plain=True)} is registered already; replace=True takes its place")


def _imported(path: Path) -> ModuleType:
    name = f"graphdecode_module_{len(LOADED)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path) if path.suffix == ".py" and path.is_file() else None
    if spec is None or spec.loader is None:
        raise ArgumentError(f"load_modules must name existing Python files, got {shown(str(path))}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    before = [registry.copy() for registry in _REGISTRIES]
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the file raises
        del sys.modules[name]
        _restore(before, name)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        location = f"{path}:{lines[-1]}" if lines else str(path)
        raise ArgumentError(f"load_modules: {location}: {_message_of(error)}") from error
    return module


def _restore(before: list[_Registry], failed: str) -> None:
    """Undo what a failed module registered, also in registries that were first imported by it."""
    for registry, saved in zip_longest(_REGISTRIES, before):
        entries = registry.copy() if saved is None else saved
        registry.clear()
        if isinstance(registry, dict):
            registry.update((k, v) for k, v in dict(entries).items() if getattr(v, "__module__", None) != failed)
        else:
            registry.extend(value for value in entries if getattr(value, "__module__", None) != failed)


def _named(entry: EntryPoint) -> str:
    package = "" if entry.dist is None else f" of {entry.dist.name}"
    return f"entry point {entry.name} = {entry.value}{package} in {entry.group}"


def _message_of(error: BaseException) -> str:
    return str(error) if isinstance(error, GraphdecodeError) else f"{type(error).__name__}: {error}"
