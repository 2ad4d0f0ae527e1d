"""Which of a processor's instructions the compiled kernels may use: the highest set that it has, or one that is named.

Who looks for a bug, or wants to know what another processor does, names a lower set than this one has in
GRAPHDECODE_ISA. Nothing above a set is compiled for it.
"""

import functools
import os
from collections.abc import Mapping
from typing import NamedTuple

from . import system

VARIABLE = "GRAPHDECODE_ISA"


class Instructions(NamedTuple):
    """A set of instructions.

    Attributes:
        name: as GRAPHDECODE_ISA has it.
        flags: of GCC and Clang, with which they use these and no others.
        has_bf16: it multiplies bf16.
    """

    name: str
    flags: tuple[str, ...]
    has_bf16: bool = False


class MissingInstructions(ValueError):
    """GRAPHDECODE_ISA names no set of instructions that this processor has."""


# a set of x86-64: what it is built on, and its own extensions as Linux names them, with the compiler's flags; bf16 does
# without VNNI and VBMI, and uses them where they are
_X86: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "portable": ((), {}),
    "avx2": ((), {"bmi1": "-mbmi"} | {part: f"-m{part}" for part in ("avx", "avx2", "fma", "f16c", "bmi2")}),
    "avx512": (("avx2",), {f"avx512{part}": f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl")}),
    "avx512_vnni": (("avx2", "avx512"), {"avx512_vnni": "-mavx512vnni", "avx512vbmi": "-mavx512vbmi"}),
    "avx512_bf16": (("avx2", "avx512"), {"avx512_bf16": "-mavx512bf16"}),
    "amx": (("avx2", "avx512", "avx512_bf16"), {"amx_tile": "-mamx-tile", "amx_bf16": "-mamx-bf16"}),
}
# a set of 64-bit Arm: the extensions that it needs, as Linux names them, and the compiler's flags
_ARM: Mapping[str, tuple[set[str], tuple[str, ...]]] = {
    "portable": (set(), ("-march=armv8-a", "-DPORTABLE")),
    "neon": ({"asimd"}, ("-march=armv8-a",)),
    "neon_dotprod": ({"asimd", "asimddp"}, ("-march=armv8.2-a+dotprod",)),
    "neon_bf16": ({"asimd", "asimddp", "bf16"}, ("-march=armv8.2-a+dotprod+bf16",)),
}
NAMES = tuple(dict.fromkeys((*_X86, *_ARM)))


@functools.cache
def instructions() -> Instructions:
    """Return the set that GRAPHDECODE_ISA names, else the highest that this processor has; one for a process's life.

    Raises:
        MissingInstructions: this processor has no such set; the message says which it has.
    """
    return chosen(os.environ.get(VARIABLE), available())


def chosen(name: str | None, there: Mapping[str, Instructions]) -> Instructions:
    """Return one of the sets that are there; no name is the last of them.

    Raises:
        MissingInstructions: it is not there.
    """
    if not name:
        return list(there.values())[-1]
    if name not in there:
        why = "is more than this processor has" if name in NAMES else f"is none of {', '.join(NAMES)}"
        raise MissingInstructions(f"{VARIABLE} is {name!r}, which {why}; it has {', '.join(there)}")
    return there[name]


def available() -> Mapping[str, Instructions]:
    """Return the sets that this processor has, by their names, the highest last."""
    if system.is_x86():
        return sets_of_x86(system.extensions())
    if system.is_arm():
        return sets_of_arm(system.extensions())
    return {"portable": Instructions("portable", ())}


def sets_of_x86(extensions: set[str]) -> Mapping[str, Instructions]:
    """Return the sets of a processor with these extensions, as Linux names them."""
    found: dict[str, Instructions] = {}
    flags: list[str] = []
    for name, (below, own) in _X86.items():
        if not own.keys() <= extensions or not found.keys() >= set(below):
            continue
        flags += own.values()
        # for the processor at hand among those that have the set, which adds no instruction
        tuned = ["-mtune=native"] if own else []
        wide = ["-mprefer-vector-width=512"] if "avx512" in (*below, name) else []  # as the kernels' vectors
        flags_of_set = ("-march=x86-64", *tuned, *flags, *wide)
        found[name] = Instructions(name, flags_of_set, has_bf16="avx512_bf16" in (*below, name))
    return found


def sets_of_arm(extensions: set[str]) -> Mapping[str, Instructions]:
    """Return the sets of a 64-bit Arm with these extensions, as Linux names them."""
    there = {name: flags for name, (needed, flags) in _ARM.items() if needed <= extensions}
    return {name: Instructions(name, flags, has_bf16=name == "neon_bf16") for name, flags in there.items()}
