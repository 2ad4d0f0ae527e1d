"""The committed results: the README's table, or the history of one metric.

tools/bench results                                    the table, as Markdown
tools/bench results --history cpu-xeon-2/generate-demo-float32.json --metric rows.0.ms_per_step.graphdecode
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer

from harness import TOOLS, markdown

RESULTS = TOOLS / "results"


def table(results: Path) -> str:
    """Return all results of `tools/bench generate` in Markdown, with a column for each peer."""
    found = [(path.parent.name, json.loads(path.read_text())) for path in sorted(results.glob("*/generate-*.json"))]
    peers = dict.fromkeys(name for _, result in found for row in result["rows"] for name in row["times_faster_than"])
    peers.pop("graphdecode", None)
    columns = {"machine": "{machine}, {threads} threads", "instructions": "{environment[instructions]}"}
    columns |= {"model": "{model} {dtype}", "batch": "{batch_size}", "ms/step": "{ms_per_step[graphdecode]:.2f}"}
    columns |= {f"times {peer}": f"{{times_faster_than[{peer}]:.2f}}" for peer in peers}
    columns["times the weight-read floor"] = "{times_floor[graphdecode]:.2f}"
    rows = ({"machine": machine} | result | row for machine, result in found for row in result["rows"])
    return markdown(columns, rows)


def pick(result: Any, metric: str) -> float | None:
    """Return the value at a path such as `rows.0.ms_per_step.graphdecode`, or None."""
    try:
        for key in metric.split("."):
            result = result[int(key)] if isinstance(result, list) else result[key]
        return float(result)
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def history(results: Path, file: str, metric: str) -> list[tuple[str, str, float]]:
    """Return (commit, day, value) for every committed version of a result that has the value, oldest first."""
    log = _git(results, "log", "--reverse", "--format=%h %cs", "--diff-filter=AM", "--", file)
    values = []
    for line in log.splitlines():
        commit, day = line.split()
        value = pick(json.loads(_git(results, "show", f"{commit}:./{file}")), metric)
        if value is not None:
            values.append((commit, day, value))
    return values


def _git(folder: Path, *command: str) -> str:
    return subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, check=True).stdout


def main(
    file: Annotated[str | None, typer.Option("--history", help="A result, relative to tools/results.")] = None,
    metric: Annotated[str, typer.Option(help="Path of the value in the result.")] = "rows.0.ms_per_step.graphdecode",
    results: Annotated[Path, typer.Option(help="Where the results are.")] = RESULTS,
) -> None:
    if file is None:
        print(table(results))
        return
    values = history(results, file, metric)
    if not values:
        raise typer.BadParameter(f"no committed version of {file} has {metric}")
    for commit, day, value in values:
        print(f"{commit} {day} {value:.4f}")
