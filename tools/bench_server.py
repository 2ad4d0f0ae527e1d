"""Compare servers that speak OpenAI's HTTP with one another, and ours with the engine below it, in one run.

    python tools/bench_server.py --model smollm2 --clients 32 --answer-tokens 64 --out server
    python tools/bench_server.py --server 'other=COMMAND --port {port}'

The engine runs on the first core, HTTP and the clients on the others: `library` is the engine on that core alone,
called in process; `server` is the same engine behind `graphdecode serve`. Further servers are commands in which {port}
stands for their port; they get all cores. Each takes its turn, ROUNDS times over; medians are told. Writes server.json.
"""

import asyncio
import json
import os
import random
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx2 as httpx
import typer
from rich import box
from rich.table import Table

from graphdecode import LLM, SamplingParams
from graphdecode.cli.options import print_error, wide_console
from graphdecode.profiling.environment import describe_environment

START_SECONDS = 180
ALONE_REQUESTS = 15
TEXT = "the old river runs under a stone bridge while people walk home and talk about bread rain work music"


def prompts_of(count: int, seed: int) -> list[str]:
    """Return texts that share no prefix."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(TEXT.split(), k=24)) for _ in range(count)]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def body_of(model: str, prompt: str, tokens: int) -> bytes:
    """Return a request whose answer has so many tokens, streamed."""
    asked = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    return json.dumps(asked | {"ignore_eos": True}).encode()


async def ask(port: int, body: bytes) -> tuple[float, float, int]:
    """Return seconds to the first piece, to the end, and how many pieces came; read as cheaply as can be."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    first, pieces, rest = 0.0, 0, b""
    while data := await reader.read(1 << 16):
        found = (rest + data).count(b'"choices":[{') + (rest + data).count(b'"choices": [{')
        if found and not first:
            first = time.perf_counter() - began
        pieces += found
        rest = data[-1:] if not found else b""
    writer.close()
    if not first:
        raise RuntimeError(f"port {port} gave no answer: {rest!r}")
    return first, time.perf_counter() - began, pieces


def over_http(port: int, model: str, clients: int, tokens: int, seed: int) -> dict[str, float]:
    """Return what some clients see together, and one alone."""

    async def together() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(ask(port, body_of(model, prompt, tokens)) for prompt in prompts_of(clients, seed)))
        return clients * tokens / (time.perf_counter() - began)

    async def alone() -> float:
        firsts = [(await ask(port, body_of(model, each, 2)))[0] for each in prompts_of(ALONE_REQUESTS, seed + 1)]
        return statistics.median(firsts)

    asyncio.run(ask(port, body_of(model, "warm up", 2)))
    first = 1000 * asyncio.run(alone())
    return {"tokens_per_second": asyncio.run(together()), "first_token_ms": first}


def in_process(llm: LLM, clients: int, tokens: int, seed: int) -> dict[str, float]:
    """Return the same of the library."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llm.stats.step_seconds.clear()
    began = time.perf_counter()
    llm.generate(prompts_of(clients, seed), params, use_tqdm=False)
    speed = clients * tokens / (time.perf_counter() - began)
    step, firsts = statistics.median(llm.stats.step_seconds), []
    for prompt in prompts_of(ALONE_REQUESTS, seed + 1):
        began = time.perf_counter()
        with llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)) as stream:
            next(stream)
            firsts.append(time.perf_counter() - began)
    first = statistics.median(firsts)
    return {"tokens_per_second": speed, "first_token_ms": 1000 * first, "step_ms": 1000 * step}


@contextmanager
def running(command: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run a server until it answers, and end it behind the block; yield its port and process."""
    port = free_port()
    process = subprocess.Popen(
        shlex.split(command.format(port=port)), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"it does not serve: {command}")
            time.sleep(0.2)
        yield port, process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def model_of(port: int) -> str:
    """Return the name of the model that is served."""
    return str(httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"][0]["id"])


def pin_ours(process: subprocess.Popen[bytes], engine: set[int], others: set[int]) -> None:
    """Put the engine's process on its core, and the one that speaks HTTP on the others."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid, cores in ((process.pid, others), (int(children[0]), engine)):
        for task in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(task), cores)


def step_ms(port: int) -> float:
    """Return the median time of the last steps of our server."""
    return 1000 * float(httpx.get(f"http://127.0.0.1:{port}/live").json()["step_seconds"])


def main(
    model: Annotated[str, typer.Option(help="As for `graphdecode serve`.")] = "demo",
    clients: Annotated[int, typer.Option(help="Clients that ask at the same time.")] = 32,
    answer_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 64,
    rounds: Annotated[int, typer.Option(help="Turns of each.")] = 3,
    server: Annotated[list[str] | None, typer.Option(help="NAME=COMMAND; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for server.json.")] = None,
) -> None:
    """Measure."""
    cores = sorted(os.sched_getaffinity(0))
    engine, others = {cores[0]}, set(cores[1:]) or {cores[0]}
    size = ["--max-batch-size", str(clients), "--max-sequence-length", "512"]
    own = shlex.join([sys.executable, "-m", "graphdecode", "serve", "--model", model, *size]) + " --port {port}"
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, list[dict[str, float]]] = {"library": [], "server": []}
    os.sched_setaffinity(0, engine)
    with LLM(model, max_batch_size=clients, max_sequence_length=512) as llm, running(own) as (port, process):
        pin_ours(process, engine, others)
        for turn in range(rounds):
            os.sched_setaffinity(0, engine)
            found["library"].append(in_process(llm, clients, answer_tokens, turn))
            os.sched_setaffinity(0, others)
            seen = over_http(port, model_of(port), clients, answer_tokens, turn)
            found["server"].append(seen | {"step_ms": step_ms(port)})
    os.sched_setaffinity(0, set(cores))
    del os.environ["OMP_NUM_THREADS"]
    for each in server or []:
        name, _, command = each.partition("=")
        for who, what in ((name, command), ("server, all cores", own)):
            with running(what) as (port, _):
                for turn in range(rounds):
                    seen = over_http(port, model_of(port), clients, answer_tokens, turn)
                    found.setdefault(who, []).append(seen)
    medians = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in found.items()
    }
    show(medians)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        about = {"environment": describe_environment("cpu"), "model": model, "clients": clients}
        told: dict[str, Any] = about | {"answer_tokens": answer_tokens, "rounds": found, "medians": medians}
        (out / "server.json").write_text(json.dumps(told, indent=1) + "\n")


def show(medians: dict[str, dict[str, float]]) -> None:
    """Print the figures, and those of the library as the limit beside them."""
    table = Table(title="servers", box=box.SIMPLE)
    for head in ("", "tokens/s", "of the library's", "first token alone, ms", "beyond the library's", "step, ms"):
        table.add_column(head, justify="right")
    library = medians["library"]
    for name, figures in medians.items():
        table.add_row(
            name,
            f"{figures['tokens_per_second']:.0f}",
            f"{figures['tokens_per_second'] / library['tokens_per_second']:.2f}",
            f"{figures['first_token_ms']:.2f}",
            f"{figures['first_token_ms'] - library['first_token_ms']:+.2f}",
            f"{figures['step_ms']:.2f}" if "step_ms" in figures else "-",
        )
    wide_console().print(table)


if __name__ == "__main__":
    try:
        typer.run(main)
    except (ValueError, RuntimeError) as error:
        print_error(str(error))
        sys.exit(2)
