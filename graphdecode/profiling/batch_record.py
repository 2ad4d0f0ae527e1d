"""How often a run decoded at each batch size: the record that an engine's runs leave, and that a tuner reads."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from graphdecode.errors import ArgumentError, cause, shown


def read_batch_sizes(path: Path) -> Counter[int]:
    """Read a histogram of batch sizes: batch size -> decode steps.

    Raises:
        ValueError: the file cannot be read, holds something else, or counts no step.
    """
    counts = _read(path)
    if not counts.total():
        raise ArgumentError(f"{path} counts no decode step")
    return counts


def record_batch_sizes(path: Path, counts: Mapping[int, int]) -> None:
    """Add a histogram to a file, merging it with what earlier runs left there; all of it or nothing is written.

    Raises:
        ValueError: the file holds something else, or cannot be written.
    """
    merged = Counter(counts)
    if path.exists():
        merged += _read(path)
    text = json.dumps({"batch_sizes": {str(size): merged[size] for size in sorted(merged)}}, indent=1) + "\n"
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ArgumentError(f"{path} cannot be written: {cause(error)}") from error


def check_record(path: Path) -> None:
    """Refuse a file that a run could not add its batch sizes to, before the run.

    Raises:
        ValueError: `path` is in no folder, is a folder, or holds something else than a record.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentError(f"{path} must be a file in a folder that exists")
    if not os.access(path.parent, os.W_OK):
        raise ArgumentError(f"{path} cannot be written: its folder is read-only")
    if path.exists():
        _read(path)


def _read(path: Path) -> Counter[int]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} is no record of batch sizes: {cause(error)}") from error
    counts = record.get("batch_sizes") if isinstance(record, dict) else None
    if not isinstance(counts, dict):
        raise ArgumentError(f"{path} is no record of batch sizes: it must be an object with an object batch_sizes")
    for size, steps in counts.items():
        if not re.fullmatch(r"[1-9]\d{0,8}", size) or type(steps) is not int or steps < 0:
            raise ArgumentError(
                f"{path} is no record of batch sizes: sizes must be integers >= 1 and their counts integers >= 0, "
                f"got {shown(size)}: {shown(steps)}"
            )
    return Counter({int(size): steps for size, steps in counts.items()})
