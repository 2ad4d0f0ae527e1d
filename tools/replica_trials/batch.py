"""A batch that is killed again and again, and still answers every line once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replica_trials.server import (
    ROWS,
    START_SECONDS,
    begun,
    command_of,
    processes_of,
    replicas_of,
    until_none_is_left,
)
from replica_trials.streams import requests_of

LINES = 5000
RUNS = 4  # all but the last are killed
ANSWER_TOKENS = 6
ON_RAY = ("--ray", "--replicas", "2")


def batch(model: str, *options: str) -> dict[str, Any]:
    """Kill a batch three times at random, and an engine of the run that ends it: every line is answered once."""
    draw = random.Random(7)
    with tempfile.TemporaryDirectory(prefix="gd", ignore_cleanup_errors=True) as folder:
        asked, answers, log = (Path(folder) / name for name in ("requests.jsonl", "answers.jsonl", "log"))
        asked.write_text("".join(f"{json.dumps(line)}\n" for line in _lines()))
        arguments = ("batch", str(asked), str(answers), "--model", model, "--max-batch-size", str(ROWS), *options)
        moments, began = list[int](), time.monotonic()
        for run in range(RUNS):
            moments.append(min(_line_count(answers) + draw.randrange(LINES // 4), LINES - 100))
            with begun(arguments, log, folder) as process:
                _until_lines(answers, moments[-1], process, log)
                if run < RUNS - 1:
                    process.kill()
                else:
                    os.kill(draw.choice(_engines(folder)), signal.SIGKILL)
                code = process.wait(2 * START_SECONDS)
        seconds = time.monotonic() - began
        none_left = until_none_is_left(folder)
        told = [json.loads(line) for line in answers.read_text().splitlines()]
    wrong = [line["response"]["body"]["error"]["message"] for line in told if line["response"]["status_code"] != 200]
    return {
        "lines": LINES,
        "killed_at_lines": moments[:-1],
        "engine_killed_at_line": moments[-1],
        "none_left_after_s": none_left,
        "exit_code": code,
        "answers": len(told),
        "answered_once": len({line["custom_id"] for line in told}) == len(told) == LINES,
        "statuses": dict(Counter(line["response"]["status_code"] for line in told)),
        "reasons": dict(Counter(wrong)),
        "seconds": seconds,
    }


def _engines(folder: str) -> list[int]:
    """Return the processes of the replicas; without Ray, that of the engine."""
    alone = [pid for pid in processes_of(folder) if "graphdecode.server.engine_process" in command_of(pid)]
    return replicas_of(folder) or alone


def _lines() -> Iterator[dict[str, Any]]:
    """Yield requests of a batch; one of a hundred cannot be served, and its line says why."""
    for number, body in enumerate(requests_of(LINES, 8, ANSWER_TOKENS)):
        wrong = {"max_tokens": "many"} if number % 100 == 99 else {}
        yield {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body | wrong}


def _line_count(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _until_lines(file: Path, count: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a file has so many lines."""
    end = time.monotonic() + 2 * START_SECONDS
    while _line_count(file) <= count:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(log.read_text()[-2000:])
        time.sleep(0.02)
