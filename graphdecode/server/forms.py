"""Forms of answers, read in a child of another process before anything is made of them, and what became of each."""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

import numpy as np

from graphdecode.config.sampling_params import StructuredOutputsParams
from graphdecode.engine.constraint import ConstraintError, TokenAutomaton
from graphdecode.errors import ArgumentError
from graphdecode.server.desk import Desk
from graphdecode.server.forked_work import ForkedWork, WorkError, WorkLimits

_LIMITS = WorkLimits(cpu_seconds=4, wall_seconds=60.0, memory_bytes=512 << 20)
KEPT_BYTES = 32 << 20  # in the engine's process
_KEPT = 64
_OUTCOMES_KEPT, _OUTCOMES_BYTES = 256, 8 << 20  # in this one
_LEAST_SIZE = 1 << 14  # of a form, among the work of its caller: small ones may take long, too


class ReadForm(NamedTuple):
    """A form that can be kept.

    Attributes:
        grammar: its text, which `Grammars.compiled` takes.
        automaton: what it became; None: it is not that simple.
        nbytes: that it takes where it is compiled.
    """

    grammar: str
    automaton: TokenAutomaton | None
    nbytes: int


class TaughtForms:
    """Which grammars another process keeps: those that were used last, as many as fit in some memory."""

    def __init__(self) -> None:
        self._nbytes: OrderedDict[str, int] = OrderedDict()
        self._sum = 0

    def __contains__(self, grammar: str) -> bool:
        """Whether a grammar is kept; it counts as used."""
        if grammar not in self._nbytes:
            return False
        self._nbytes.move_to_end(grammar)
        return True

    def add(self, form: ReadForm) -> list[str]:
        """Have a form kept that is not; return the grammars that are to be forgotten for it."""
        self._nbytes[form.grammar] = form.nbytes
        self._sum += form.nbytes
        gone = []
        while len(self._nbytes) > 1 and (len(self._nbytes) > _KEPT or self._sum > KEPT_BYTES):
            other, nbytes = self._nbytes.popitem(last=False)
            self._sum -= nbytes
            gone.append(other)
        return gone

    def drop(self, grammar: str) -> bool:
        """Have a form forgotten; return whether it was kept."""
        nbytes = self._nbytes.pop(grammar, None)
        self._sum -= nbytes or 0
        return nbytes is not None


class Taught(Protocol):
    """Where forms go once they are read."""

    def knows(self, grammar: str) -> bool:
        """Whether a grammar need not be read again."""
        ...

    def teach(self, form: ReadForm) -> None:
        """Take a form that was read."""
        ...


class _Outcomes:
    """What became of forms: texts by digest, those of the forms that were asked for last."""

    def __init__(self) -> None:
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._sum = 0

    def get(self, digest: bytes) -> str | None:
        return self._texts.get(digest)

    def put(self, digest: bytes, text: str) -> None:
        self._sum += len(text) - len(self._texts.pop(digest, ""))
        self._texts[digest] = text
        while len(self._texts) > _OUTCOMES_KEPT or self._sum > _OUTCOMES_BYTES:
            self._sum -= len(self._texts.popitem(last=False)[1])


@dataclass
class _Reading:
    """A form that is being read.

    Attributes:
        task: that reads it.
        askers: who wait for it.
    """

    task: asyncio.Task[str]
    askers: int = 0


class Forms:
    """Reads forms, and remembers what became of each.

    Args:
        work: where they are read.
        taught: where they go.
    """

    def __init__(self, work: ForkedWork, taught: Taught) -> None:
        self._work = work
        self._taught = taught
        self._wrong = _Outcomes()  # why a form cannot be kept
        self._good = _Outcomes()  # its grammar
        self._reading: dict[tuple[str, bytes], _Reading] = {}

    async def grammar(self, params: StructuredOutputsParams, caller: str) -> str:
        """Return the grammar of a form that can be kept.

        Args:
            params: the form.
            caller: who asks for it.

        Raises:
            ArgumentError: it cannot be kept, or reading it takes too long; the message says what is in the way.
            HttpError: it could not be read now.
        """
        told = json.dumps(asdict(params)).encode()
        digest = hashlib.blake2b(told).digest()
        wrong, grammar = self._wrong.get(digest), self._good.get(digest)
        if wrong is not None:
            raise ArgumentError(wrong)
        if grammar is not None and self._taught.knows(grammar):
            return grammar
        return await self._shared((caller, digest), params, _LEAST_SIZE + len(told))

    async def _shared(self, key: tuple[str, bytes], params: StructuredOutputsParams, size: int) -> str:
        """Return the grammar of a form; who asks for it while the same caller's is being read waits for that."""
        reading = self._reading.get(key)
        if reading is None:
            reading = self._reading[key] = _Reading(asyncio.create_task(self._read(key, params, size), name="form"))
            reading.task.add_done_callback(_take_note)
        reading.askers += 1
        try:
            return await asyncio.shield(reading.task)
        finally:
            reading.askers -= 1
            if not reading.askers:
                reading.task.cancel()
                if self._reading.get(key) is reading:
                    del self._reading[key]

    async def _read(self, key: tuple[str, bytes], params: StructuredOutputsParams, size: int) -> str:
        caller, digest = key
        try:
            form: ReadForm = await self._work.run(read_form, params, limits=_LIMITS, caller=caller, size=size)
        except (ArgumentError, WorkError) as error:
            if isinstance(error, WorkError):
                error = ArgumentError(f"structured_outputs: reading the {params.form} {error}")
            self._wrong.put(digest, str(error))
            raise error from None
        self._good.put(digest, form.grammar)
        if not self._taught.knows(form.grammar):
            self._taught.teach(form)
        return form.grammar


def _take_note(task: asyncio.Task[str]) -> None:
    """See what a task raised, where nobody is left who would."""
    if not task.cancelled():
        task.exception()


def read_form(desk: Desk, params: StructuredOutputsParams) -> ReadForm:
    """Read a form to the end, as the engine's process will, and look at its first mask.

    Raises:
        ArgumentError: it cannot be kept.
    """
    before = _most_resident_bytes()
    grammars = desk.intake.grammars
    grammar = grammars.grammar(params)
    try:
        compiled = grammars.compiled(grammar)
        grammars.held(compiled).fill(np.empty(desk.mask_words, dtype=np.int32), ())
    except ConstraintError as error:
        raise ArgumentError(f"structured_outputs: {params.form} cannot be kept: {error}") from error
    if isinstance(compiled, TokenAutomaton):
        arrays = (compiled.classes, compiled.following, compiled.masks, compiled.accepts, compiled.completes)
        return ReadForm(grammar, compiled, len(grammar) + sum(array.nbytes for array in arrays))
    return ReadForm(grammar, None, len(grammar) + _most_resident_bytes() - before)


def _most_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
