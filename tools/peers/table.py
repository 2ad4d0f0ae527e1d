"""A comparison of engines as a table for the terminal."""

from __future__ import annotations

import math
import statistics
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

_NOISY = 0.2  # spread past which a median of a few turns says little


def contest_table(record: dict[str, Any], title: str) -> Table:
    """Return what `compare_engines` gives as a table: each figure next to its limit, each absence with its reason.

    Args:
        record: the comparison.
        title: above the table.
    """
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    table.add_column("batch", justify="right")
    table.add_column("engine", no_wrap=True)
    for heading in ("ms/step", "spread", "tokens/s", "ratio", "floors", "same"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in record["rows"]:
        batch_size = str(row["batch_size"])
        for name, ms in row["ms_per_step"].items():
            table.add_row(
                batch_size,
                name,
                f"{ms:.3f}",
                f"{100 * _spread(row['turns_ms'][name]):.0f}%",
                f"{row['tokens_per_second'][name]:.1f}",
                f"{row['times_faster_than'][name]:.2f}",
                f"{row['times_floor'][name]:.2f}",
                f"{100 * row['same_tokens'][name]:.0f}%",
            )
        for name in row["left_out"] | record["left_out"]:
            table.add_row(batch_size, name, *["-"] * 6)
        table.add_section()
    return table


def contest_notes(record: dict[str, Any], cache_bytes: int = 0) -> list[str]:
    """Return the lines that belong below the table: floors, tokens, and who was left out and why.

    Args:
        record: the comparison.
        cache_bytes: of the device's last cache; weights that fit in it have no floor.
    """
    lines = [
        "ms/step: the median of turns taken one after another; spread: the range of their middle half.",
        "ratio: its time over graphdecode's; floors: its time over that of reading the weights once.",
        "same: tokens before the first that graphdecode chose otherwise. All are greedy up to near-ties: no token's "
        f"logit lies more than {record['tolerance']:g} standard deviations of the logits below the best.",
    ]
    lines += [
        f"batch {row['batch_size']}: read bandwidth {row['read_bandwidth'] / 1e9:.1f} GB/s; "
        f"reading the weights once takes {row['floor_ms']:.3f} ms"
        for row in record["rows"]
    ]
    if record["weight_bytes"] <= cache_bytes:
        lines.append("the weights fit in the last cache: memory sets no floor for them, and floors may be below 1")
    noisy = [str(row["batch_size"]) for row in record["rows"] if max(map(_spread, row["turns_ms"].values())) > _NOISY]
    if noisy:
        lines.append(
            f"the machine was too noisy to tell at batch {', '.join(noisy)}: look at the spread, and run again"
        )
    lines += [f"{name}: left out: {reason}" for name, reason in record["left_out"].items()]
    for row in record["rows"]:
        lines += [f"{name}: left out at batch {row['batch_size']}: {why}" for name, why in row["left_out"].items()]
    return lines


def _spread(turns: list[float]) -> float:
    """Return how far the middle half of the turns reaches, over their median; infinite where noise ate the median."""
    median = statistics.median(turns)
    if median <= 0:
        return math.inf
    first, _, third = statistics.quantiles(turns, n=4, method="inclusive") if len(turns) > 1 else (median,) * 3
    return (third - first) / median
