"""Fuzzing over HTTP: a server gets malformed requests, and must keep answering /health."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx
from mutated_requests import TEMPLATE, MutatedRequest, greedy_request, mutated_request
from served import Served, children_of, serving

_AT_A_TIME = 8
_LEAVING_SHARE = 0.2  # of the clients, which disconnect before the response
_CONFIG = ("--max-batch-size", "4", "--max-sequence-length", "256", "--served-model-name", "demo")
_PAUSE_SECONDS = 0.01  # between two requests of /health
_GOOD = {"prompt": "12+30=", "max_tokens": 8, "temperature": 0}


_LATE_MS, _HANG_MS = 100.0, 1000.0  # limits for /health: beyond the machine's own delays, and absolute
_GROWN = 0.05  # growth of the server's memory that is allowed
_UNAVAILABLE_SHARE = 0.01  # of requests that may get 503, because the machine is under load
_WARM_MINUTES = 0.5  # until all processes run and caches are full
_IDLE_SECONDS = 3.0
_SETTLED_SECONDS = 10.0  # until temporary caches are empty


class Probed(NamedTuple):
    """Latencies in milliseconds, ascending.

    Attributes:
        late_ms: of /health during the attack.
        idle_ms: of /health before the attack, on the idle server.
        own_ms: how late the prober woke from its own sleeps, a measure of the machine's load.
        error: that ended the measurement.
    """

    late_ms: list[float]
    idle_ms: list[float]
    own_ms: list[float]
    error: str | None = None

    @property
    def allowed_ms(self) -> float:
        """The longest time that /health may take."""
        return _LATE_MS + max(self.idle_ms[-1:] + self.own_ms[-1:], default=0.0)


class HttpOutcome(NamedTuple):
    """The result of an attack.

    Attributes:
        statuses: count of each; "left" for clients that disconnected.
        failures: wrong responses, with their seeds.
        probed: /health during the attack.
        before: memory in bytes of each process of the server, by name.
        after: likewise, after the attack.
    """

    statuses: Counter[str]
    failures: list[str]
    probed: Probed
    before: dict[str, int]
    after: dict[str, int]

    @property
    def missed(self) -> list[str]:
        """The goals that were missed, as texts."""
        probed, missed = self.probed, []
        if self.failures:
            missed.append(f"{len(self.failures)} failures")
        if probed.error is not None:
            missed.append(f"/health: {probed.error}")
        if not probed.late_ms:
            missed.append("/health was never answered")
        elif probed.late_ms[-1] > probed.allowed_ms:
            missed.append(f"/health took {probed.late_ms[-1]:.0f} ms, but may take {probed.allowed_ms:.0f}")
        if probed.late_ms and probed.late_ms[-1] > _HANG_MS:
            missed.append(f"the server hung for {probed.late_ms[-1]:.0f} ms")
        if self.statuses["503"] > _UNAVAILABLE_SHARE * self.statuses.total():
            missed.append(f"{self.statuses['503']} requests got 503")
        before, after = sum(self.before.values()), sum(self.after.values())
        if after > (1 + _GROWN) * before:
            missed.append(f"memory grew from {before / 1e6:.0f} to {after / 1e6:.0f} MB, by more than {_GROWN:.0%}")
        return missed


class Prober:
    """Requests a server's /health continuously, in its own process."""

    def __init__(self, address: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop, self._loaded = context.Event(), context.Event()
        self._told, telling = context.Pipe(duplex=False)
        self._process = context.Process(target=_probe, args=(address, self._loaded, self._stop, telling), daemon=True)
        self._process.start()
        telling.close()  # or a crash would not end the pipe

    def load_begins(self) -> None:
        """Mark the begin of the attack."""
        self._loaded.set()

    def end(self) -> Probed:
        """Stop, and return the latencies; a prober that hangs or has crashed is an error in them."""
        self._stop.set()
        try:
            probed: Probed = self._told.recv() if self._told.poll(120) else Probed([], [], [], "the prober hangs")
        except EOFError:
            self._process.join(10)
            probed = Probed([], [], [], f"the prober ended with {self._process.exitcode}")
        self._process.kill()
        self._process.join()
        return probed


def attacked_over_http(minutes: float, first: int, report: Callable[[str], object]) -> HttpOutcome:
    """Send greedy and mutated requests to a server of the demo model for some minutes.

    Args:
        minutes: for how long.
        first: seed of the first request.
        report: called with each failure.
    """
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)  # the demo model has none, and would refuse all chats
        return _attacked(minutes, first, report, template)


def _attacked(minutes: float, first: int, report: Callable[[str], object], template: Path) -> HttpOutcome:
    statuses, failures = Counter[str](), list[str]()
    with serving(*_CONFIG, "--chat-template", str(template)) as server:
        asyncio.run(_storm(server, _WARM_MINUTES, 10**9, Counter(), failures, report))
        server.until_idle()
        time.sleep(_SETTLED_SECONDS)
        before = _memory(server)
        prober = Prober(server.address)
        try:
            time.sleep(_IDLE_SECONDS)
            prober.load_begins()
            asyncio.run(_storm(server, minutes, first, statuses, failures, report))
        finally:
            probed = prober.end()
        server.until_idle()
        with server.client() as http:
            text = http.post("/v1/completions", json=_GOOD).json()["choices"][0]["text"].strip()
        if text != "42":
            failures.append(f"12+30= is {text!r} afterwards")
        time.sleep(_SETTLED_SECONDS)
        return HttpOutcome(statuses, failures, probed, before, _memory(server))


async def _storm(
    server: Served,
    minutes: float,
    first: int,
    statuses: Counter[str],
    failures: list[str],
    report: Callable[[str], object] = lambda _: None,
) -> None:
    end, seeds = time.monotonic() + 60 * minutes, iter(range(first, 2 * 10**9))

    async def ask(http: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            seed = next(seeds)
            request = greedy_request(seed) if seed % 2 else mutated_request(seed)
            leaves = random.Random(seed).random() < _LEAVING_SHARE
            status, wrong = await asked(http, request, 0.3 if leaves else 200)
            statuses["left" if status is None and leaves else str(status)] += 1
            if wrong is not None and not (status is None and leaves):
                failures.append(f"{'greedy' if seed % 2 else 'mutated'} {seed}: {request.path} {wrong}")
                report(failures[-1])

    async with httpx.AsyncClient(base_url=server.address) as http:
        await asyncio.gather(*(ask(http) for _ in range(_AT_A_TIME)))


async def asked(http: httpx.AsyncClient, request: MutatedRequest, seconds: float) -> tuple[int | None, str | None]:
    """Return the status of a response, and what is wrong with it."""
    try:
        answer = await http.request(
            request.method, request.path, content=request.content, headers=request.headers, timeout=seconds
        )
    except httpx.HTTPError as error:
        return None, f"{type(error).__name__}: {error}"
    if answer.status_code == 503 and "retry-after" in answer.headers:  # their share is checked at the end
        return 503, None
    if answer.status_code >= 500 or "panicked" in answer.text or "Traceback" in answer.text:
        return answer.status_code, answer.text[:300]
    if answer.status_code >= 400 and answer.content:
        try:
            message = json.loads(answer.content)["error"]["message"]
        except (ValueError, LookupError, TypeError):
            return answer.status_code, f"no message: {answer.text[:300]}"
        if len(message) > 5000:
            return answer.status_code, f"a message of {len(message)} characters: {message[:100]}"
    return answer.status_code, None


def _probe(address: str, loaded: Any, stop: Any, telling: Any) -> None:
    idle_ms, late_ms, own_ms, error = list[float](), list[float](), list[float](), None
    with httpx.Client(base_url=address, timeout=60) as http:
        while error is None and not (late_ms and stop.is_set()):
            is_loaded, began = loaded.is_set(), time.perf_counter()
            try:
                status = http.get("/health").status_code
            except httpx.HTTPError as failed:
                error = f"{type(failed).__name__}: {failed}"
                continue
            ended = time.perf_counter()
            if status != 200:
                error = f"it is {status}"
            (late_ms if is_loaded else idle_ms).append(1000 * (ended - began))
            time.sleep(_PAUSE_SECONDS)
            own_ms.append(1000 * (time.perf_counter() - ended - _PAUSE_SECONDS))
    telling.send(Probed(sorted(late_ms), sorted(idle_ms), sorted(own_ms), error))


def _memory(server: Served) -> dict[str, int]:
    """Return the memory of each process of a server, shared pages divided among them."""
    told = {"HTTP": server.process.pid}
    for pid, command in children_of(server.process.pid):
        told[next((name for name in ("engine", "fork_server") if name in command), command)] = pid
    return {name: _proportional_bytes(pid) for name, pid in told.items()}


def _proportional_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        proportional = next(line for line in file if line.startswith("Pss:"))
    return 1024 * int(proportional.split()[1])
