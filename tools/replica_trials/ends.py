"""Ways in which the command ends while streams run, and what is left of its processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from replica_trials.server import END_SECONDS, GENERATED, Server, command_of, processes_of, served, until_none_is_left
from replica_trials.streams import Stream, ask, client_of, outcomes, requests_of

STREAMS = 64
ANSWER_TOKENS = 400
SOON_SECONDS = 5.0
WAYS = {
    "SIGTERM": (signal.SIGTERM,),
    "Ctrl-C": (signal.SIGINT,),
    "SIGTERM twice": (signal.SIGTERM, signal.SIGTERM),
    "SIGKILL": (signal.SIGKILL,),
}


def ends(model: str, *options: str) -> dict[str, Any]:
    """End the command under load in each way; nothing of it may stay."""
    return {name: _ended_by(signals, model, options) for name, signals in WAYS.items()}


def _ended_by(signals: tuple[int, ...], model: str, options: tuple[str, ...]) -> dict[str, Any]:
    async def under_load(server: Server) -> tuple[list[Stream], dict[str, Any]]:
        async with client_of(server.address) as http:
            bodies = requests_of(STREAMS, 9, ANSWER_TOKENS)
            tasks = [asyncio.create_task(ask(http, model, body)) for body in bodies]
            while not any(server.counts(GENERATED).values()):
                await asyncio.sleep(0.1)
            for number in signals:
                os.kill(server.process.pid, number)
                asked = time.monotonic()
                await asyncio.sleep(0.5)
            await asyncio.to_thread(server.process.wait, END_SECONDS)
            told: dict[str, Any] = {"ended_after_s": time.monotonic() - asked}
            await asyncio.sleep(SOON_SECONDS)
            told["left_soon_after"] = sorted(command_of(pid)[:40].strip() for pid in processes_of(server.folder))
            await asyncio.to_thread(until_none_is_left, server.folder)
            told["none_left_after_s"] = time.monotonic() - asked
            return await asyncio.gather(*tasks), told

    with served(model, "--replicas", "2", *options) as server:
        server.until_replicas(2)
        processes = len(processes_of(server.folder))
        streams, told = asyncio.run(under_load(server))
    about = {"processes": processes, "outcomes": outcomes(streams), "exit_code": server.process.returncode}
    return about | told
