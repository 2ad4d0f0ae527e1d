"""Tensor parallelism: rank 0 schedules, and sends every staged change and launch to the other ranks."""

from __future__ import annotations

import gc
import json
import tempfile
import tomllib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from safetensors.torch import load_file, save_file

from graphdecode.buffers import Change
from graphdecode.config import EngineConfig
from graphdecode.distributed import Follower, Leader, RankError, Ranks, RefusedError
from graphdecode.distributed.link import Message
from graphdecode.engine.prompts import PromptChunk
from graphdecode.engine.runner import SLEEP_TAGS, Launch, LaunchPlan, Runner
from graphdecode.engine.steps import RowInputs
from graphdecode.errors import GraphdecodeError
from graphdecode.models.adapters import Adapter
from graphdecode.models.split import split_adapter
from graphdecode.models.updates import NamedTensors, as_named_tensors

# loads a model and captures its graphs
Load: TypeAlias = Callable[[str, EngineConfig, Ranks], Runner]


class Command(IntEnum):
    """The messages of rank 0 to the others, with their numbers and payloads."""

    LOAD = 0  # model and configuration, as JSON
    CHANGE = 1  # index of the buffers, bytes of the name, count of numbers; name, numbers, data
    STAGED = 2  # rows
    LAUNCH = 3  # a `LaunchPlan`; for halves, the changes in between follow, up to HALF_STAGED
    HALF_STAGED = 4
    UNLOAD = 5
    END = 6
    ADAPTER = 7  # slot; the receiver's shard of the matrices
    WEIGHTS = 8  # whether they are named tensors in a file, or a model; its path or name
    SLEEP = 9  # whether the weights are dropped
    STATE = 10  # rows of recurrent states: source, destination
    WAKE_UP = 11  # index of the tag


class LeadingRunner(Runner):
    """A `Runner` on rank 0, whose model the other ranks share.

    They receive staged data as bytes, and then the same launch: one short message per launch in a steady state. A
    failure fails the whole group. With `ends_ranks` the other ranks end with this runner.
    """

    may_repeat = False

    def __init__(self, *arguments: Any, leader: Leader, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.ranks, self.ends_ranks = leader, True

    def lead(self, *, ends_ranks: bool) -> None:
        """Send commands from now on; before this call, all ranks run the same code."""
        self.ends_ranks = ends_ranks
        for number, buffers in enumerate((self.buffers, self.prompts.buffers)):
            buffers.relay = lambda change, number=number: self._relay(number, change)
        self.cache.relay = lambda source, destination: self.ranks.send(Command.STATE, (source, destination, 0))

    def _relay(self, number: int, change: Change) -> None:
        name = change.name.encode()
        payload = name + np.asarray(change.numbers, dtype=np.int32).tobytes() + change.data
        self.ranks.send(Command.CHANGE, (number, len(name), len(change.numbers)), payload)

    def capture_waiting(self) -> bool:
        """Return False: ranks capture a graph together, when a step needs it."""
        return False

    @contextmanager
    def _together(self) -> Iterator[None]:
        self.ranks.check()
        try:
            yield
        except BaseException as error:
            self.ranks.explain(error)
            raise
        self.ranks.check()

    def stage(self, rows: Sequence[RowInputs] = (), chunks: Sequence[PromptChunk] = ()) -> None:
        """Stage rows and chunks on all ranks; see `Runner.stage`."""
        with self._together():
            super().stage(rows, chunks)
            if rows:
                self.ranks.send(Command.STAGED, (len(rows), 0, 0))

    def launch(self, plan: LaunchPlan, meanwhile: Callable[[], None] | None = None) -> Launch:
        """Start what is staged on all ranks; see `Runner.launch`."""
        with self._together():
            self.ranks.send(Command.LAUNCH, payload=plan.to_bytes())
            return super().launch(plan, None if meanwhile is None else lambda: self._stage_half(meanwhile))

    def _stage_half(self, meanwhile: Callable[[], None]) -> None:
        try:
            meanwhile()
        finally:
            self.ranks.send(Command.HALF_STAGED)

    def write_adapter(self, slot: int, adapter: Adapter) -> None:
        """Write each rank's shard of an adapter into a slot; see `Runner.write_adapter`."""
        assert self.model.adapters is not None
        parts, count = self.model.adapters.parts, self.ranks.count
        with self._together():
            for rank in range(1, count):
                part = split_adapter(adapter, parts, rank, count)
                self.ranks.send_to(rank, Command.ADAPTER, (slot, 0, 0), part.to_bytes())
            super().write_adapter(slot, split_adapter(adapter, parts, 0, count))

    def update_weights(self, weights: str | Path | NamedTensors) -> None:
        """Update the weights of all ranks, or of none; see `Engine.update_weights`."""
        named = None if isinstance(weights, (str, Path)) else as_named_tensors(weights)
        with tempfile.TemporaryDirectory(prefix="graphdecode-") as folder:
            source = Path(folder) / "named.safetensors" if named is not None else weights
            if named is not None:
                save_file({name: each.clone().contiguous() for name, each in named.items()}, str(source))
            self.ranks.check()
            self.ranks.send(Command.WEIGHTS, (named is not None, 0, 0), str(source).encode())
            loaded = self.ranks.attempt(lambda: self.load_weights(weights if named is None else named))
        with self._together():
            self.take_weights(*loaded)

    def prepare_sleep(self, *, weights: bool) -> None:
        """Prepare all ranks, which then await `release_memory`, or none; see `Runner.prepare_sleep`."""
        self.ranks.check()
        self.ranks.send(Command.SLEEP, (weights, 0, 0))
        try:
            self.ranks.attempt(lambda: super(LeadingRunner, self).prepare_sleep(weights=weights))
        except GraphdecodeError:
            self.cancel_sleep()
            raise

    def release_memory(self, *, weights: bool) -> int:
        """Release memory on all ranks; return the bytes of all. See `Runner.release_memory`."""
        with self._together():
            return self.ranks.total(super().release_memory(weights=weights))

    def restore_memory(self, tag: str) -> None:
        """Map memory of all ranks again; what one has mapped stays if another fails. See `Runner.restore_memory`."""
        self.ranks.check()
        self.ranks.send(Command.WAKE_UP, (SLEEP_TAGS.index(tag), 0, 0))
        self.ranks.attempt(lambda: super(LeadingRunner, self).restore_memory(tag))

    def close(self) -> None:
        """Release the graphs of all ranks; end the other ranks, or let them wait for another model."""
        super().close()
        if self.ends_ranks:
            self.ranks.close(Command.END)
        else:
            self.ranks.send(Command.UNLOAD)


def follow(ranks: Follower, load: Load) -> None:
    """Run the commands of rank 0 until it ends the group.

    Raises:
        GraphdecodeError: the model cannot be loaded or captured, or a collective timed out.
    """
    runner: Runner | None = None
    while True:
        try:
            message = ranks.receive()
        except EOFError:
            return
        if message.kind == Command.END:
            return
        if message.kind == Command.LOAD:
            job = json.loads(message.payload)
            runner = load(job["model"], EngineConfig.of(tomllib.loads(job["config"])), ranks)
            gc.collect()
            gc.freeze()  # keeps loaded objects out of collections between steps
        elif runner is not None and message.kind == Command.UNLOAD:
            runner.close()
            runner = None
            gc.unfreeze()
            gc.collect()
        elif runner is not None:
            _execute(message, runner, ranks)
        if (late := ranks.collectives.late()) is not None:
            raise RankError(late)


def _execute(message: Message, runner: Runner, ranks: Follower) -> None:
    kind, numbers, payload = message
    if kind == Command.CHANGE:
        buffers = (runner.buffers, runner.prompts.buffers)[numbers[0]]
        data = numbers[1] + 4 * numbers[2]
        rows = np.frombuffer(payload[numbers[1] : data], np.int32).tolist()
        buffers.take(Change(payload[: numbers[1]].decode(), rows, payload[data:]))
    elif kind == Command.STAGED:
        runner.step.begin(numbers[0])
    elif kind == Command.ADAPTER:
        runner.write_adapter(numbers[0], Adapter.of_bytes(payload))
    elif kind == Command.WEIGHTS:
        name, is_named = payload.decode(), bool(numbers[0])
        with suppress(RefusedError):
            runner.take_weights(*ranks.attempt(lambda: runner.load_weights(load_file(name) if is_named else name)))
    elif kind == Command.SLEEP:
        weights = bool(numbers[0])
        try:
            ranks.attempt(lambda: runner.prepare_sleep(weights=weights))
        except RefusedError:
            runner.cancel_sleep()
        else:
            ranks.total(runner.release_memory(weights=weights))
    elif kind == Command.WAKE_UP:
        with suppress(RefusedError):
            ranks.attempt(lambda: runner.restore_memory(SLEEP_TAGS[numbers[0]]))
    elif kind == Command.STATE:
        runner.cache.copy_state(*numbers[:2])
    elif kind == Command.LAUNCH:
        plan = LaunchPlan.of_bytes(payload)
        runner.launch(plan, (lambda: _stage_half(runner, ranks)) if plan.shape.part != "whole" else None)


def _stage_half(runner: Runner, ranks: Follower) -> None:
    while (message := ranks.receive()).kind != Command.HALF_STAGED:
        _execute(message, runner, ranks)


def run(ranks: Follower, load: Load) -> int:
    """Follow rank 0, and return the process's exit code; failures are reported to rank 0."""
    try:
        follow(ranks, load)
    except Exception as error:
        is_expected = isinstance(error, GraphdecodeError)
        if not is_expected:
            traceback.print_exc()
        ranks.fail(str(error) if is_expected else f"{type(error).__name__}: {error}")
        return 1
    ranks.close()
    return 0
