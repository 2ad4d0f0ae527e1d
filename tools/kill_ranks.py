"""Kill or stop one rank of a tensor-parallel engine while it captures, computes prompts, or decodes.

    python tools/kill_ranks.py [--times 10] [--limit 3] [--seed 0] [--phases capture,prefill,decode]
                               [--signals SIGKILL,SIGSTOP] [--collectives shared] [--out FILE]

Each trial is an engine of the demo over two ranks in processes of its own. Some time into the phase one of the ranks is
sent SIGKILL or SIGSTOP. The others must end within the limit, or soon after it on a busy machine, with an error that
names the rank, and no process may be left. A stopped rank 0 is let go on when the others have ended, and must end, too.
A trial in which somebody else lets the stopped rank go on shows nothing, and is made again. With --out the rows of this
run take the place of the same ones in a file.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from graphdecode.profiling.environment import describe_environment

PHASES = ("capture", "prefill", "decode")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
PATIENCE_SECONDS = 60.0  # beyond the limit: to be told, to print, and to end, on a machine that others use too
_SCHEMA = 1


class Trial(NamedTuple):
    """What came of one trial.

    Attributes:
        wrong: what is wrong; "" if nothing is.
        seconds: until the others had ended.
        is_void: somebody else let the stopped rank go on.
    """

    wrong: str
    seconds: float
    is_void: bool = False


def engine(phase: str, limit_seconds: float, how: str) -> None:
    """Run the trial's engine: print the ranks' processes and the phase, and work in it until something happens."""
    from graphdecode import EngineConfig, Request, SamplingParams
    from graphdecode.engine.loading import load_engine, start_ranks_of
    from graphdecode.graphs import GraphManager
    from graphdecode.models import resolve_model_path

    faulthandler.register(signal.SIGUSR1)
    settings = EngineConfig.of(
        None, tensor_parallel_size=2, max_batch_size=32, rank_limit_seconds=limit_seconds, max_sequence_length=256,
        batch_sizes=list(range(1, 33)), prefix_cache=False, max_graphs=32, collectives=how,
    )  # fmt: skip
    ranks = start_ranks_of(settings)
    print("ranks", os.getpid(), *ranks.pids, flush=True)
    if phase == "capture":
        capture = GraphManager.capture

        def told(graphs: GraphManager, progress: bool = True) -> object:
            print("phase", flush=True)
            return capture(graphs, progress)

        GraphManager.capture = told  # type: ignore[method-assign,assignment]
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
    """Run one trial: some seconds into a phase, a rank is sent a signal."""
    command = [sys.executable, str(Path(__file__)), "--engine", phase, "--limit", str(limit_seconds)]
    command += ["--collectives", how]
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
            _send(pids[0], signal.SIGUSR1)  # it says where it is
            time.sleep(0.5)
        for pid in left:
            _send(pid, signal.SIGKILL)
        process.wait()
        reader.join(2)
    text = "".join(said)
    # of a killed rank 0 its followers tell, on their standard error; of all others rank 0 does
    expected = rf"rank {victim}\b.*({'stalled|did not come' if is_stop else 'SIGKILL|died'})"
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
    """Return the letter for a process's state; Z where there is none any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _lives(pid: int) -> bool:
    return _state(pid) != "Z"


def trials(phase: str, number: signal.Signals, given: argparse.Namespace, draw: random.Random) -> dict[str, Any]:
    """Run as many trials as are asked for, of each rank by turns; return what came of them."""
    row: dict[str, Any] = {"collectives": given.collectives, "phase": phase, "signal": number.name}
    seconds, failures, void = [], 0, 0
    while len(seconds) < given.times:
        victim, wait = len(seconds) % 2, draw.uniform(0.0, 0.3)
        found = trial(phase, number, victim, given.limit, wait, given.collectives)
        if found.is_void:
            void += 1
            continue
        seconds.append(found.seconds)
        if found.wrong:
            failures += 1
            print(f"{phase} {number.name} of rank {victim} after {wait:.2f} s: {found.wrong}", flush=True)
    print(f"{phase:8s} {number.name}: {given.times} times, all over within {max(seconds):.1f} s", flush=True)
    return row | {
        "limit_s": given.limit, "times": given.times, "failures": failures, "void": void,
        "over_s": [round(each, 2) for each in seconds],
    }  # fmt: skip


def written(out: Path, rows: list[dict[str, Any]]) -> None:
    """Put rows into a file, in the place of the same ones."""
    keys = ("collectives", "phase", "signal")
    found = {"schema": _SCHEMA, "rows": []} | (json.loads(out.read_text()) if out.exists() else {})
    new = [tuple(row[key] for key in keys) for row in rows]
    rows = [row for row in found["rows"] if tuple(row[key] for key in keys) not in new] + rows
    found |= {"environment": describe_environment("cpu"), "rows": rows}
    out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--limit", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--signals", default=",".join(number.name for number in SIGNALS))
    parser.add_argument("--collectives", default="shared")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        engine(given.engine, given.limit, given.collectives)
    rows = []
    for phase in given.phases.split(","):
        for name in given.signals.split(","):
            draw = random.Random(f"{given.seed} {phase} {name}")
            rows.append(trials(phase, signal.Signals[name], given, draw))
    if given.out is not None:
        written(given.out, rows)
    sys.exit(1 if any(row["failures"] for row in rows) else 0)


if __name__ == "__main__":
    main()
