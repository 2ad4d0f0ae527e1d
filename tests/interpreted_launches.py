"""Triton's interpreter made strict: addresses are checked, programs run in any order, and an early start is early.

Every load, store and atomic operation of a kernel must lie inside the storage of one of the tensors that it was given;
the interpreter itself would read and write whatever is there. Its programs run in an order that a seed picks: a GPU
promises none. Within `early_starts`, launches behave as programmatic dependent launches do at their worst: what a
kernel does before it waits happens before the kernel in front of it has begun its own work.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from interpreted_assembly import create_inline_asm
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, InterpreterError

_ACCESSES = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")


class WrongAddress(Exception):
    """A kernel reached outside of what it was given."""


@dataclass
class Bounds:
    """The storages of the tensors of a launch: where each begins, and where it ends."""

    begins: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    ends: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.uint64))

    @classmethod
    def of(cls, values: list[Any]) -> Bounds:
        """Return the bounds of all tensors among some arguments."""
        storages = {value.untyped_storage() for value in _tensors(values)}
        spans = sorted({(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages})
        return cls(*(np.array(column, dtype=np.uint64) for column in zip(*spans, strict=True))) if spans else cls()

    def check(self, what: str, pointers: np.ndarray, mask: np.ndarray | None, size: int) -> None:
        """Raise where an access reaches outside."""
        wanted = np.asarray(pointers).astype(np.uint64).reshape(-1)
        if mask is not None:
            wanted = wanted[np.broadcast_to(np.asarray(mask), np.shape(pointers)).reshape(-1).astype(bool)]
        if not wanted.size:
            return
        place = np.searchsorted(self.begins, wanted, side="right").astype(np.int64) - 1
        inside = place >= 0
        inside[inside] = wanted[inside] + np.uint64(size) <= self.ends[place[inside]]
        if not inside.all():
            wrong = int(wanted[~inside][0])
            nearest = min((abs(wrong - int(edge)) for edge in (*self.begins, *self.ends)), default=0)
            raise WrongAddress(f"{what} of {size} bytes, {nearest} bytes from the nearest tensor of the launch")


def _tensors(values: list[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif hasattr(value, "base") and isinstance(value.base, torch.Tensor):
            yield value.base
        elif isinstance(value, tuple):
            yield from _tensors(list(value))


class _Program(threading.Thread):
    """One program, which runs while it is told to, and until it waits."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._body = run
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.waits = self.is_over = False
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        self._go.acquire()
        try:
            self._body()
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._stopped.release()

    def go_on(self) -> None:
        """Run until the program waits, or is over."""
        self._go.release()
        self._stopped.acquire()
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        """What the program itself calls: let others run, until it is told to go on."""
        self.waits = True
        self._stopped.release()
        self._go.acquire()


class Launches:
    """Launches of the interpreter, and in which order what they do happens.

    Args:
        seed: of the order of programs.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.bounds = Bounds()
        self.is_early = False
        self._pending: _Pending | None = None
        self.running: _Program | None = None

    def programs(self, grid: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the programs of a grid in an order that a GPU may take."""
        programs = list(product(*(range(size) for size in grid)))
        self.draw.shuffle(programs)
        return programs

    def launch(self, own: _Pending, *, is_pdl: bool) -> None:
        """Run a launch, or as much of it as may happen now."""
        if not self.is_early:
            own.finish()
            return
        before, self._pending = self._pending, own
        if is_pdl:  # all that it does before it waits, while the one before it has done no more than that itself
            own.until_they_wait()
        if before is not None:
            before.finish()

    def finish(self) -> None:
        """Run what is still to be run."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish()

    def wait(self) -> None:
        """What `gdc_wait` means here."""
        if self.running is not None:
            self.running.wait()


class _Pending:
    """A launch, some of which may still have to be run."""

    def __init__(
        self, launches: Launches, executor: GridExecutor, values: list[Any], arguments: dict[str, Any]
    ) -> None:
        grid = executor.grid(arguments) if callable(executor.grid) else executor.grid
        self._launches, self._fn, self._arguments = launches, executor.fn, arguments
        self._grid = (*grid, 1, 1)[:3]
        self._bounds = Bounds.of(values)
        self._paused: list[tuple[tuple[int, ...], _Program]] | None = None

    def until_they_wait(self) -> None:
        """Run each program until it waits; one that never does runs whole."""
        self._paused = []
        with self._interpreted():
            for place in self._launches.programs(self._grid):
                program = _Program(lambda: self._fn(**self._arguments))
                self._go_on(place, program)
                if not program.is_over:
                    self._paused.append((place, program))

    def finish(self) -> None:
        """Run the rest."""
        with self._interpreted():
            if self._paused is None:
                for place in self._launches.programs(self._grid):
                    interpreter.interpreter_builder.set_grid_idx(*place)
                    self._fn(**self._arguments)
                return
            self._launches.draw.shuffle(self._paused)
            for place, program in self._paused:
                while not program.is_over:
                    self._go_on(place, program)

    def _go_on(self, place: tuple[int, ...], program: _Program) -> None:
        interpreter.interpreter_builder.set_grid_idx(*place)
        self._launches.running = program
        try:
            program.go_on()
        finally:
            self._launches.running = None

    @contextmanager
    def _interpreted(self) -> Iterator[None]:
        scope = interpreter._patch_lang(self._fn)
        self._launches.bounds = self._bounds
        interpreter.interpreter_builder.set_grid_dim(*self._grid)
        try:
            yield
        except Exception as error:
            raise InterpreterError(repr(error)) from error
        finally:
            scope.restore()


def _in_any_order(launches: Launches) -> Callable[..., None]:
    """Return what stands for the interpreter's own way through a grid."""

    def call(executor: GridExecutor, *given: Any, **keywords: Any) -> None:
        is_pdl = bool(keywords.get("launch_pdl"))
        known = inspect.getfullargspec(executor.fn)
        named = {name: value for name, value in keywords.items() if name in (*known.args, *known.kwonlyargs)}
        bound = inspect.getcallargs(executor.fn, *given, **named)
        arguments = {
            name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
            for name, value in bound.items()
        }
        launches.launch(_Pending(launches, executor, list(bound.values()), arguments), is_pdl=is_pdl)

    return call


def _checked(launches: Launches, name: str) -> Callable[..., Any]:
    """Return an access of the interpreter that is refused outside of the launch's tensors."""
    original = getattr(InterpreterBuilder, name)
    parameters = list(inspect.signature(original).parameters)
    pointer_at = next(place for place, parameter in enumerate(parameters) if parameter in ("ptr", "ptrs"))
    mask_at = parameters.index("mask") if "mask" in parameters else None

    def access(*given: Any) -> Any:
        pointers = given[pointer_at]
        mask = None if mask_at is None else given[mask_at].data
        bits = pointers.get_element_ty().primitive_bitwidth
        launches.bounds.check(name.removeprefix("create_"), pointers.data, mask, max(bits // 8, 1))
        return original(*given)

    return access


@contextmanager
def strict(seed: int) -> Iterator[Launches]:
    """Check addresses and shuffle programs, of all launches in Triton's interpreter.

    Args:
        seed: of the order of programs.
    """
    launches = Launches(seed)
    with pytest.MonkeyPatch.context() as patch:
        for name in _ACCESSES:
            patch.setattr(InterpreterBuilder, name, _checked(launches, name))
        patch.setattr(GridExecutor, "__call__", _in_any_order(launches))
        patch.setattr(InterpreterBuilder, "create_inline_asm", create_inline_asm)
        yield launches


@contextmanager
def early_starts(launches: Launches) -> Iterator[None]:
    """Let launches with an early start begin before the one in front of them; all is done at the end."""

    class Gdc:
        gdc_wait = staticmethod(launches.wait)

        @staticmethod
        def gdc_launch_dependents() -> None:
            """The next kernel has begun already."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tl.extra, "cuda", Gdc, raising=False)
        launches.is_early = True
        try:
            yield
            launches.finish()
        finally:
            launches.is_early, launches._pending = False, None
