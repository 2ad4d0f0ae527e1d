"""C kernels for the CPU: included in the wheel, or compiled once on the user's machine.

The kernels in `*.c` read at memory bandwidth, and a recorded step runs a list of them in one call. They share work
among their own threads (`native_threads.h`), as many as torch has. The source text is the structs of the arguments,
generated from the operators' signatures, and the sources. Each part of the kernels (`PARTS`) has a library for each
element type, made when first needed, several in parallel; the base's of float32 has what all share.

Wheels of `tools/make wheel --with-kernels` include compiled kernels. Otherwise the C compiler compiles them. Files are
named by a digest of the sources that this process started with, so that others are never loaded. If the sources have
changed since, kernels that are not loaded yet are neither loaded nor compiled.

Without kernels, `library()` is None, `unavailable_reason()` says why, and torch's operators are used, with one message
on standard error. GRAPHDECODE_NATIVE=0 does the same without a message. GRAPHDECODE_ISA names the instruction set.
"""

import ctypes
import functools
import hashlib
import importlib
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .compiler import COMPILE_SECONDS, PORTABLE_FLAGS, Compiler, NotCompiled
from .instructions import Instructions, instructions
from .private_folder import FOLDER_VARIABLE, PrivateFolder, cache_folder
from .system import opened_library

CODES = {torch.float8_e4m3fn: 1, torch.int8: 2}  # types of 8 bits that C tells apart; the others are 0
WIDE_CODE = 3  # element code of a `Wide` tensor in float32
FOLDER = Path(__file__).parent  # of the headers; sources are beside the operators of the same name
CARRIED = FOLDER / "carried"
_PACKAGE = __package__.rpartition(".")[0]
_END = (
    "void run_all(void (**kernels)(const void *, int), const void **args, int count, int threads) {\n"
    "    for (int i = 0; i < count; i++) kernels[i](args[i], threads);\n}\n"
)
_DECLARED: dict[str, Any] = {}  # by operator; filled while the operators are imported
_CONSTANTS: dict[str, int] = {}


def declare(operator: Any, constants: dict[str, int]) -> None:
    """Declare an operator, by its `registration.Signature`, and constants to the sources.

    Raises:
        ValueError: a constant has two values.
    """
    _DECLARED[operator.name] = operator
    for constant, value in constants.items():
        if _CONSTANTS.setdefault(constant, value) != value:
            raise ValueError(f"{constant} is {_CONSTANTS[constant]} for one kernel and {value} for another")


def part_of(module: str, *, has_element: bool) -> str:
    """Return the part of an operator's kernel, by the operator's module; without an element type it is in the base."""
    module_path = "/".join(module.split(".")[-2:])
    return next(part for part, begins in PARTS.items() if module_path.startswith(begins)) if has_element else BASE


def include_flags() -> list[str]:
    """Return the compiler's include options."""
    return [f"-I{FOLDER}", f"-I{FOLDER.parent}"]


def source_text(kind: str, part: str | None = None) -> str:
    """Return the source text of the kernels for an element type, of one part or all, without its includes."""
    has_shared = (kind, part or BASE) == _FIRST
    includes = []
    for source in sorted(FOLDER.parent.glob("*/*.c")):
        module = importlib.import_module(f"{_PACKAGE}.{source.parent.name}.{source.stem}")
        operators = [each for each in _DECLARED.values() if each.module == module.__name__]
        if any(part in (None, each.part) and (each.has_element or has_shared) for each in operators):
            includes.append(f'#include "{source.parent.name}/{source.name}"\n')
    codes = {f"CODE_{str(dtype).removeprefix('torch.')}".upper(): value for dtype, value in CODES.items()}
    named = _CONSTANTS | codes | {"CODE_WIDE": WIDE_CODE}
    constants = ", ".join(f"{name} = {value}" for name, value in sorted(named.items()))
    declared = [_DECLARED[name] for name in sorted(_DECLARED)]
    records = {name: text for each in declared for name, text in each.c_records.items()}
    structs = "".join([*(records[name] for name in sorted(records)), *(each.c_struct for each in declared)])
    shared = "" if has_shared else "#define SHARED_ELSEWHERE\n"
    prelude = f'#define ELEMENT_{kind.upper()}\n{shared}enum {{ {constants} }};\n#include "native.h"\n{structs}'
    return f"{prelude}{''.join(includes)}{_END if has_shared else ''}"


LANES = 16  # values per vector
ELEMENTS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
BASE = "base"
# parts of the kernels, the one that takes longest to compile first, and how the places of their sources begin
PARTS = {"linear": ("linear/", "moe/expert"), "attention": ("attention/", "cache/"), BASE: ("",)}
_SHARED = {"parallel": None, "choose_token": BASE}  # functions of the first library, and the part that uses them
SWITCH = "GRAPHDECODE_NATIVE"
_SILENT_SECONDS = 1
_WAIT_SECONDS = COMPILE_SECONDS + 10  # to wait for another process that compiles
_SWITCHED_OFF: ContextVar[bool] = ContextVar("switched_off", default=False)
_LOADING = threading.Lock()  # two threads must not compile at the same time
_LOG = logging.getLogger("graphdecode")


class Unit(NamedTuple):
    """A compilation unit, one library: a part of the kernels, for an element type."""

    kind: str
    part: str = BASE

    @property
    def file(self) -> str:
        """The end of its library's file name."""
        return f"{self.part}-{self.kind}.so"


UNITS = [Unit(kind, part) for kind in ELEMENTS.values() for part in PARTS]
_FIRST = Unit(ELEMENTS[torch.float32])  # its library has what all share


class LoadedLibrary(NamedTuple):
    """The library of a unit and its origin, or why there is none."""

    library: ctypes.CDLL | None
    file: Path | None
    compiler: Compiler | None
    reason: str | None


LOADED: dict[Unit, LoadedLibrary] = {}


@contextmanager
def switched_off() -> Iterator[None]:
    """Make operators use torch inside, for comparison."""
    token = _SWITCHED_OFF.set(True)
    try:
        yield
    finally:
        _SWITCHED_OFF.reset(token)


def library(element: torch.dtype | None = None, part: str | None = None) -> ctypes.CDLL | None:
    """Return the compiled kernels, compiled at the first call; None if unavailable or switched off.

    Args:
        element: the element type; None: kernels without one, which are in the base's library of float32.
        part: a part of them; None: all, of which the base's library is returned, or None if one is unavailable.

    Raises:
        MissingInstructions: GRAPHDECODE_ISA names an instruction set that this processor lacks.
    """
    if _SWITCHED_OFF.get():
        return None
    if part is not None or element is None:
        unit = _unit(element, part or BASE)
        return (LOADED.get(unit) or _load(unit)).library
    return _load(*(_unit(element, each) for each in PARTS)).library


@functools.cache
def _unit(element: torch.dtype | None, part: str) -> Unit:
    return Unit(ELEMENTS[element or torch.float32], part)


def unavailable_reason() -> str | None:
    """Return why there are no compiled kernels, or not all that were asked for; None if there are."""
    _load()
    return _load_failure()


def _load_failure() -> str | None:
    return next((loaded.reason for loaded in list(LOADED.values()) if loaded.reason), None)


def describe() -> str:
    """Return the status of the compiled kernels, as text, without compiling."""
    try:
        if (reason := off_reason(SWITCH)) is not None:
            raise NotCompiled(reason)
        if all(_carried_file(unit).exists() for unit in UNITS):
            return f"compiled kernels: {CARRIED}\ncompiler: none, the package carries them"
        if (failure := _load_failure()) is not None:
            raise NotCompiled(failure)
        compiler = Compiler.detect()
        names = _names(UNITS, compiler)
        counts: dict[Path, int] = {}
        for get_folder in _FOLDERS:
            with suppress(OSError):
                folder = get_folder()
                counts[folder] = sum((folder / name).exists() for name in names.values())
        if not counts:
            raise NotCompiled("no folder for compiled kernels can be read")
        folder, count = max(counts.items(), key=lambda item: item[1])
    except (NotCompiled, OSError) as error:
        return f"compiled kernels: none, torch's operators do the work: {error}"
    by = f"{' '.join(compiler.command)} ({compiler.version.partition(chr(10))[0]})"
    status = f"{count} of {len(names)} libraries" if count else "not compiled yet"
    return f"compiled kernels: {folder} ({status}; each is compiled when it is first needed)\ncompiler: {by}"


def is_expected(element: torch.dtype | None) -> bool:
    """Whether `library` is expected to succeed, without compiling: there are included kernels, or a compiler."""
    units = [_unit(element, part) for part in PARTS]
    if all(unit in LOADED for unit in units):
        return all(LOADED[unit].library is not None for unit in units)
    try:
        is_carried = all(_carried_file(unit).exists() for unit in units)
        return off_reason(SWITCH) is None and (is_carried or bool(Compiler.detect()))
    except NotCompiled:
        return False


@functools.cache
def kernel(name: str, element: torch.dtype | None) -> Any:
    """Return a kernel as a function of (argument struct as bytes, threads).

    Args:
        name: the operator's name.
        element: see `library`.

    Raises:
        RuntimeError: there are no compiled kernels here.
    """
    unit = _unit(element, _DECLARED[name].part)
    return _function(f"{name}_{unit.kind}", unit)


@functools.cache
def run_all() -> Any:
    """Return a function of (kernels, arguments, count, threads) that runs kernels in order."""
    return _function("run_all")


def _function(name: str, unit: Unit = _FIRST) -> Any:
    loaded = _load(unit)
    if loaded.library is None:
        raise RuntimeError(f"there are no compiled kernels here: {loaded.reason}")
    function = getattr(loaded.library, name)
    function.restype = None  # no argtypes needed: bytes are passed as a pointer, int as int
    return function


def _load(first: Unit = _FIRST, *others: Unit) -> LoadedLibrary:
    """Load units that are not loaded yet; return the last one's library, or why one of them has none."""
    units = (first, *others)
    if not all(unit in LOADED for unit in units):
        with _LOADING:
            if missing := [unit for unit in dict.fromkeys((*units, _FIRST)) if unit not in LOADED]:
                LOADED.update(_loaded_or_reasons(missing))
    return next((LOADED[unit] for unit in units if LOADED[unit].library is None), LOADED[units[-1]])


def off_reason(switch: str) -> str | None:
    """Return that a variable of the environment switches kernels off; None: it does not."""
    value = os.environ.get(switch, "")
    return f"{switch} is {value}" if value.lower() in ("0", "no", "off", "false") else None


def _loaded_or_reasons(units: list[Unit]) -> dict[Unit, LoadedLibrary]:
    """Return the libraries of units that are not loaded yet, or why there are none."""
    if (reason := off_reason(SWITCH)) is None:
        try:
            check_sources()
            return _carried(units) or _compiled(units)
        except (NotCompiled, OSError) as error:
            reason = str(error)
            _LOG.warning(
                "graphdecode: steps will take 4 to 20 times as long, for there are no compiled kernels: %s "
                "(%s=0 does without them and says nothing)", " ".join(reason.split()), SWITCH,
            )  # fmt: skip
    return {unit: LoadedLibrary(None, None, None, reason) for unit in UNITS if unit not in LOADED}


def carried_name(instruction_set: Instructions, unit: Unit) -> str:
    """Return the file name of included kernels: instruction set, and a digest of system, options and sources."""
    options = [option for option in instruction_set.flags if option != "-mtune=native"]  # adds no instructions
    return f"{instruction_set.name}-{_digest([sys.platform, *options, *PORTABLE_FLAGS])}-{unit.file}"


def _digest(parts: Sequence[str]) -> str:
    """Return a digest of the build's inputs and all sources."""
    return hashlib.sha256("\n".join([*parts, _SOURCES]).encode()).hexdigest()[:24]


def _read_sources() -> str:
    """Return a digest of all sources.

    The operators' modules are among the sources, for the argument structs, which are the binary interface, follow from
    them. So kernels are found before operators that the model does not need are imported.
    """
    key = hashlib.sha256()
    for file in sorted(file for kind in ("c", "h", "py") for file in FOLDER.parent.glob(f"*/[!.]*.{kind}")):
        key.update(file.read_bytes())
    return key.hexdigest()


_SOURCES = _read_sources()  # before the operators' modules are imported


def check_sources() -> None:
    """Raise NotCompiled if the sources are not those that this process started with."""
    if _read_sources() != _SOURCES:
        raise NotCompiled(f"the kernels' sources in {FOLDER.parent} have changed since this process started")


def _carried_file(unit: Unit) -> Path:
    return CARRIED / carried_name(instructions(), unit)


def _carried(units: list[Unit]) -> dict[Unit, LoadedLibrary]:
    """Load the included libraries; none if one is missing or needs a newer system."""
    if not CARRIED.is_dir():
        return {}
    files = {unit: _carried_file(unit) for unit in units}
    if not all(file.exists() for file in files.values()):
        return {}
    try:
        loaded = {unit: ctypes.CDLL(str(file)) for unit, file in files.items()}
    except OSError as error:
        _LOG.warning("graphdecode: the kernels that the package carries cannot be loaded here (%s)", error)
        return {}
    _share(loaded)
    return {unit: LoadedLibrary(loaded[unit], files[unit], None, None) for unit in units}


def _share(loaded: Mapping[Unit, ctypes.CDLL]) -> None:
    """Connect libraries to the first one, which has what all share."""
    first = loaded[_FIRST] if _FIRST in loaded else LOADED[_FIRST].library
    for unit, library in loaded.items():
        for name, part in _SHARED.items() if unit != _FIRST else ():
            if part in (None, unit.part):
                getattr(library, f"share_{name}")(ctypes.cast(getattr(first, name), ctypes.c_void_p))


def _names(units: list[Unit], compiler: Compiler) -> dict[Unit, str]:
    """Return the file names of compiled libraries."""
    digest = _digest([*compiler.command, *include_flags(), compiler.processor, compiler.version])
    return {unit: f"{digest}-{unit.file}" for unit in units}


_FOLDERS: tuple[Callable[[], Path], ...] = (  # of compiled libraries, the next one where one cannot be written
    lambda: cache_folder() / "native",
    lambda: Path(tempfile.gettempdir()) / f"graphdecode-{os.geteuid()}",
)


def _compiled(units: list[Unit]) -> dict[Unit, LoadedLibrary]:
    """Load compiled libraries; missing ones are compiled in parallel."""
    compiler = Compiler.detect()
    named = _names(units, compiler)
    problems: list[str] = []
    for get_folder in _FOLDERS:
        path: Path | str = "no folder"
        try:
            path = get_folder()
            with closing(PrivateFolder(path)) as folder:
                _make_missing(folder, named, compiler)
                loaded = {unit: _opened(folder, name) for unit, name in named.items()}
        except OSError as error:  # not writable, or mounted noexec
            problems.append(f"{path}: {error}")
            continue
        if problems:
            _LOG.warning("graphdecode: compiled kernels are kept in %s (%s; %s names a better folder)", path,
                         "; ".join(problems), FOLDER_VARIABLE)  # fmt: skip
        _share(loaded)
        return {unit: LoadedLibrary(loaded[unit], Path(path) / named[unit], compiler, None) for unit in units}
    raise OSError(
        f"no folder for compiled kernels can be written ({'; '.join(problems)}); {FOLDER_VARIABLE} names another"
    )


def _opened(folder: PrivateFolder, name: str) -> ctypes.CDLL:
    descriptor = folder.opened(name)
    if descriptor is None:
        raise OSError("what was written cannot be read back")
    return opened_library(descriptor)


def _make_missing(folder: PrivateFolder, named: dict[Unit, str], compiler: Compiler) -> None:
    """Compile a folder's missing libraries, or wait for another process that does."""
    if all(map(folder.holds, named.values())):
        return
    with _announced(), folder.locked(_WAIT_SECONDS):
        missing = {unit: name for unit, name in named.items() if not folder.holds(name)}
        with folder.scratch() as scratch:
            compiler.compile({scratch / name: source_text(*unit) for unit, name in missing.items()}, include_flags())
            check_sources()  # what was compiled has the name of what was imported
            for name in missing.values():
                folder.put(scratch / name, name)


@contextmanager
def _announced() -> Iterator[None]:
    """Report a long compilation, perhaps by another process, on standard error; in a terminal with elapsed seconds."""
    done = threading.Event()

    def tell() -> None:
        line = f"graphdecode: compiling kernels for {instructions().name}, once; it takes ten seconds or more"
        seconds = _SILENT_SECONDS
        if done.wait(seconds):
            return
        print(line, file=sys.stderr, flush=True)
        if not sys.stderr.isatty():
            return
        while not done.wait(1):
            seconds += 1
            print(f"\r{seconds} s", end="", file=sys.stderr, flush=True)  # fits a narrow terminal
        print(file=sys.stderr)

    thread = threading.Thread(target=tell, name="compiling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@dataclass(slots=True, eq=False)
class NativeCall:
    """One kernel over fixed memory; a call runs it on as many threads as torch has in the calling thread.

    Attributes:
        function: the kernel.
        packed: its argument struct.
        keep_alive: tensors that the struct points into.
    """

    function: Any
    packed: bytes
    keep_alive: Sequence[Any]

    def __call__(self) -> None:
        """Run the kernel."""
        self.function(self.packed, torch.get_num_threads())


class NativeSequence:
    """Several kernels in order, in one call.

    Args:
        calls: the kernels.
    """

    __slots__ = ("_addresses", "_arguments", "_run_all", "calls")

    def __init__(self, calls: Sequence[NativeCall]) -> None:
        self.calls = tuple(calls)
        self._run_all = run_all()
        self._addresses = (ctypes.c_void_p * len(calls))(
            *(ctypes.cast(call.function, ctypes.c_void_p).value for call in calls)
        )
        self._arguments = (ctypes.c_char_p * len(calls))(*(call.packed for call in calls))

    def __call__(self) -> None:
        """Run them."""
        self._run_all(self._addresses, self._arguments, len(self.calls), torch.get_num_threads())


def joined(calls: Iterable[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """Return the same calls, with adjacent compiled ones joined to a `NativeSequence`."""
    result: list[Callable[[], Any]] = []
    single = (part for call in calls for part in (call.calls if isinstance(call, NativeSequence) else (call,)))
    for is_native, group in groupby(single, lambda call: isinstance(call, NativeCall)):
        adjacent: list[Any] = list(group)
        result += [NativeSequence(adjacent)] if is_native else adjacent
    return result
