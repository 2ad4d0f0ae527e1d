"""The runner of rank 0, which tells the other ranks all that its own steps are about to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np

from graphdecode.buffers import Change
from graphdecode.distributed import Leader
from graphdecode.engine.prefill import PromptChunk
from graphdecode.engine.runner import Launch, Runner
from graphdecode.engine.steps import RowInputs, StepLogprobs


class Command(IntEnum):
    """What rank 0 tells the others, with the numbers and the payload of the message."""

    LOAD = 0  # what to load, as JSON
    CHANGE = 1  # which buffers, bytes of the name, how many numbers; name, numbers, data
    STAGED = 2  # rows
    PASS = 3  # chunks: int32 [chunks, 3]: tokens, scored places, log-probabilities wanted
    CATCH_UP = 4  # the same
    LAUNCH = 5  # rows, steps, queries
    LAUNCH_HALVES = 6  # the same; what the host does meanwhile follows, up to HANDED
    HANDED = 7
    LAUNCH_ALONG = 8  # rows; the chunks that go along, as in PASS
    UNLOAD = 9
    END = 10


class LeadingRunner(Runner):
    """A `Runner` whose model the other ranks have a part of.

    They get what was staged, as bytes, and then the same pass or launch to run. Nothing is sent of a sequence but that,
    and in a steady state one short message a launch. A failure in the midst of it is the group's: ranks that have not
    done the same cannot go on together.

    Args:
        arguments: of `Runner`.
        leader: of the ranks.
        keywords: of `Runner`.

    Attributes:
        ranks: the leader.
        ends_ranks: whether the other ranks end with this runner.
    """

    def __init__(self, *arguments: Any, leader: Leader, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.ranks = leader
        self.ends_ranks = True

    def lead(self) -> None:
        """Tell the others from now on; up to here all ranks have done the same by themselves."""
        for number, buffers in enumerate((self.buffers, self.prompt_buffers)):
            buffers.relay = lambda change, number=number: self._relay(number, change)

    def _relay(self, number: int, change: Change) -> None:
        name = change.name.encode()
        payload = name + np.asarray(change.numbers, dtype=np.int32).tobytes() + change.data
        self.ranks.tell(Command.CHANGE, (number, len(name), len(change.numbers)), payload)

    @contextmanager
    def _together(self) -> Iterator[None]:
        self.ranks.check()
        try:
            yield
        except BaseException as error:
            self.ranks.explain(error)
            raise
        self.ranks.check()

    def stage(self, rows: Sequence[RowInputs]) -> None:
        """Tell all ranks' devices everything about the rows; see `Runner.stage`."""
        with self._together():
            super().stage(rows)
            self.ranks.tell(Command.STAGED, (len(rows), 0, 0))

    def compute(self, chunks: Sequence[PromptChunk]) -> list[StepLogprobs | None]:
        """Compute staged chunks on all ranks; see `Runner.compute`."""
        with self._together():
            self.ranks.tell(Command.PASS, (len(chunks), 0, 0), _sizes(chunks))
            return super().compute(chunks)

    def catch_up(self, chunks: Sequence[PromptChunk]) -> None:
        """Let the source of drafts of all ranks see tokens; see `Runner.catch_up`."""
        with self._together():
            super().catch_up(chunks)
            self.ranks.tell(Command.CATCH_UP, (len(chunks), 0, 0), _sizes(chunks))

    def launch(
        self,
        num_rows: int,
        num_steps: int = 1,
        queries: int = 1,
        *,
        meanwhile: Callable[[], None] | None = None,
        along: Sequence[PromptChunk] = (),
    ) -> Launch:
        """Start steps on all ranks; see `Runner.launch`."""
        with self._together():
            if along:
                self.ranks.tell(Command.LAUNCH_ALONG, (num_rows, 0, 0), _sizes(along))
            else:
                kind = Command.LAUNCH if meanwhile is None else Command.LAUNCH_HALVES
                self.ranks.tell(kind, (num_rows, num_steps, queries))
            both = None if meanwhile is None else lambda: self._handing(meanwhile)
            return super().launch(num_rows, num_steps, queries, meanwhile=both, along=along)

    def _handing(self, meanwhile: Callable[[], None]) -> None:
        try:
            meanwhile()
        finally:
            self.ranks.tell(Command.HANDED)

    def close(self) -> None:
        """Release the graphs of all ranks, and end the other ranks, unless they go on with another model."""
        super().close()
        if self.ends_ranks:
            self.ranks.close(Command.END)
        else:
            self.ranks.tell(Command.UNLOAD)


def _sizes(chunks: Sequence[PromptChunk]) -> bytes:
    sizes = [(len(chunk.token_ids), len(chunk.scored), chunk.num_logprobs) for chunk in chunks]
    return np.asarray(sizes, dtype=np.int32).tobytes()
