"""Checkpoints to load, written once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from family_checkpoints import save_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a family's checkpoint, written at its first use; not to be changed."""
    return cache(lambda name: save_checkpoint(name, tmp_path_factory.mktemp(name.replace(".", "-"))))
