"""Kills or stops a rank of a tensor-parallel engine: the others must end and name it, and leave no process.

A trial is an engine of the demo over two ranks that captures, prefills, or decodes. One rank gets SIGKILL or SIGSTOP.
The other must end within the limit, or soon after on a busy machine, with an error that names the rank. A stopped rank
0 is continued afterwards, and must end too. A trial in which something else continues the stopped rank is repeated.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from graphdecode import EngineConfig, Request, SamplingParams
from graphdecode.engine.loading import load_engine, start_ranks_of
from graphdecode.graphs import GraphTable
from graphdecode.models import resolve_model_path
from harness import Out, command_of, names, read, record, replaced, write

PHASES = ("capture", "prefill", "decode")
SIGNALS = {number.name: number for number in (signal.SIGKILL, signal.SIGSTOP)}
PATIENCE_SECONDS = 60.0  # beyond the limit, for output and exit on a busy machine


class Trial(NamedTuple):
    """The result of one trial."""

    wrong: str  # an error, or ""
    seconds: float  # until the other ranks had ended
    is_void: bool = False  # something else has continued the stopped rank


def engine(phase: str, limit_seconds: float, how: Any) -> None:
    """Run the trial's engine: print the ranks' processes and the phase, and run until an error."""
    faulthandler.register(signal.SIGUSR1)
    settings = EngineConfig.of(
        None, tensor_parallel_size=2, max_batch_size=32, rank_limit_seconds=limit_seconds, max_sequence_length=256,
        batch_sizes=list(range(1, 33)), prefix_cache=False, max_graphs=32, collectives=how,
    )  # fmt: skip
    ranks = start_ranks_of(settings)
    print("ranks", os.getpid(), *ranks.pids, flush=True)
    if phase == "capture":
        capture = GraphTable.capture

        def told(table: GraphTable, progress: bool = True) -> None:
            print("phase", flush=True)
            capture(table, progress)

        GraphTable.capture = told  # type: ignore[method-assign,assignment]
    running = load_engine(resolve_model_path("demo"), settings, ranks=ranks)
    if phase != "capture":
        print("phase", flush=True)
    length, tokens = (200, 1) if phase == "prefill" else (4, 200)
    while True:
        for row in range(32):
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            running.add(Request([1 + row] * length, params))
        while running.has_work:
            running.step()


def trial(
    phase: str, number: signal.Signals, victim: int, limit_seconds: float, wait: float, how: str = "shared"
) -> Trial:
    """Send a rank a signal some seconds into a phase, and watch the other ranks."""
    command = command_of("check", "kill-ranks", "--engine", phase, "--limit", limit_seconds, "--collectives", how)
    is_stop, is_void = number == signal.SIGSTOP, False
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
        reader.start()
        pids = [int(pid) for pid in process.stdout.readline().split()[1:]]
        process.stdout.readline()
        time.sleep(wait)
        began = time.monotonic()
        os.kill(pids[victim], number)
        others = [pid for rank, pid in enumerate(pids) if rank != victim]
        while any(map(_lives, others)) and time.monotonic() - began < limit_seconds + PATIENCE_SECONDS:
            time.sleep(0.02)
            is_void = is_void or (is_stop and victim == 0 and _state(pids[0]) not in "Tt")
        seconds = time.monotonic() - began
        left = [pid for pid in others if _lives(pid)]
        if victim == 0 and is_stop:
            os.kill(pids[0], signal.SIGCONT)
        ends = time.monotonic() + PATIENCE_SECONDS
        while any(map(_lives, pids)) and time.monotonic() < ends:
            time.sleep(0.02)
        left += [pid for pid in pids if _lives(pid) and pid not in left]
        if pids[0] in left:
            _send(pids[0], signal.SIGUSR1)  # it prints its stack
            time.sleep(0.5)
        for pid in left:
            _send(pid, signal.SIGKILL)
        process.wait()
        reader.join(2)
    text = "".join(said)
    # rank 0 reports other ranks; if it is killed, they report it on standard error
    expected = rf"rank {victim}\b.*({'stalled|did not reach' if is_stop else 'SIGKILL|died'})"
    wrong = ""
    if left:
        wrong = f"{len(left)} processes were left: {text[-4000:]}"
    elif not re.search(expected, text):
        wrong = f"no error names rank {victim}: {text[-2000:]}"
    return Trial(wrong, seconds, is_void)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _state(pid: int) -> str:
    """Return the letter of a process's state; Z if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _lives(pid: int) -> bool:
    return _state(pid) != "Z"


def trials(phase: str, name: str, how: str, times: int, limit: float, draw: random.Random) -> dict[str, Any]:
    seconds: list[float] = []
    failures = void = 0
    while len(seconds) < times:
        victim, wait = len(seconds) % 2, draw.uniform(0.0, 0.3)
        found = trial(phase, SIGNALS[name], victim, limit, wait, how)
        if found.is_void:
            void += 1
            continue
        seconds.append(found.seconds)
        if found.wrong:
            failures += 1
            print(f"{phase} {name} of rank {victim} after {wait:.2f} s: {found.wrong}", flush=True)
    print(f"{phase:8s} {name}: {times} times, all ended within {max(seconds):.1f} s", flush=True)
    return {
        "collectives": how,
        "phase": phase,
        "signal": name,
        "limit_s": limit,
        "times": times,
        "failures": failures,
        "void": void,
        "over_s": [round(each, 2) for each in seconds],
    }


def main(
    times: Annotated[int, typer.Option(help="Trials of each phase and signal.", min=1)] = 10,
    limit: Annotated[float, typer.Option(help="Seconds after which a rank that says nothing is given up.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Of the waits.")] = 0,
    phases: Annotated[str, typer.Option(help="With commas between.")] = ",".join(PHASES),
    signals: Annotated[str, typer.Option(help="With commas between.")] = ",".join(SIGNALS),
    collectives: Annotated[str, typer.Option(help="shared or gloo.")] = "shared",
    out: Out = None,
    of_phase: Annotated[str, typer.Option("--engine", hidden=True)] = "",
) -> None:
    """Run all trials; exit code 1 if one failed."""
    if of_phase:
        engine(of_phase, limit, collectives)
    found, failures = read(out, schema=1, rows=[]), 0
    for phase in names(phases, PHASES, "--phases"):
        for name in names(signals, SIGNALS, "--signals"):
            draw = random.Random(f"{seed} {phase} {name}")
            row = trials(phase, name, collectives, times, limit, draw)
            failures += row["failures"]
            found |= record(rows=replaced(found["rows"], row, "collectives", "phase", "signal"))
            write(out, found)
    raise typer.Exit(1 if failures else 0)
