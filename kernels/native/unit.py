"""The source text that all kernels in C are compiled from: what they are given, made from the operations' signatures,
and the sources themselves, once for each element type. Each element type may be an object of its own.
"""

import importlib
from pathlib import Path

from .signature import CODES, WIDE_CODE, Signature

FOLDER = Path(__file__).parent  # of the headers; a source stands beside the operation of its name
_PACKAGE = __package__.rpartition(".")[0]
_END = (
    "void run_all(void (**kernels)(const void *, int), const void **args, int count, int threads) {\n"
    "    for (int i = 0; i < count; i++) kernels[i](args[i], threads);\n}\n"
)
_KINDS = ("F32", "BF16", "F16")  # of elements, as the sources call them
_STRUCTS: dict[str, str] = {}  # both are filled while the operations' files are imported, and then read
_CONSTANTS: dict[str, int] = {}


def declare(signature: Signature, constants: dict[str, int]) -> None:
    """Let the sources know an operation's arguments, and some integers by their names.

    Raises:
        ValueError: a name stands for two integers.
    """
    _STRUCTS[signature.name] = signature.c_struct
    for name, value in (constants | signature.choices).items():
        if _CONSTANTS.setdefault(name, value) != value:
            raise ValueError(f"{name} is {_CONSTANTS[name]} for one kernel and {value} for another")


def include_flags() -> list[str]:
    """Return the compiler's options that make the unit's includes found."""
    return [f"-I{FOLDER}", f"-I{FOLDER.parent}"]


def object_texts() -> list[str]:
    """Return the same as `unit_text` in parts, which are compiled each for itself and linked."""
    return [unit_text((kind,)) for kind in _KINDS]


def unit_text(kinds: tuple[str, ...] = _KINDS) -> str:
    """Return the source text of the kernels for some element types, but for what it includes."""
    sources = sorted(FOLDER.parent.glob("*/*.c"))
    for source in sources:
        importlib.import_module(f"{_PACKAGE}.{source.parent.name}.{source.stem}")
    codes = {f"CODE_{str(dtype).removeprefix('torch.')}".upper(): value for dtype, value in CODES.items()}
    codes["CODE_WIDE"] = WIDE_CODE
    constants = ", ".join(f"{name} = {value}" for name, value in sorted((_CONSTANTS | codes).items()))
    structs = "".join(_STRUCTS[name] for name in sorted(_STRUCTS))
    includes = "".join(f'#include "{source.parent.name}/{source.name}"\n' for source in sources)
    is_first = _KINDS[0] in kinds
    threads = "" if is_first else "#define THREADS_ELSEWHERE\n"
    given = f'{threads}enum {{ {constants} }};\n#include "native.h"\n{structs}'
    once_each = "".join(f"#define ELEMENT_{kind}\n{includes}#undef ELEMENT_{kind}\n" for kind in kinds)
    return f"{given}{once_each}{_END if is_first else ''}"


def sources_bytes() -> bytes:
    """Return what the unit includes."""
    return b"".join(file.read_bytes() for file in sorted(FOLDER.parent.glob("*/*.[ch]")))
