"""A comparison of engines as a table for the terminal."""

from __future__ import annotations

import math
import statistics
from typing import Any

from rich.table import Table

from harness import table

_NOISY = 0.2  # spread past which a median of a few turns says little


def contest_table(record: dict[str, Any], title: str) -> Table:
    """Return what `compare_engines` gives as a table: each figure next to its limit; an absence has dashes.

    Args:
        record: the comparison.
        title: above the table.
    """
    columns = {"batch": "{batch_size}", "engine": "{name}", "ms/step": "{ms:.3f}", "spread": "{spread:.0%}"}
    columns |= {"tokens/s": "{tokens:.1f}", "ratio": "{ratio:.2f}", "floors": "{floors:.2f}", "same": "{same:.0%}"}
    figures = {"ms": "ms_per_step", "tokens": "tokens_per_second", "ratio": "times_faster_than"}
    figures |= {"floors": "times_floor", "same": "same_tokens"}
    rows = []
    for row in record["rows"]:
        for name in row["ms_per_step"] | row["left_out"] | record["left_out"]:
            rows.append({"batch_size": row["batch_size"], "name": name})
            if name in row["ms_per_step"]:
                rows[-1] |= {key: row[figure][name] for key, figure in figures.items()}
                rows[-1]["spread"] = _spread(row["turns_ms"][name])
    return table(columns, rows, title)


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
