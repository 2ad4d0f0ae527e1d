"""Try what is claimed of replicas and of batches on a real Ray on this machine; `replica_trials` says what is tried.

python tools/try_replicas.py --model demo --out FILE

Nothing leaves the machine, Ray's files lie in a folder of their own, and all that was started is ended. A part takes
one to four minutes; `--part` tries some of them, and a file that has results already keeps those of the others.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from graphdecode.profiling.environment import describe_environment
from replica_trials.batch import ON_RAY, batch
from replica_trials.ends import ends
from replica_trials.kill import kill_under_load
from replica_trials.prefixes import prefixes
from replica_trials.scaling import scale_by_command, scale_by_load
from replica_trials.server import ROWS
from replica_trials.speed import speed, split


def main(
    model: Annotated[str, typer.Option(help="As graphdecode serve takes it.")] = "demo",
    tokens: Annotated[int, typer.Option(help="Of an answer.")] = 100,
    out: Annotated[Path | None, typer.Option(help="A file for the results.")] = None,
    part: Annotated[list[str] | None, typer.Option(help="Only this part; may be repeated.")] = None,
) -> None:
    """Show what is claimed, and write it down."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    parts = {
        "kill": lambda: kill_under_load(model, tokens),
        "kill_direct": lambda: kill_under_load(model, tokens, "--direct"),
        "scale_by_load": lambda: scale_by_load(model, tokens),
        "scale_by_command": lambda: scale_by_command(model, tokens),
        "prefixes": lambda: prefixes(model),
        "batch": lambda: batch(model),
        "batch_on_ray": lambda: batch(model, *ON_RAY),
        "ends": lambda: ends(model),
        "ends_direct": lambda: ends(model, "--direct"),
        "split": lambda: split(model, tokens),
        "speed": lambda: speed(model, tokens),
        "speed_direct": lambda: speed(model, tokens, "--direct"),
    }
    found: dict[str, Any] = json.loads(out.read_text()) if out is not None and out.exists() else {}
    found |= {"schema": 2, "environment": describe_environment("cpu"), "model": model}
    found |= {"answer_tokens": tokens, "rows": ROWS}
    for name in part or parts:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found[name] = parts[name]()
        print(json.dumps(found[name], indent=1), flush=True)
        if out is not None:
            out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
