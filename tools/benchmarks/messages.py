"""Bytes sent per step, token and request: within an engine, and between it and its clients."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import statistics
from collections import Counter, defaultdict
from typing import Any
from unittest import mock

import httpx2 as httpx

from graphdecode import LLM, SamplingParams
from graphdecode.cli.checkpoint import find_model
from graphdecode.cli.serve import service_maker
from graphdecode.config import EngineConfig, ServerConfig
from graphdecode.distributed import collectives
from graphdecode.distributed.link import Link, Message
from graphdecode.server import messages
from graphdecode.server.app import make_app
from graphdecode.server.messages import framed
from graphdecode.server.replicas.routing import prompt_blocks
from harness import Model, Out, record, write

ROWS, TOKENS = 8, 48
PROMPT = "the old river runs under a stone bridge while people walk home and talk about bread rain work music "
_LINE = re.compile(r"(\w+) of \[(\d+), (\d+)\] (\w+) at .*")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def between_ranks(model: str) -> dict[str, Any]:
    """Return the bytes between ranks: operands of a step's collectives, and messages of rank 0."""
    made: list[collectives.Collectives] = []
    sent: list[tuple[int, int]] = []
    begin, send = collectives.Collectives.__init__, Link.send

    def noted(self: collectives.Collectives, *arguments: Any) -> None:
        begin(self, *arguments)
        made.append(self)

    def counted(self: Link, message: Message) -> None:
        sent.append((message.kind, 24 + len(message.payload)))
        send(self, message)

    sizes: Any = {"tensor_parallel_size": 2, "max_batch_size": ROWS, "max_sequence_length": 512}
    with (
        mock.patch.object(collectives.Collectives, "__init__", noted),
        mock.patch.object(Link, "send", counted),
        LLM(model, device="cpu", **sizes) as llm,
    ):
        lines = made[0].manifests[f"bucket {ROWS}"]
        sent.clear()
        llm.generate([PROMPT] * ROWS, SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0))
        dtype = str(llm.model.dtype)
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    passes = sum(line.endswith(" at embedding") for line in lines)  # a capture runs the step some times before
    for line in lines[: len(lines) // passes]:
        kind, rows, columns, item = _LINE.fullmatch(line).groups()  # type: ignore[union-attr]
        kinds[kind]["calls"] += 1
        kinds[kind]["operand_bytes"] += int(rows) * int(columns) * _ITEM_BYTES[item]
    steady = Counter(size for _, size in sent).most_common(1)[0]
    return {
        "rows": ROWS,
        "dtype": dtype,
        "collectives_of_a_step": kinds,
        "told_each_rank_bytes": sum(size for _, size in sent),
        "told_each_rank_messages": len(sent),
        "steps": steady[1],
        "told_of_a_steady_step_bytes": steady[0],
    }


def to_clients(model: str) -> dict[str, Any]:
    """Return the bytes of a streamed output: from the engine's process, as an HTTP event, and as a call of Ray."""
    events: list[int] = []
    receive = messages.receive

    async def counted(reader: asyncio.StreamReader) -> Any:
        message = await receive(reader)
        if isinstance(message, list):
            events.extend(len(framed(message)) // len(message) for _ in message)
        return message

    config = EngineConfig.of(None, device="cpu")
    service = service_maker(model, find_model(model, None), config, ServerConfig())()
    body = {"model": model, "prompt": PROMPT * 4, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}

    async def ask() -> list[bytes]:
        await service.start()
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answer = await http.post("/v1/completions", json=body, timeout=120)
        service.close()
        return [piece + b"\n\n" for piece in answer.content.split(b"\n\n") if b"choices" in piece]

    with mock.patch.object(messages, "receive", counted):
        pieces = asyncio.run(ask())
    message = {"type": "http.response.body", "body": pieces[0], "more_body": True}
    return {
        "prompt_characters": len(str(body["prompt"])),
        "request_bytes": len(json.dumps(body)),
        "route_bytes": len(pickle.dumps(prompt_blocks(body))),
        "engine_event_bytes": statistics.median(events),
        "stream_events": len(pieces),
        "stream_event_bytes": statistics.median(len(piece) for piece in pieces),
        "ray_message_bytes": len(pickle.dumps([message])),
    }


def main(model: Model = "demo", out: Out = None) -> None:
    found = record(schema=1, model=model)
    found |= {"between_ranks": between_ranks(model), "to_clients": to_clients(model)}
    print(json.dumps(found, indent=1))
    write(out, found)
