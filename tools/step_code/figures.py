"""Derives from a kernel's machine code its speed, and the order of its wait, reads, writes and trigger.

Latencies are those of one warp that issues in order, with idle memory. A loop counts once; of a branch the slower side
counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from step_code.sass import Code, Instruction

WAIT, TRIGGER = "ACQBULK", "PREEXIT"
_LOADS, _STORES, _ATOMICS = ("LDG", "LDGSTS", "CCTL"), ("STG", "RED"), ("ATOMG", "ATOM")
# cycles until a result is available (Luo et al., Benchmarking and Dissecting the NVIDIA Hopper GPU Architecture via
# Microbenchmarking, 2024): L2 takes 260, HBM in 480 and more, and a GPU-wide fence half a microsecond
_GLOBAL, _FENCE, _SHARED, _BARRIER, _OTHER = 400, 700, 30, 20, 24
_TENSOR_CYCLES = 8  # per scheduler, of m16n8k16 in 16 bits with mma.sync
_HALF_RATE = ("MUFU", "F2F", "F2I", "I2F", "SHFL", "POPC")  # at most a quarter of the lanes
_QUARTER_CYCLES = 4
_WARP = 32
_LINE = 128  # bytes that a prefetch brings to the L2 cache
_SCHEDULERS = 4  # per multiprocessor
_CONSTANT = re.compile(r"c\[0x0\]\[0x([0-9a-f]+)\]")
_REGISTER = re.compile(r"\b(U?R\d+)\b")
_ADDRESS = re.compile(r"(?<!desc)\[([^\]]*)\]")


@dataclass(frozen=True)
class Figures:
    """A kernel's figures.

    Attributes:
        registers: per thread.
        stack: bytes per thread, spilled or indexed.
        shared: bytes per program.
        waits: it starts early, and waits for the previous kernel.
        waits_always: on every path to its end.
        triggers: it lets the next kernel start early.
        triggers_late: it does so only after its wait.
        early_loads: pointer arguments that it reads before the wait.
        early_stores: stores and atomic operations before the wait.
        early_bytes: requested by a warp before the wait; a loop counts once.
        early_loop: a loop requests more before the wait.
        written: pointer arguments that it writes.
        levels: dependent loads in sequence, after the wait if there is one.
        barriers: program-wide, on the longest path.
        fences: GPU-wide, on the longest path.
        latency_cycles: of the longest path, from the wait on if there is one.
        loop_bytes_per_clock: requested by one multiprocessor in the loop that reads most; 0: no such loop.
        loop_width: bytes that a thread reads at once in it.
    """

    registers: int
    stack: int
    shared: int
    waits: bool
    waits_always: bool
    triggers: bool
    triggers_late: bool
    early_loads: tuple[str, ...]
    early_stores: int
    early_bytes: int
    early_loop: bool
    written: tuple[str, ...]
    levels: int
    barriers: int
    fences: int
    latency_cycles: int
    loop_bytes_per_clock: float
    loop_width: int

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Figures:
        """Return the inverse of `dataclasses.asdict`, also after JSON."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
        }
        return cls(**given)


def figures_of(code: Code, shared: int, pointers: Mapping[int, str]) -> Figures:
    """Return the figures of a kernel.

    Args:
        shared: bytes per program.
        pointers: names of the arguments that are pointers, by their offset in the constant bank.
    """
    instructions, live = code.instructions, code.reached()
    before = code.reached(stop=WAIT)
    present = {instructions[place].operation for place in live}
    waits = WAIT in present
    early = sorted(before) if waits else []
    origins = _origins(code, pointers)
    loads = [place for place in early if instructions[place].operation in _LOADS]
    path = _longest_path(code, live)
    rate, width = _loop_rate(code)
    return Figures(
        registers=code.registers,
        stack=code.stack,
        shared=shared,
        waits=waits,
        waits_always=waits and not any(instructions[place].operation == "EXIT" for place in before),
        triggers=TRIGGER in present,
        triggers_late=waits and not any(instructions[place].operation == TRIGGER for place in before),
        early_loads=_names(origins, loads),
        early_stores=sum(instructions[place].operation in (*_STORES, *_ATOMICS) for place in early),
        early_bytes=_WARP * sum(_read_bytes(instructions[place]) for place in loads),
        early_loop=any(place in loop for loop in code.inner_loops for place in loads),
        written=_names(origins, [p for p in live if instructions[p].operation in (*_STORES, *_ATOMICS)]),
        levels=path.level,
        barriers=path.barriers,
        fences=path.fences,
        latency_cycles=path.clock,
        loop_bytes_per_clock=rate,
        loop_width=width,
    )


def _read_bytes(instruction: Instruction) -> int:
    """Return the bytes that a thread loads or prefetches."""
    return _LINE if instruction.operation == "CCTL" else instruction.width


def _names(origins: Mapping[int, frozenset[str]], places: list[int]) -> tuple[str, ...]:
    return tuple(sorted({name for place in places for name in origins.get(place, frozenset())}))


def _origins(code: Code, pointers: Mapping[int, str]) -> dict[int, frozenset[str]]:
    """Return the arguments that the address of each access to global memory is computed from.

    Registers are followed in the order of addresses.
    """
    nothing: frozenset[str] = frozenset()
    held: dict[str, frozenset[str]] = {}
    found: dict[int, frozenset[str]] = {}
    for place, instruction in enumerate(code.instructions):
        if not instruction.operands:
            continue
        is_access = instruction.operation in (*_LOADS, *_STORES, *_ATOMICS)
        if is_access:
            address = " ".join(_ADDRESS.findall(" ".join(instruction.operands)))
            parts = _REGISTER.findall(address if instruction.operation != "LDGSTS" else address.split(" ", 1)[-1])
            found[place] = nothing.union(*(held.get(part, nothing) for part in parts))
        target = _REGISTER.match(instruction.operands[0])
        if target is None or instruction.operation in _STORES:
            continue
        if is_access:
            given = nothing  # an index; its own load is in the list
        else:
            sources = " ".join(instruction.operands[1:])
            given = nothing.union(*(held.get(part, nothing) for part in _REGISTER.findall(sources)))
            given |= {pointers[at] for at in (int(text, 16) for text in _CONSTANT.findall(sources)) if at in pointers}
        if instruction.predicate:
            given |= held.get(target[1], nothing)
        held[target[1]] = given
        wide = instruction.width >= 8 or "WIDE" in instruction.name or instruction.operation == "CS2R"
        if wide:
            prefix, number = target[1].rstrip("0123456789"), int(target[1].lstrip("UR"))
            for more in range(1, max(instruction.width // 4, 2)):
                held[f"{prefix}{number + more}"] = nothing if "LDC" in instruction.name else given
            if "LDC" in instruction.name:  # two adjacent arguments
                for text in _CONSTANT.findall(instruction.operands[1]):
                    for more in range(1, instruction.width // 8):
                        name = pointers.get(int(text, 16) + 8 * more)
                        held[f"{prefix}{number + 2 * more}"] = frozenset([name] if name else [])
    return found


@dataclass
class _Moment:
    """The state of a warp: cycles, dependent loads so far, and pending operations."""

    clock: int = 0
    level: int = 0
    barriers: int = 0
    fences: int = 0
    boards: dict[int, tuple[int, int]] = field(default_factory=dict)  # scoreboard -> clock and level of its release
    groups: list[tuple[int, int]] = field(default_factory=list)  # asynchronous copies, the oldest first
    copies: tuple[int, int] = (0, 0)  # not in a group yet

    def copied(self) -> _Moment:
        return replace(self, boards=dict(self.boards), groups=list(self.groups))

    def joined(self, other: _Moment) -> _Moment:
        """Return the maximum of both in each field."""
        boards = self.boards.keys() | other.boards.keys()
        never = (0, 0)
        return _Moment(
            max(self.clock, other.clock),
            max(self.level, other.level),
            max(self.barriers, other.barriers),
            max(self.fences, other.fences),
            {board: _later(self.boards.get(board, never), other.boards.get(board, never)) for board in boards},
            list(self.groups if len(self.groups) >= len(other.groups) else other.groups),
            _later(self.copies, other.copies),
        )

    def wait_for(self, ready: tuple[int, int]) -> None:
        self.clock, self.level = max(self.clock, ready[0]), max(self.level, ready[1])

    def issue(self, instruction: Instruction) -> None:
        """Wait for an instruction's operands, and issue it."""
        for board in instruction.waits:
            self.wait_for(self.boards.pop(board, (0, 0)))
        operation = instruction.operation
        if operation == WAIT:  # all pending loads are done: the previous kernel took longer
            self.clock, self.level, self.barriers, self.fences = 0, 0, 0, 0
            self.boards, self.groups, self.copies = {}, [], (0, 0)
        elif operation == "DEPBAR" and self.groups:
            left = int(instruction.operands[1], 16) if len(instruction.operands) > 1 else 0
            for group in self.groups[: len(self.groups) - left]:
                self.wait_for(group)
            self.groups = self.groups[len(self.groups) - left :] if left else []
        elif operation == "LDGDEPBAR":
            self.groups.append(self.copies)
            self.copies = (0, 0)
        elif operation == "BAR":
            self.barriers += 1
            self.clock += _BARRIER
        elif operation == "MEMBAR" and not instruction.name.endswith("CTA"):  # a program-wide one does not involve L2
            self.fences += 1
            self.clock += _FENCE
        self._hold(instruction)
        self.clock += max(instruction.stall, 1)

    def _hold(self, instruction: Instruction) -> None:
        operation, board = instruction.operation, instruction.writes
        is_global = operation in ("LDG", "LDGSTS", *_ATOMICS)
        latency = _GLOBAL if is_global else _SHARED if operation in ("LDS", "LDSM") else _OTHER
        ready = (self.clock + latency, self.level + is_global)
        if operation == "LDGSTS":
            self.copies = _later(self.copies, ready)
        elif board is not None and operation != "LDGDEPBAR":
            self.boards[board] = _later(self.boards.get(board, (0, 0)), ready)


def _later(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), max(one[1], other[1])


def _longest_path(code: Code, live: set[int]) -> _Moment:
    """Return the state at the last exit."""
    moments: dict[int, _Moment] = {0: _Moment()}
    last = _Moment()
    for place in sorted(live):
        now = moments.pop(place, None)
        if now is None:
            continue  # entered only from behind: the rest of a loop
        instruction = code.instructions[place]
        now.issue(instruction)
        if instruction.operation == "EXIT":
            last = last.joined(now)
        ahead = [behind for behind in code.next_places(place) if behind > place]
        for behind in ahead:
            known = moments.get(behind)
            own = now if len(ahead) == 1 else now.copied()
            moments[behind] = own if known is None else known.joined(own)
    return last


def _loop_rate(code: Code) -> tuple[float, int]:
    """Return bytes per clock and multiprocessor, and bytes per read of a thread, of the loop that reads most."""
    best = (0.0, 0)
    most = 0
    for loop in code.inner_loops:
        inside = [code.instructions[place] for place in loop]
        reads = [each for each in inside if each.operation in ("LDG", "LDGSTS")]
        nbytes = _WARP * sum(each.width for each in reads)
        if nbytes > most:
            most = nbytes
            cycles = max(len(inside), _pipe_cycles(inside))
            best = _SCHEDULERS * nbytes / cycles, max(each.width for each in reads)
    return best


def _pipe_cycles(inside: list[Instruction]) -> int:
    """Return the cycles of the narrowest unit for one warp of each scheduler."""
    tensor = sum(each.operation in ("HMMA", "QMMA", "IMMA") for each in inside) * _TENSOR_CYCLES
    slow = sum(each.operation in _HALF_RATE for each in inside) * _QUARTER_CYCLES
    return max(tensor, slow)
