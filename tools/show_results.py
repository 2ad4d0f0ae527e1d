"""Show the committed results: the table of the README, or the history of one metric.

python tools/show_results.py                                    the table, as Markdown
python tools/show_results.py --history cpu-epyc-2/generate-demo-float32.json --metric rows.0.ms_per_step.graphdecode
"""

import json
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer

RESULTS = Path(__file__).parent / "results"


def table() -> str:
    """Return all results of `bench_generate.py` as a Markdown table."""
    lines = [
        "| machine | model | batch | ms/step | times transformers | times the weight-read floor |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted(RESULTS.glob("*/generate-*.json")):
        result = json.loads(path.read_text())
        machine = f"{path.parent.name}, {result['threads']} threads"
        for row in result["rows"]:
            ratios = row["times_faster_than"]
            lines.append(
                f"| {machine} | {result['model']} {result['dtype']} | {row['batch_size']} "
                f"| {row['ms_per_step']['graphdecode']:.2f} | {ratios['transformers']:.2f} "
                f"| {row['times_floor']['graphdecode']:.2f} |"
            )
    return "\n".join(lines)


def pick(result: Any, metric: str) -> Any:
    """Return the value at a path such as `rows.0.ms_per_step.graphdecode`."""
    for key in metric.split("."):
        result = result[int(key)] if isinstance(result, list) else result[key]
    return result


def history(file: str, metric: str) -> list[tuple[str, str, float]]:
    """Return (commit, day, value) for every committed version of a result, oldest first."""
    path = str((RESULTS / file).relative_to(Path(__file__).parent.parent))
    command = ["git", "log", "--reverse", "--format=%h %cs", "--", path]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    values = []
    for line in log:
        commit, day = line.split()
        shown = subprocess.run(["git", "show", f"{commit}:{path}"], capture_output=True, text=True, check=False)
        if shown.returncode == 0:
            values.append((commit, day, float(pick(json.loads(shown.stdout), metric))))
    return values


def main(
    file: Annotated[str | None, typer.Option("--history", help="A result, relative to tools/results.")] = None,
    metric: Annotated[str, typer.Option(help="Path of the value in the result.")] = "rows.0.ms_per_step.graphdecode",
    plot: Annotated[Path | None, typer.Option(help="Draw the history into this PNG.")] = None,
) -> None:
    """Print the README's table, or the history of a metric."""
    if file is None:
        print(table())
        return
    values = history(file, metric)
    for commit, day, value in values:
        print(f"{commit} {day} {value:.4f}")
    if plot is not None and values:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.5, 4), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        axes.plot([f"{commit}\n{day}" for commit, day, _ in values], [value for *_, value in values], "o-")
        axes.set(xlabel="commit", ylabel=metric.rpartition(".")[0] or metric, title=f"{file}: {metric}")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        figure.savefig(plot)


if __name__ == "__main__":
    typer.run(main)
