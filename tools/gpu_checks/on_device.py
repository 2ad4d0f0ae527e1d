"""A pytest plugin that keeps the tests that run on the device that is there: of operators, caches and whole models."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that ask for the fixture `device`."""
    on_device = [("device" in getattr(item, "fixturenames", ()), item) for item in items]
    config.hook.pytest_deselected(items=[item for is_wanted, item in on_device if not is_wanted])
    items[:] = [item for is_wanted, item in on_device if is_wanted]
