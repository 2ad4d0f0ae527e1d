"""Parses a kernel's machine code: instructions with their control words, and the control flow.

NVIDIA's `cuobjdump -sass` prints an instruction and its 128 bits. The control word in the upper bits says how many
cycles the warp stalls, which of six scoreboards the instruction waits for, and which it holds until it has read its
operands or written its result (Jia et al., Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking, 2018).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import triton

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_NOTES = r"(?:\s+[&?]\w\S*)*"  # such as "&wr=0x0 ?trans5": CUDA 12.8 prints the control word of sm_120 in words too
_LINE = re.compile(rf"\s*/\*([0-9a-f]{{4,}})\*/\s+(.*?){_NOTES}\s*;\s*/\* 0x([0-9a-f]{{16}}) \*/")
_UPPER = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_NONE = 7  # no scoreboard
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_JUMPS = ("BRA", "BSSY", "CALL", "BRX")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        address: bytes from the beginning of the kernel.
        predicate: such as "@!P0"; empty: it is always executed.
        name: with its modifiers, such as "LDG.E.128".
        operands: as printed.
        stall: cycles until the warp may issue the next one.
        waits: scoreboards that must be free.
        reads: scoreboard that is held until the operands were read; None: none.
        writes: scoreboard that is held until the result is there; None: none.
        target: address that it may jump to; None: it is no jump.
    """

    address: int
    predicate: str
    name: str
    operands: tuple[str, ...]
    stall: int
    waits: frozenset[int]
    reads: int | None
    writes: int | None
    target: int | None

    @property
    def operation(self) -> str:
        """The name without modifiers."""
        return self.name.partition(".")[0]

    @property
    def width(self) -> int:
        """Bytes that a thread moves, if it moves any."""
        return next((_WIDTHS[part] for part in self.name.split(".")[1:] if part in _WIDTHS), 4)

    @property
    def is_conditional(self) -> bool:
        """Whether some threads may skip it, by its predicate or one among its operands."""
        return bool(self.predicate) or (bool(self.operands) and re.match(r"!?U?P\d", self.operands[0]) is not None)


@dataclass(frozen=True)
class Code:
    """A kernel's code.

    Attributes:
        instructions: in the order of their addresses.
        registers: of a thread.
        stack: bytes of a thread; more than 0 where registers were spilled.
    """

    instructions: tuple[Instruction, ...]
    registers: int
    stack: int

    @classmethod
    def of(cls, cubin: bytes) -> Code:
        """Disassemble a kernel.

        Raises:
            RuntimeError: no instruction was recognized.
        """
        printed = _printed(cubin, "-sass", "-res-usage")
        instructions = tuple(instructions_in(printed.splitlines()))
        if not instructions:
            raise RuntimeError(f"no instruction was recognized in cuobjdump's output:\n{printed[:1000]}")
        return cls(instructions, *_usage(printed))

    @cached_property
    def _places(self) -> dict[int, int]:
        return {instruction.address: place for place, instruction in enumerate(self.instructions)}

    def next_places(self, place: int) -> list[int]:
        """Return the possible successors of an instruction; a call counts as returning at once."""
        instruction = self.instructions[place]
        behind = [place + 1] if place + 1 < len(self.instructions) else []
        if instruction.operation in ("EXIT", "RET"):
            return behind if instruction.is_conditional else []
        if instruction.operation == "BRA" and instruction.target is not None:
            there = [self._places[instruction.target]]
            return there + behind if instruction.is_conditional else there
        return behind

    def reached(self, stop: str = "") -> set[int]:
        """Return the positions reachable before an instruction `stop` that all threads execute."""
        seen: set[int] = set()
        ahead = [0]
        while ahead:
            place = ahead.pop()
            instruction = self.instructions[place]
            if place in seen or (instruction.operation == stop and not instruction.is_conditional):
                continue
            seen.add(place)
            ahead += self.next_places(place)
        return seen

    @property
    def inner_loops(self) -> list[range]:
        """The positions of each innermost loop."""
        live = self.reached()
        loops = [
            range(there, place + 1)
            for place in sorted(live)
            for there in self.next_places(place)
            if there <= place and self.instructions[place].operation == "BRA"
        ]
        return [loop for loop in loops if not any(_is_inside(other, loop) for other in loops)]


def _is_inside(inner: range, outer: range) -> bool:
    return inner != outer and outer.start <= inner.start and inner.stop <= outer.stop


def usage_of(cubin: bytes) -> tuple[int, int]:
    """Return registers and stack bytes per thread, without reading the code."""
    return _usage(_printed(cubin, "-res-usage"))


def _usage(printed: str) -> tuple[int, int]:
    found = _USAGE.search(printed)
    if found is None:
        raise RuntimeError(f"no registers in cuobjdump's output:\n{printed[:1000]}")
    return int(found[1]), int(found[2])


def _printed(cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(BINARIES / "cuobjdump"), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions_in(lines: list[str]) -> Iterator[Instruction]:
    """Yield the instructions in cuobjdump's output, skipping other lines."""
    for line, below in pairwise(lines):
        found, upper = _LINE.match(line), _UPPER.match(below)
        if found is None or upper is None:
            continue
        text, control = found[2], int(upper[1], 16)
        predicate, _, rest = text.partition(" ") if text.startswith("@") else ("", "", text)
        name, _, operands = rest.strip().partition(" ")
        parts = tuple(part.strip() for part in operands.split(",")) if operands else ()
        is_jump = name.partition(".")[0] in _JUMPS and parts and parts[-1].startswith("0x")
        yield Instruction(
            address=int(found[1], 16),
            predicate="" if predicate in ("@PT", "@UPT") else predicate,
            name=name,
            operands=parts,
            stall=control >> 41 & 15,
            waits=frozenset(board for board in range(6) if control >> 52 + board & 1),
            reads=_board(control >> 49 & 7),
            writes=_board(control >> 46 & 7),
            target=int(parts[-1], 16) if is_jump else None,
        )


def _board(number: int) -> int | None:
    return None if number == _NONE else number
