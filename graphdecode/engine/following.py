"""A rank that is not the first: the same runner without a scheduler, which does what rank 0 tells."""

from __future__ import annotations

import gc
import json
import tomllib
import traceback
from collections.abc import Callable

import numpy as np

from graphdecode.buffers import Change
from graphdecode.config import EngineConfig
from graphdecode.distributed import Follower, RankError, Ranks
from graphdecode.distributed.link import Message
from graphdecode.engine.leading import Command
from graphdecode.engine.prefill import PromptChunk
from graphdecode.engine.runner import Runner
from graphdecode.errors import GraphdecodeError

Load = Callable[[str, EngineConfig, Ranks], Runner]


def follow(ranks: Follower, load: Load) -> None:
    """Do what rank 0 tells, until it ends the group.

    Args:
        ranks: this end of the group.
        load: loads a model, and captures its graphs.

    Raises:
        GraphdecodeError: the model cannot be loaded or captured.
        RankError: a collective did not come to its end.
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
            told = json.loads(message.payload)
            settings = EngineConfig.of(tomllib.loads(told["config"]))
            runner = load(told["model"], settings, ranks)
            gc.collect()
            gc.freeze()  # what was loaded stays; the collector need not look at it between two steps
        elif runner is not None and message.kind == Command.UNLOAD:
            runner.close()
            runner = None
            gc.unfreeze()
            gc.collect()
        elif runner is not None:
            _obey(message, runner, ranks)
        late = ranks.collectives.late()
        if late is not None:
            raise RankError(late)


def _obey(message: Message, runner: Runner, ranks: Follower) -> None:
    kind, numbers, payload = message
    if kind == Command.CHANGE:
        buffers = (runner.buffers, runner.prompt_buffers)[numbers[0]]
        data = numbers[1] + 4 * numbers[2]
        rows = np.frombuffer(payload[numbers[1] : data], np.int32).tolist()
        buffers.take(Change(payload[: numbers[1]].decode(), rows, payload[data:]))
    elif kind == Command.STAGED:
        runner.begin(numbers[0])
    elif kind == Command.PASS:
        runner.compute(_chunks(payload))
    elif kind == Command.CATCH_UP:
        runner.follow_staged(_chunks(payload))
    elif kind == Command.LAUNCH:
        runner.launch(*numbers)
    elif kind == Command.LAUNCH_ALONG:
        runner.launch(numbers[0], along=_chunks(payload))
    elif kind == Command.LAUNCH_HALVES:
        runner.launch(*numbers, meanwhile=lambda: _obey_until_handed(runner, ranks))


def _obey_until_handed(runner: Runner, ranks: Follower) -> None:
    while (message := ranks.receive()).kind != Command.HANDED:
        _obey(message, runner, ranks)


def _chunks(payload: bytes) -> list[PromptChunk]:
    """Return chunks of the right lengths; their tokens and pages are staged."""
    sizes = np.frombuffer(payload, np.int32).reshape(-1, 3).tolist()
    return [PromptChunk(range(tokens), 0, (), range(scored), logprobs) for tokens, scored, logprobs in sizes]


def run(ranks: Follower, load: Load) -> int:
    """Follow, and return the process's exit code; rank 0 is told why where that is not 0."""
    try:
        follow(ranks, load)
    except GraphdecodeError as error:
        ranks.fail(str(error))
        return 1
    except Exception as error:
        traceback.print_exc()
        ranks.fail(f"{type(error).__name__}: {error}")
        return 1
    ranks.close()
    return 0
