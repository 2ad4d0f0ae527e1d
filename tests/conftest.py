"""What all tests share: where they run, and Triton's interpreter where there is no GPU."""

import os

import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # must stand before the first import of triton

import pytest  # noqa: E402

# threads that wait for one another on busy cores take milliseconds for microseconds of work
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need a GPU where there is none."""
    if not HAS_CUDA:
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture
def device() -> str:
    """The device that the operators run on here."""
    return "cuda" if HAS_CUDA else "cpu"
