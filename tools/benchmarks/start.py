"""Time from the start of a process to its first output, alternating with the import of torch.

    tools/bench start --out start.json

Ratios to the import of torch are compared with the committed result of the same processor and instruction set; those
over 5% larger are named.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from graphdecode.hub.model_path import installable
from graphdecode.kernels.native.private_folder import FOLDER_VARIABLE
from harness import Out, Rounds, alternated, record, show, warn_if_slower, write

QUESTION = "What is the capital of France?"


def seconds_to(text: str, *arguments: str, stream: str = "stdout", cache: str | None = None) -> float:
    """Return the time until a new Python process has printed a text; it is ended then. `cache`: its cache folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if cache is not None:
        environment[FOLDER_VARIABLE] = cache
    began, streams = time.perf_counter(), dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    streams[stream] = subprocess.PIPE
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command, env=environment, text=True, stdout=streams["stdout"], stderr=streams["stderr"]
    ) as process:
        lines = getattr(process, stream)
        printed = ""
        while text not in printed:
            piece = lines.read(1)
            if not piece:
                raise RuntimeError(f"{' '.join(arguments)} ended with {process.wait()}, and did not print {text!r}")
            printed += piece
        seconds = time.perf_counter() - began
        process.send_signal(signal.SIGKILL if stream == "stdout" else signal.SIGTERM)
    return seconds


def seconds_of_first_run(text: str, *arguments: str) -> float:
    """Return the same for a first run, which compiles kernels and chooses forms of weights."""
    with tempfile.TemporaryDirectory() as cache:
        return seconds_to(text, *arguments, cache=cache)


def subjects() -> dict[str, Callable[[], float]]:
    """Return what is started and timed, by name."""
    command = ("-m", "graphdecode")
    found: dict[str, Callable[[], float]] = {
        "import torch": partial(seconds_to, "1", "-c", "import torch; print(1, flush=True)"),
        "demo": partial(seconds_to, "8", *command, "generate", "--prompt", "417+385="),
    }
    model = installable("smollm2")
    if model is not None and model.installed_file() is not None:
        asked = ("T", *command, "chat", "--model", "smollm2", QUESTION)
        found["smollm2"] = partial(seconds_to, *asked)
        found["smollm2, first run"] = partial(seconds_of_first_run, *asked)
        served = (*command, "serve", "--model", "smollm2", "--max-batch-size", "32", "--port", "0")
        found["smollm2, 32 rows served"] = partial(seconds_to, "serving", *served, stream="stderr")
    return found


def figures_of(result: Any) -> dict[str, float]:
    return {row["subject"]: row["times_import"] for row in result["rows"]}


def main(rounds: Rounds = 7, out: Out = None) -> None:
    turns = alternated(subjects(), rounds, warm=1)
    imports = turns["import torch"]
    rows = []
    for name, seconds in turns.items():
        beyond = [each - one for each, one in zip(seconds, imports, strict=True)]
        rows.append(
            {
                "subject": name,
                "seconds": statistics.median(seconds),
                "beyond_import_seconds": statistics.median(beyond),
                "times_import": statistics.median(each / one for each, one in zip(seconds, imports, strict=True)),
                "turns_seconds": seconds,
            }
        )
    columns = {
        "start": "{subject}",
        "seconds": "{seconds:.2f}",
        "beyond import torch": "{beyond_import_seconds:.2f}",
        "times import torch": "{times_import:.2f}",
    }
    show(columns, rows)
    found = record(schema=1, rounds=rounds, rows=rows)
    warn_if_slower("start.json", found, figures_of)
    write(out, found)
