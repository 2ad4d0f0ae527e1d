"""A real server in a process of its own, for tests."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import httpx2 as httpx
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from graphdecode.models import resolve_model_path

ROOT = Path(__file__).parents[1]
START_SECONDS = 120
AT_LENGTH = bool(os.environ.get("GRAPHDECODE_AT_LENGTH"))


def until(holds: Callable[[], object], what: object = "", seconds: float = 120, pause: float = 0.005) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(pause)


class Served:
    """A server that is ready; what it says on standard error is kept."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._address = ""
        threading.Thread(target=self._read, daemon=True).start()
        self._ready.wait(START_SECONDS)
        if not self._address:
            process.kill()
            raise TimeoutError("".join(self.lines))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.match(r"serving \S+ on (\S+)", line):
                self._address = found[1]
                self._ready.set()
        self._ready.set()  # it ended

    @property
    def address(self) -> str:
        return self._address

    @property
    def engine_pid(self) -> int:
        (pid,) = (pid for pid, command in children_of(self.process.pid) if "engine_process" in command)
        return pid

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.address, timeout=180, **options)  # type: ignore[arg-type]

    def connection(self) -> socket.socket:
        """Return a connection without HTTP."""
        host, port = self.address.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=60)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.address}/metrics").text
        values = [line.rpartition(" ")[2] for line in text.splitlines() if re.match(rf"{re.escape(name)}[ {{]", line)]
        return sum(map(float, values))

    def until_idle(self, seconds: float = 60) -> None:
        """Wait until no request runs or waits, and no page is used."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        until(lambda: not any(map(self.metric, names)), names, seconds, pause=0.05)

    def until_said(self, text: str, since: int = 0) -> None:
        """Wait until a line behind the first `since` ones has a text: they come through a pipe."""
        until(lambda: any(text in line for line in self.lines[since:]), text)

    def until_healthy(self) -> None:
        """Wait until requests are served."""
        with self.client() as http:
            until(lambda: http.get("/health").status_code == 200, pause=0.1)


def children_of(parent: int) -> list[tuple[int, str]]:
    """Return the processes that another one started and that have not ended, with their commands."""
    asked = ["ps", "-ww", "--ppid", str(parent), "-o", "pid=,stat=,args="]
    told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    found = [line.split(None, 2) for line in told.splitlines()]
    return [(int(pid), command) for pid, state, command in found if not state.startswith("Z")]


_PAUSE_SECONDS = 0.005


def probe(address: str, worst: "Synchronized[float]", own: "Synchronized[float]", stop: Any) -> None:
    """Ask for /health all the time, in a process of its own; tell how late it itself woke from the pauses between."""
    with httpx.Client(base_url=address, timeout=180) as http:
        while not stop.is_set():
            began = time.monotonic()
            assert http.get("/health").status_code == 200
            ended = time.monotonic()
            worst.value = max(worst.value, ended - began)
            time.sleep(_PAUSE_SECONDS)
            own.value = max(own.value, time.monotonic() - ended - _PAUSE_SECONDS)


def health_beside(served: Served, ask: Callable[[], None]) -> float:
    """Return the longest that /health took while something was asked, in seconds, less what the machine was late."""
    context = multiprocessing.get_context("spawn")
    worst, own, stop = context.Value("d", 0.0), context.Value("d", 0.0), context.Event()
    prober = context.Process(target=probe, args=(served.address, worst, own, stop))
    prober.start()
    try:
        _until_asked(prober, worst)
        worst.value = 0.0
        ask()
        _until_asked(prober, worst)
    finally:
        stop.set()
        prober.join()
    return worst.value - own.value


def _until_asked(prober: SpawnProcess, worst: "Synchronized[float]") -> None:
    while not worst.value:
        assert prober.is_alive(), f"/health was asked for by a process that ended with {prober.exitcode}"
        time.sleep(0.01)


@contextlib.contextmanager
def serving(*options: str, model: str = "demo", environment: dict[str, str] | None = None) -> Iterator[Served]:
    fixed = ["--model", model, "--port", "0", "--device", "cpu"]
    command = [sys.executable, "-m", "graphdecode", "serve", *fixed, *options]
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | (environment or {}),
    )
    try:
        yield Served(process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def write_adapter(folder: Path, scale: float) -> None:
    """Save a random adapter of the demo model's attention outputs, as PEFT does."""
    tensors = {}
    with safe_open(next(resolve_model_path("demo").glob("*.safetensors")), framework="pt") as reader:
        for name in reader.keys():  # noqa: SIM118 (not a mapping)
            if name.endswith("o_proj.weight"):
                rows, columns = reader.get_slice(name).get_shape()
                drawn, module = torch.Generator().manual_seed(len(tensors)), name.removesuffix(".weight")
                tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(2, columns, generator=drawn)
                tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, 2, generator=drawn) * scale
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
