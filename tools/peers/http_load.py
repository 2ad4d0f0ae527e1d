"""Clients of a server that speaks OpenAI's HTTP, as cheap as can be: they share a machine with what they measure."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time

_TEXT = "the old river runs under a stone bridge while people walk home and talk about bread rain work music"
_WORDS = 24  # of a prompt
_ALONE_REQUESTS = 9
_PIECE = re.compile(rb'"choices": ?\[\{')


def prompts_of(count: int, seed: int) -> list[str]:
    """Return texts that share no prefix."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(_TEXT.split(), k=_WORDS)) for _ in range(count)]


def alone_prompts(seed: int) -> list[str]:
    """Return those that are asked one behind the other."""
    return prompts_of(_ALONE_REQUESTS, seed + 1_000_000)


def first_token_seconds(port: int, model: str, prompt: str) -> float:
    """Return how long a request waits for its first token that is alone.

    Args:
        port: of the server, on this machine.
        model: its name.
        prompt: a text.
    """
    return asyncio.run(_ask(port, _body(model, prompt, 2)))[0]


def tokens_per_second(port: int, model: str, *, clients: int, tokens: int, seed: int, ignores_eos: bool) -> float:
    """Return the speed of all answers together of some clients who ask at once.

    Args:
        port: of the server, on this machine.
        model: its name.
        clients: how many.
        tokens: of an answer.
        seed: of the prompts.
        ignores_eos: answers have their full length; else what came is counted.
    """

    async def together() -> float:
        began = time.perf_counter()
        asked = [_ask(port, _body(model, prompt, tokens)) for prompt in prompts_of(clients, seed)]
        pieces = [pieces for _, pieces in await asyncio.gather(*asked)]
        total = clients * tokens if ignores_eos else sum(pieces) - clients  # the last piece says how it ended
        return total / (time.perf_counter() - began)

    return asyncio.run(together())


def _body(model: str, prompt: str, tokens: int) -> bytes:
    asked = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    return json.dumps(asked | {"ignore_eos": True}).encode()


async def _ask(port: int, body: bytes) -> tuple[float, int]:
    """Return seconds to the first piece, and how many came."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    first, received = 0.0, b""
    while data := await reader.read(1 << 16):
        received += data
        if not first and _PIECE.search(received):
            first = time.perf_counter() - began
    writer.close()
    if not first or b"[DONE]" not in received:
        raise RuntimeError(f"port {port} gave no whole answer: {received[-300:]!r}")
    return first, len(_PIECE.findall(received))
