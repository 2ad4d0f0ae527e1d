"""Compile what decode steps launch for a GPU that is not here, and say what its code and the model of a step tell.

    python tools/kernel_figures.py                  # the tables
    python tools/kernel_figures.py --write          # docs/kernels.md, and budgets of what is new or has become better
    python tools/kernel_figures.py --json           # for the tests

What was compiled is kept in --cache, so that only what changed is compiled again.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

os.environ.pop("TRITON_INTERPRET", None)  # it is the compiler that is asked; must stand before the import of triton

import typer

from step_code.compiled import Measured
from step_code.launches import Gpu, Launch, RecordedStep, recorded_step
from step_code.model import product_us, step_cost
from step_code.report import Row, case_name, code_table, rows_of, step_table
from step_code.rules import early_start_faults, grid_faults

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "kernels.md"
TESTS = ROOT / "tests" / "kernels"
BUDGETS, LIMITS = TESTS / "step_budgets.json", TESTS / "step_limits.json"
MODELS = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b")
ROWS = (1, 2, 8, 64)
CONTEXTS = {1: (512,), 64: (512, 4096)}  # by rows, of the steps whose time is modelled
SHOWN = ("llama-3.1-8b, 1 row", "qwen3-0.6b, 1 row", "llama-3.1-8b, 64 rows")  # in the document
BUDGETED = ("registers", "shared", "levels", "barriers", "fences", "latency_cycles")
BEGIN, END = "<!-- figures: written by tools/kernel_figures.py -->", "<!-- end of figures -->"


def looked_at(arch: int, cache: Path) -> dict[str, Any]:
    """Return what there is to say: tables of kernels, costs of steps, and what breaks a rule."""
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
    measured, gpu = Measured(arch, cache / "figures"), Gpu(arch=arch)

    def product(launch: Launch) -> float:
        return product_us(launch, measured.of_ours(launch), gpu)

    kernels: dict[str, list[dict[str, Any]]] = {}
    steps: dict[str, dict[str, Any]] = {}
    faults: list[str] = []
    for model in MODELS:
        for rows in ROWS:
            step = recorded_step(f"shape:{model}", rows, gpu=gpu, product_us=product)
            kernels[case_name(model, rows)] = [asdict(row) for row in rows_of(step, measured)]
            faults += [f"{case_name(model, rows)}: {fault}" for fault in _faults(step, measured)]
            for context in CONTEXTS.get(rows, ()):
                cost = step_cost(step, rows, context, measured, gpu)
                steps[case_name(model, rows, context)] = asdict(cost) | {"times_floor": cost.times_floor}
    return {"kernels": kernels, "steps": steps, "faults": faults}


def _faults(step: RecordedStep, measured: Measured) -> list[str]:
    of_grids = [fault for launch in step.launches for fault in grid_faults(launch)]
    return [*early_start_faults(step, measured), *of_grids]


def budgets_of(kernels: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return what the kernels of all steps take, by their labels: the most, and of the loop's rate the least."""
    budgets: dict[str, dict[str, float]] = {}
    for row in (row for rows in kernels.values() for row in rows if row["figures"] is not None):
        figures = row["figures"]
        known = budgets.setdefault(row["label"], {name: figures[name] for name in BUDGETED})
        known.update({name: max(known[name], figures[name]) for name in BUDGETED})
        if figures["stack"]:  # it takes a person to let that stand
            known["stack"] = max(known.get("stack", 0), figures["stack"])
        if figures["loop_bytes_per_clock"]:
            rate = round(figures["loop_bytes_per_clock"], 1)
            known["loop_bytes_per_clock"] = min(known.get("loop_bytes_per_clock", rate), rate)
    return dict(sorted(budgets.items()))


def document_of(seen: dict[str, Any]) -> str:
    """Return the tables as the document has them."""
    limits = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    parts = [BEGIN, "### What the steps come to", step_table(seen["steps"], limits)]
    for case in SHOWN:
        parts += [f"### {case}", code_table(Row.from_dict(row) for row in seen["kernels"][case])]
    return "\n\n".join([*parts, END])


def write(seen: dict[str, Any]) -> None:
    """Write the document's tables, the budgets, and the limits of steps where they became lower; goals stay."""
    text = DOCUMENT.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    BUDGETS.write_text(_one_a_line(budgets_of(seen["kernels"])))
    limits = json.loads(LIMITS.read_text())
    for name, limit in limits.items():
        cost = seen["steps"][name]
        rounded = round(cost["times_floor"] + 0.005, 2)
        limit.update(launches=min(limit["launches"], cost["launches"]), bytes=min(limit["bytes"], cost["made_bytes"]))
        limit["times_floor"] = min(limit["times_floor"], rounded)
    LIMITS.write_text(_one_a_line(limits))
    DOCUMENT.write_text(before + document_of(seen) + after)


def _one_a_line(entries: dict[str, Any]) -> str:
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in entries.items())
    return "{\n" + lines + "\n}\n"


def main(
    arch: Annotated[int, typer.Option(help="Compute capability as one number.")] = 90,
    cache: Annotated[Path, typer.Option(help="Folder for what was compiled.")] = ROOT / ".kernel-figures",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    is_written: Annotated[bool, typer.Option("--write", help="Write document, budgets and lower limits.")] = False,
) -> None:
    """Print the tables; see the file's docstring."""
    seen = looked_at(arch, cache)
    if as_json:
        print(json.dumps(seen))
        return
    if is_written:
        write(seen)
    else:
        print(document_of(seen))
    for fault in seen["faults"]:
        print(fault, file=sys.stderr)
    raise typer.Exit(1 if seen["faults"] else 0)


if __name__ == "__main__":
    typer.run(main)
