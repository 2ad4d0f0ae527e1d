"""Tables of what a step launches, and of what it comes to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from step_code.figures import Figures
from step_code.launches import Launch, RecordedStep, spread

_CODE = (
    "| kernel | launches | grid | registers | shared | early | serial loads | barriers | fences | cycles | "
    "bytes per clock |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)
_STEPS = (
    "| step | launches | made for itself, KiB | floor, µs | gaps | latency | hidden | step | step/floor | goal |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Row:
    """One code of a step.

    Attributes:
        label: the kernel's name, and which of its switches are on.
        launches: how often it is launched.
        grid: programs of its first launch.
        figures: its own; None where the code is not ours.
    """

    label: str
    launches: int
    grid: tuple[int, ...]
    figures: Figures | None

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Row:
        """Return what `dataclasses.asdict` was given, and JSON perhaps."""
        figures = plain["figures"]
        return cls(plain["label"], plain["launches"], tuple(plain["grid"]), figures and Figures.from_dict(figures))


def case_name(model: str, rows: int, context: int | None = None) -> str:
    """Return what a step is called in tables."""
    name = f"{model}, {rows} row{'s' * (rows > 1)}"
    return name if context is None else f"{name}, context {context}"


def label_of(launch: Launch) -> str:
    """Return a kernel's name, and which of its switches are on."""
    given = {name.rpartition(".")[2]: value for name, value in spread(launch.arguments).items()}
    switches = [name for name, value in given.items() if value is True and name.isupper()]
    if launch.kernel is None:
        return f"torch's {launch.name}"
    return f"{launch.name}({', '.join(switches)})" if switches else launch.name


def rows_of(step: RecordedStep, measured: Callable[[Launch], Figures | None]) -> list[Row]:
    """Return the codes of a step in the order of their first launches."""
    first: dict[tuple[str, Figures | None], Launch] = {}
    counts: dict[tuple[str, Figures | None], int] = {}
    for launch in step.launches:
        key = label_of(launch), measured(launch)
        first.setdefault(key, launch)
        counts[key] = counts.get(key, 0) + 1
    return [Row(label, counts[label, own], launch.grid, own) for (label, own), launch in first.items()]


def code_table(rows: Iterable[Row]) -> str:
    """Return the table of a step's kernels in Markdown."""
    lines = [_CODE]
    for row in rows:
        grid = " x ".join(map(str, row.grid)) or "-"
        own = row.figures
        if own is None:
            lines.append(f"| `{row.label}` | {row.launches} | {grid} |" + " - |" * 8)
            continue
        early = "waits" if own.waits else "triggers" if own.triggers else "no"
        rate = f"{own.loop_bytes_per_clock:.0f}" if own.loop_bytes_per_clock else "-"
        cells = (own.registers, own.shared, early, own.levels, own.barriers, own.fences, own.latency_cycles, rate)
        lines.append(f"| `{row.label}` | {row.launches} | {grid} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def step_table(steps: Mapping[str, Mapping[str, float]], limits: Mapping[str, Mapping[str, float]]) -> str:
    """Return the table of what steps come to in Markdown.

    Args:
        steps: costs by name.
        limits: of them, with their goals.
    """
    lines = [_STEPS]
    for name, cost in steps.items():
        times = [f"{cost[part]:.0f}" for part in ("floor_us", "gaps_us", "latency_us", "hidden_us", "step_us")]
        goal = limits.get(name, {}).get("goal")
        cells = [
            cost["launches"],
            f"{cost['made_bytes'] / 1024:.0f}",
            *times,
            f"{cost['times_floor']:.2f}",
            goal or "-",
        ]
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
