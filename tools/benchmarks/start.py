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
import time
from functools import partial
from typing import Any

from graphdecode.models.source import installable
from harness import Out, Rounds, alternated, record, show, warn_if_slower, write

QUESTION = "What is the capital of France?"
SERVED = ("--max-batch-size", "32", "--port", "0")


def seconds_to(text: str, *arguments: str, stream: str = "stdout") -> float:
    """Return the time until a new Python process has printed a text; it is ended then."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
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


def subjects() -> dict[str, tuple[str, ...]]:
    """Return what is started, by name: the text to wait for, and the arguments."""
    command = ("-m", "graphdecode")
    found = {
        "import torch": ("1", "-c", "import torch; print(1, flush=True)"),
        "demo": ("8", *command, "generate", "--prompt", "417+385="),
    }
    model = installable("smollm2")
    if model is not None and model.installed_file() is not None:
        found["smollm2"] = ("T", *command, "chat", "--model", "smollm2", QUESTION)
        found["smollm2, 32 rows served"] = ("serving", *command, "serve", "--model", "smollm2", *SERVED)
    return found


def figures_of(result: Any) -> dict[str, float]:
    return {row["subject"]: row["times_import"] for row in result["rows"]}


def main(rounds: Rounds = 7, out: Out = None) -> None:
    calls = {
        name: partial(seconds_to, *given, stream="stderr" if "served" in name else "stdout")
        for name, given in subjects().items()
    }
    turns = alternated(calls, rounds, warm=1)
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
