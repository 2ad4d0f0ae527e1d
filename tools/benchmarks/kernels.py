"""Compile the kernels of decode steps for a GPU that this machine lacks, and model the step time.

    tools/bench kernels                  # the tables
    tools/bench kernels --write          # docs/kernels.md, and budgets of what is new or has become better
    tools/bench kernels --json           # for the tests

What was compiled is kept in --cache, so that only what changed is compiled again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from harness import ROOT, markdown, rewrite_tables
from step_code.compiled import Measured
from step_code.figures import Figures
from step_code.launches import Gpu, Launch, RecordedStep, recorded_step, spread
from step_code.model import product_us, step_cost
from step_code.rules import early_start_faults, grid_faults

DOCUMENT = ROOT / "docs" / "kernels.md"
TESTS = ROOT / "tests" / "kernels"
BUDGETS, LIMITS = TESTS / "step_budgets.json", TESTS / "step_limits.json"
MODELS = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b")
ROWS = (1, 2, 8, 64)
ADAPTED = ("llama-3.1-8b", 8)  # model and rows of a step whose rows have an adapter of their own
CONTEXTS = {1: (512,), 8: (512,), 64: (512, 4096)}  # by rows, of the steps whose time is modelled
SHOWN = (
    "llama-3.1-8b, 1 row", "qwen3-0.6b, 1 row", "llama-3.1-8b, 64 rows", "llama-3.1-8b, 8 rows with adapters",
)  # in the document  # fmt: skip
BUDGETED = ("registers", "shared", "levels", "barriers", "fences", "latency_cycles")


def looked_at(arch: int, cache: Path) -> dict[str, Any]:
    """Return the tables of kernels, the costs of steps, and violations of rules."""
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
    measured, gpu = Measured(arch, cache / "figures"), Gpu(arch=arch)

    def product(launch: Launch) -> float:
        return product_us(launch, measured.of_ours(launch), gpu)

    kernels: dict[str, list[dict[str, Any]]] = {}
    steps: dict[str, dict[str, Any]] = {}
    faults: list[str] = []
    for model, rows, adapters in [*((model, rows, 0) for model in MODELS for rows in ROWS), (*ADAPTED, ADAPTED[1])]:
        name = f"{model}, {rows} row{'s' * (rows > 1)}{' with adapters' * (adapters > 0)}"
        step = recorded_step(f"shape:{model}", rows, gpu=gpu, product_us=product, adapters=adapters)
        kernels[name] = rows_of(step, measured)
        of_grids = [fault for launch in step.launches for fault in grid_faults(launch)]
        faults += [f"{name}: {fault}" for fault in (*early_start_faults(step, measured), *of_grids)]
        for context in CONTEXTS.get(rows, ()):
            cost = step_cost(step, rows, context, measured, gpu)
            steps[f"{name}, context {context}"] = asdict(cost) | {"times_floor": cost.times_floor}
    return {"kernels": kernels, "steps": steps, "faults": faults}


def label_of(launch: Launch) -> str:
    """Return a kernel's name, and which of its switches are on."""
    given = {name.rpartition(".")[2]: value for name, value in spread(launch.arguments).items()}
    switches = [name for name, value in given.items() if value is True and name.isupper()]
    if launch.kernel is None:
        return f"torch's {launch.name}"
    return f"{launch.name}({', '.join(switches)})" if switches else launch.name


def rows_of(step: RecordedStep, measured: Measured) -> list[dict[str, Any]]:
    """Return the codes of a step in the order of their first launches: label, launches, first grid and figures."""
    seen: dict[tuple[str, Figures | None], list[Launch]] = {}
    for launch in step.launches:
        seen.setdefault((label_of(launch), measured(launch)), []).append(launch)
    return [
        {"label": label, "launches": len(each), "grid": each[0].grid, "figures": own and asdict(own)}
        for (label, own), each in seen.items()
    ]


def budgets_of(kernels: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return the budgets of kernels by label: the maximum over all steps, and the minimum of the loop's rate."""
    budgets: dict[str, dict[str, float]] = {}
    for row in (row for rows in kernels.values() for row in rows if row["figures"] is not None):
        figures = row["figures"]
        known = budgets.setdefault(row["label"], {name: figures[name] for name in BUDGETED})
        known.update({name: max(known[name], figures[name]) for name in BUDGETED})
        if figures["stack"]:  # spilling needs an explicit budget
            known["stack"] = max(known.get("stack", 0), figures["stack"])
        if figures["loop_bytes_per_clock"]:
            rate = round(figures["loop_bytes_per_clock"], 1)
            known["loop_bytes_per_clock"] = min(known.get("loop_bytes_per_clock", rate), rate)
    return dict(sorted(budgets.items()))


def code_table(rows: Iterable[dict[str, Any]]) -> str:
    columns = {"kernel": "`{label}`", "launches": "{launches}", "grid": "{programs}"}
    columns |= {"registers": "{figures[registers]}", "shared": "{figures[shared]}", "early": "{early}"}
    columns |= {"serial loads": "{figures[levels]}", "barriers": "{figures[barriers]}", "fences": "{figures[fences]}"}
    columns |= {"cycles": "{figures[latency_cycles]}", "bytes per clock": "{rate:.0f}"}
    shown = []
    for row in rows:
        own = row["figures"] or {}
        shown.append(row | {"programs": " x ".join(map(str, row["grid"])) or "-"})
        if own:
            shown[-1]["early"] = "waits" if own["waits"] else "triggers" if own["triggers"] else "no"
        if own.get("loop_bytes_per_clock"):
            shown[-1]["rate"] = own["loop_bytes_per_clock"]
    return markdown(columns, shown)


def step_table(steps: dict[str, dict[str, Any]], limits: dict[str, dict[str, Any]]) -> str:
    columns = {"step": "{name}", "launches": "{launches}", "made for itself, KiB": "{kib:.0f}"}
    columns |= {"floor, µs": "{floor_us:.0f}"}
    columns |= {part: f"{{{part}_us:.0f}}" for part in ("gaps", "latency", "hidden")}
    columns["whole step"] = "{step_us:.0f}"
    columns |= {"step/floor": "{times_floor:.2f}", "goal": "{goal}"}
    rows = []
    for name, cost in steps.items():
        goal = limits.get(name, {}).get("goal") or "-"
        rows.append({"name": name, "kib": cost["made_bytes"] / 1024, "goal": goal} | cost)
    return markdown(columns, rows)


def tables_of(seen: dict[str, Any]) -> list[str]:
    limits = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    parts = ["### What the steps come to", step_table(seen["steps"], limits)]
    for case in SHOWN:
        parts += [f"### {case}", code_table(seen["kernels"][case])]
    return parts


def write(seen: dict[str, Any]) -> None:
    """Write the document's tables, the budgets, and lower limits of steps; goals stay."""
    BUDGETS.write_text(_one_a_line(budgets_of(seen["kernels"])))
    limits = json.loads(LIMITS.read_text())
    for name, limit in limits.items():
        cost = seen["steps"][name]
        limit.update(launches=min(limit["launches"], cost["launches"]), bytes=min(limit["bytes"], cost["made_bytes"]))
    LIMITS.write_text(_one_a_line(limits))
    rewrite_tables(DOCUMENT, tables_of(seen))


def _one_a_line(entries: dict[str, Any]) -> str:
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in entries.items())
    return "{\n" + lines + "\n}\n"


def main(
    arch: Annotated[int, typer.Option(help="Compute capability as one number.")] = 90,
    cache: Annotated[Path, typer.Option(help="Folder for what was compiled.")] = ROOT / ".kernel-figures",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    is_written: Annotated[bool, typer.Option("--write", help="Write document, budgets and lower limits.")] = False,
) -> None:
    seen = looked_at(arch, cache)
    if as_json:
        print(json.dumps(seen))
        return
    if is_written:
        write(seen)
    else:
        print("\n\n".join(tables_of(seen)))
    for fault in seen["faults"]:
        print(fault, file=sys.stderr)
    raise typer.Exit(1 if seen["faults"] else 0)
