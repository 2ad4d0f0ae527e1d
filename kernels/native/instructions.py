"""The instruction set of compiled kernels: the fastest that the processor has, or the one that GRAPHDECODE_ISA names.

Naming another set helps to find bugs, and shows what other processors do.
"""

import functools
import os
from collections.abc import Mapping
from typing import NamedTuple

from . import system

VARIABLE = "GRAPHDECODE_ISA"


class Instructions(NamedTuple):
    """An instruction set.

    Attributes:
        name: value of GRAPHDECODE_ISA.
        flags: options of GCC and Clang that select exactly this set.
    """

    name: str
    flags: tuple[str, ...]


class MissingInstructions(ValueError):
    """GRAPHDECODE_ISA names an instruction set that this processor lacks."""


# x86-64 sets: base set, and further extensions by Linux's names, with compiler flags; bf16 does not need VNNI and VBMI,
# but uses them
_X86: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "portable": ((), {}),
    "avx2": ((), {"bmi1": "-mbmi"} | {part: f"-m{part}" for part in ("avx", "avx2", "fma", "f16c", "bmi2")}),
    "avx512": (("avx2",), {f"avx512{part}": f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl")}),
    "avx512_vnni": (("avx2", "avx512"), {"avx512_vnni": "-mavx512vnni", "avx512vbmi": "-mavx512vbmi"}),
    "avx512_bf16": (("avx2", "avx512"), {"avx512_bf16": "-mavx512bf16"}),
    "amx": (("avx2", "avx512", "avx512_bf16"), {"amx_tile": "-mamx-tile", "amx_bf16": "-mamx-bf16"}),
}
# 64-bit Arm sets: required extensions by Linux's names, and compiler flags
_ARM: Mapping[str, tuple[set[str], tuple[str, ...]]] = {
    "portable": (set(), ("-march=armv8-a", "-DPORTABLE")),
    "neon": ({"asimd"}, ("-march=armv8-a",)),
    "neon_dotprod": ({"asimd", "asimddp"}, ("-march=armv8.2-a+dotprod",)),
    "neon_bf16": ({"asimd", "asimddp", "bf16"}, ("-march=armv8.2-a+dotprod+bf16",)),
}
NAMES = tuple(dict.fromkeys((*_X86, *_ARM)))


@functools.cache
def instructions() -> Instructions:
    """Return the set named by GRAPHDECODE_ISA, else the processor's fastest; constant for the process.

    Raises:
        MissingInstructions: this processor lacks the set; the message lists what it has.
    """
    return chosen(os.environ.get(VARIABLE), available())


def chosen(name: str | None, sets: Mapping[str, Instructions]) -> Instructions:
    """Return a set by name; an empty name: the fastest.

    Raises:
        MissingInstructions: the set is not available.
    """
    if not name:
        return list(sets.values())[-1]
    if name not in sets:
        reason = "this processor lacks; it" if name in NAMES else f"is none of {', '.join(NAMES)}; this processor"
        raise MissingInstructions(f"{VARIABLE} is {name!r}, which {reason} has {', '.join(sets)}")
    return sets[name]


def available() -> Mapping[str, Instructions]:
    """Return the processor's sets by name, the fastest last."""
    if system.is_x86():
        return sets_of_x86(system.extensions(), has_slow_pairs=system.is_intel())
    if system.is_arm():
        return sets_of_arm(system.extensions())
    return {"portable": Instructions("portable", ())}


def sets_of_x86(extensions: set[str], *, has_slow_pairs: bool = False) -> Mapping[str, Instructions]:
    """Return the sets of an x86-64 with these extensions (Linux's names), the fastest last.

    `has_slow_pairs`: it multiplies pairs of bf16 more slowly than floats, as Intel's processors do (half as fast; AMD's
    twice as fast); so that set is not the fastest, unless there are tiles.
    """
    sets: dict[str, Instructions] = {}
    flags: list[str] = []
    for name, (below, needed) in _X86.items():
        if not needed.keys() <= extensions or not sets.keys() >= set(below):
            continue
        flags += needed.values()
        # tune for this processor; adds no instructions
        tuned = ["-mtune=native"] if needed else []
        wide = ["-mprefer-vector-width=512"] if "avx512" in (*below, name) else []  # the width of the kernels' vectors
        flags_of_set = ("-march=x86-64", *tuned, *flags, *wide)
        sets[name] = Instructions(name, flags_of_set)
    *others, fastest = sets
    if has_slow_pairs and fastest == "avx512_bf16":
        sets[others[-1]] = sets.pop(others[-1])
    return sets


def sets_of_arm(extensions: set[str]) -> Mapping[str, Instructions]:
    """Return the sets of a 64-bit Arm with these extensions (Linux's names)."""
    sets = {name: flags for name, (needed, flags) in _ARM.items() if needed <= extensions}
    return {name: Instructions(name, flags) for name, flags in sets.items()}
