"""Compares another commit's package with this one's, alternately, by any subject of `tools/bench`.

    tools/bench beside main~5 step --model demo --batch-sizes 1

The subject is this checkout's; the package is this one's and the commit's. All floats of the result are compared:
medians over the rounds, and the median of the rounds' ratios.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from harness import ROOT, Out, Rounds, alternated, command_of, record, show, write

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def measured(package: Path, subject: list[str]) -> dict[str, float]:
    """Return the figures of a subject with the package of a folder."""
    paths = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "found"
        command = command_of("bench", *subject, "--out", out)
        subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.DEVNULL, check=True)
        file = next(out.glob("*.json")) if out.is_dir() else out
        return dict(figures(json.loads(file.read_text())))


def figures(found: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Yield the floats of a result by their paths, except the environment's."""
    if isinstance(found, float):
        yield place, found
    elif isinstance(found, dict):
        for key, value in found.items():
            if key != "environment":
                yield from figures(value, f"{place}.{key}".strip("."))
    elif isinstance(found, list):
        for index, value in enumerate(found):
            yield from figures(value, f"{place}.{index}")


@app.command(help=__doc__, context_settings={"ignore_unknown_options": True})
def main(
    commit: Annotated[str, typer.Argument(help="As git names it.")],
    subject: Annotated[list[str], typer.Argument(help="A subject of tools/bench, with its options but for --out.")],
    rounds: Rounds = 3,
    out: Out = None,
) -> None:
    """Measure both alternately, and print the ratios."""
    with tempfile.TemporaryDirectory() as scratch:
        there = Path(scratch) / "there"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", there, commit], cwd=ROOT, check=True)
        try:
            calls = {"here": partial(measured, ROOT, subject), "there": partial(measured, there, subject)}
            found = alternated(calls, rounds)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", there], cwd=ROOT, check=True)
    rows = []
    for place in found["here"][0]:
        pairs = [(here.get(place), other.get(place)) for here, other in zip(found["here"], found["there"], strict=True)]
        both = [(here, other) for here, other in pairs if here and other]
        if len(both) == rounds:
            here, other = (statistics.median(each) for each in zip(*both, strict=True))
            times = statistics.median(one / two for one, two in both)
            rows.append({"figure": place, "here": here, "there": other, "times_there": times})
    columns = {"figure": "{figure}", "here": "{here:.4g}", commit: "{there:.4g}", "ratio": "{times_there:.4g}"}
    show(columns, rows)
    write(out, record(schema=1, subject=subject, against=commit, rows=rows))
