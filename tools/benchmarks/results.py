"""The committed results: the README's table, or the history of one metric.

tools/bench results                                    the table, as Markdown
tools/bench results --history cpu-xeon-2/generate-demo-float32.json --metric rows.0.ms_per_step.graphdecode
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from harness import TOOLS, markdown

RESULTS = TOOLS / "results"


def table(results: Path) -> str:
    """Return the speed of decode steps beside peers in Markdown: of real models, the demo is in `tools/results`."""
    rows = [row for path in sorted(results.glob("*/gguf-smollm2-*.json")) for row in _rows_of_blocks(path)]
    real = [path for path in sorted(results.glob("*/generate-*.json")) if "-demo-" not in path.stem]
    rows += [row for path in real for row in _rows_of_peers(path)]
    peers = dict.fromkeys(name for row in rows for name in row["times_faster_than"])
    peers.pop("graphdecode", None)
    columns = {"machine": "{machine}", "model": "{model} {dtype}", "batch": "{batch_size}"}
    columns |= {"ms/step": "{ms_per_step[graphdecode]:.2f}"}
    columns |= {f"times {peer}": f"{{times_faster_than[{peer}]:.2f}}" for peer in peers}
    columns["times the weight-read floor"] = "{times_floor[graphdecode]:.2f}"
    return markdown(columns, rows)


def _rows_of_peers(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a result of `tools/bench generate`."""
    result = json.loads(path.read_text())
    return ({"machine": path.parent.name} | result | row for row in result["rows"])


def _rows_of_blocks(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the steps of a GGUF file in the form of `tools/bench generate`; its floor is that of one row."""
    result, (_, model, dtype) = json.loads(path.read_text()), path.stem.split("-")
    for name, engines in result["workloads"].items():
        size = name.removeprefix("batch_")
        if size.isdecimal():
            ours, peer = engines["blocks"]["ms"], engines.get("llama_cpp")
            yield {
                "machine": path.parent.name,
                "model": model,
                "dtype": dtype,
                "batch_size": size,
                "ms_per_step": {"graphdecode": ours},
                "times_faster_than": {} if peer is None else {"llama-cpp": peer["ms"] / ours},
                "times_floor": {"graphdecode": ours / result["floor_ms"]},
            }


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
