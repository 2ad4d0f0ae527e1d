"""Lets the tests of this folder import what they share (`sampling_rows`) by name, and interprets kernels quickly."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hostile_rows import quick_interpreter


@pytest.fixture(autouse=True)
def interpreted_quickly() -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    with quick_interpreter():
        yield
