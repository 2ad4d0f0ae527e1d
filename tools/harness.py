"""Shared by the subjects of `tools/bench` and `tools/check`: alternating runs, result files, tables, processes."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from graphdecode import LLM, SamplingParams
from graphdecode.cli.options import wide_console
from graphdecode.errors import ArgumentError
from graphdecode.models import resolve_device
from graphdecode.profiling.environment import describe_environment
from graphdecode.text import RequestOutput

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
SLOWER = 1.05  # ratio to a committed figure that is reported
Found = TypeVar("Found")
Out = Annotated[Path | None, typer.Option(help="A file for the figures, as JSON.", dir_okay=False)]
OutFolder = Annotated[Path | None, typer.Option(help="A folder for the figures, as JSON.", file_okay=False)]
Model = Annotated[str, typer.Option(help="A checkpoint folder or file, a repository id, or a name such as demo.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="Of the weights: float32, bfloat16, float16, or for some subjects auto.")]
Sizes = Annotated[str, typer.Option(help="Numbers, separated by commas.")]
Rounds = Annotated[int, typer.Option(help="Rounds of each that count.", min=1)]
LlamaPython = Annotated[Path | None, typer.Option(help="An interpreter with llama-cpp-python.")]


def until(ready: Callable[[], Found], seconds: float, why: str, every: float = 0.2) -> Found:
    """Poll until a call returns something true, and return that."""
    end = time.monotonic() + seconds
    while not (found := ready()):
        if time.monotonic() > end:
            raise TimeoutError(f"{why} after {seconds:g} s")
        time.sleep(every)
    return found


def command_of(program: str, *arguments: object) -> list[str]:
    """Return the command of a program in this folder, such as `bench`."""
    return [sys.executable, str(TOOLS / program), *map(str, arguments)]


def numbers(text: str, option: str = "a list") -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"{option} must be numbers separated by commas, got {text!r}") from None


def names(text: str, known: Iterable[str], option: str) -> list[str]:
    """Parse names separated by commas."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if unknown := [name for name in found if name not in known]:
        raise ArgumentError(f"{option} has unknown names: {', '.join(unknown)}; there are {', '.join(known)}")
    return found


def alternated(calls: Mapping[str, Callable[[], Found]], rounds: int, *, warm: int = 0) -> dict[str, list[Found]]:
    """Make calls alternately (A B A B ...), and return the results of each, without those of the warm-up rounds."""
    found: dict[str, list[Found]] = {name: [] for name in calls}
    for _ in range(warm + rounds):
        for name, call in calls.items():
            found[name].append(call())
    return {name: results[warm:] for name, results in found.items()}


def medians(turns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in turns.items()}


def seconds_of(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    call()
    return clock() - began


def step_seconds(
    answer: Callable[[int], object], new_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the time of one decode step: a long run less a short one, so that prefill does not count."""
    short = seconds_of(lambda: answer(1), clock)
    return (seconds_of(lambda: answer(new_tokens + 1), clock) - short) / new_tokens


def perplexity(llm: LLM, ids: list[int]) -> float:
    (output,) = llm.generate([ids], SamplingParams(prompt_logprobs=0, max_tokens=1), use_tqdm=False)
    assert output.prompt_logprobs is not None
    scored = [entry[token].logprob for entry, token in zip(output.prompt_logprobs, ids, strict=True) if entry]
    return math.exp(-sum(scored) / len(scored))


def request_times(outputs: Iterable[RequestOutput]) -> tuple[float, float, float]:
    """Return the times of the first arrival, of the last first token, and of the last finish."""
    metrics = [output.metrics for output in outputs]
    arrived, first = (each.arrival_time for each in metrics), (each.first_token_time or 0.0 for each in metrics)
    return min(arrived), max(first), max(each.finished_time or 0.0 for each in metrics)


def record(device: object = "cpu", /, **facts: Any) -> dict[str, Any]:
    """Return a result with its environment and some facts of the run."""
    return {"environment": describe_environment(resolve_device(str(device)))} | facts


def read(out: Path | None, **empty: Any) -> dict[str, Any]:
    """Return a result file's content, or an empty result."""
    return json.loads(out.read_text()) if out is not None and out.exists() else empty


def write(out: Path | None, found: Mapping[str, Any]) -> None:
    """Write a result, and make its folder; do nothing without a file."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n")


def warn_if_slower(
    file: str,
    found: Mapping[str, Any],
    figures: Callable[[Any], Mapping[str, float]],
    results: Path = TOOLS / "results",
) -> None:
    """Print figures that are over 5% larger than the committed ones of the same processor and instruction set.

    Args:
        file: name of the result, in a machine's folder.
        found: the new result.
        figures: returns a result's figures by name: ratios to something of the same run; less is better.
        results: the folder of the machines.
    """
    environment = found["environment"]
    known: Mapping[str, float] = {}
    for path in sorted(results.glob(f"*/{file}")):
        committed = json.loads(path.read_text())
        if all(committed["environment"].get(key) == environment[key] for key in ("device_name", "instructions")):
            known = figures(committed)
    for name, figure in figures(found).items():
        if figure > SLOWER * known.get(name, math.inf):
            print(f"slower: {name} takes {figure / known[name]:.2f} times the committed result")


def replaced(rows: Iterable[Mapping[str, Any]], new: Mapping[str, Any], *keys: str) -> list[Mapping[str, Any]]:
    """Return rows with a new one in place of the one with the same keys."""
    return [row for row in rows if any(row[key] != new[key] for key in keys)] + [new]


def cells(columns: Mapping[str, str], row: Mapping[str, Any]) -> list[str]:
    """Return a row's cells: each column's format of the row's fields, or "-" if it has no such field."""
    found = []
    for text in columns.values():
        try:
            found.append(text.format_map(row))
        except (KeyError, TypeError):
            found.append("-")
    return found


def table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], title: str | None = None) -> Table:
    """Return a table; columns are headings and formats of a row's fields, such as `"{step_ms[p50]:.2f}"`."""
    made = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    for heading in columns:
        made.add_column(heading, justify="right")
    for row in rows:
        made.add_row(*cells(columns, row))
    return made


def show(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], title: str | None = None) -> None:
    wide_console().print(table(columns, rows, title))


def markdown(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> str:
    lines = [list(columns), *(cells(columns, row) for row in rows)]
    first, *others = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([first, "|---" * len(columns) + "|", *others])


def rewrite_tables(document: Path, parts: Iterable[str]) -> None:
    """Replace the tables between a document's comments `figures` and `end of figures`."""
    begin, end = "<!-- figures: ", "<!-- end of figures -->"
    before, _, rest = document.read_text().partition(begin)
    author, _, shown = rest.partition("\n")
    document.write_text("\n\n".join([before + begin + author, *parts, end]) + shown.partition(end)[2])


def json_of(command: Sequence[object], **options: Any) -> Any:
    """Return the JSON that a command prints as its last line; raise RuntimeError with its last error if it fails."""
    ran = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    print(ran.stderr, end="", file=sys.stderr)
    if ran.returncode:
        raise RuntimeError((ran.stderr.strip().splitlines() or [f"it ended with {ran.returncode}"])[-1])
    return json.loads(ran.stdout.splitlines()[-1])


def elsewhere(python: Path | str, *arguments: object) -> list[str]:
    """Return the command of a program of `elsewhere.py` for another environment's interpreter."""
    return [str(python), str(TOOLS / "elsewhere.py"), *map(str, arguments)]


class JsonProcess:
    """A process that reads and writes lines of JSON."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, request: Any) -> Any:
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self.read()

    def read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()
