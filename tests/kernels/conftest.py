"""Kernels are interpreted quickly."""

import os
from collections.abc import Iterator

import pytest
from hostile_rows import quick_interpreter


@pytest.fixture(autouse=True)
def interpreted_quickly() -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    with quick_interpreter():
        yield
