"""A pytest plugin that writes the start and outcome of each test to a file.

After an error that no process recovers from (an illegal address leaves every later call of CUDA failing) the process
ends, so that the other tests are run in a new one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

TOLD = "GRAPHDECODE_TOLD"  # the environment variable that names the file
ENDED_BY_CUDA = 70
_FATAL = ("CUDA error", "CUDA_ERROR", "illegal memory access", "misaligned address", "device-side assert")


def _tell(**line: str) -> None:
    with Path(os.environ[TOLD]).open("a") as told:
        told.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write the start of a test."""
    _tell(begins=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a test's outcome; if its setup fails it has no call."""
    failed_around = report.when != "call" and report.outcome != "passed"
    if report.when == "call" or failed_around:
        _tell(test=report.nodeid, outcome=report.outcome, why=str(report.longrepr or "")[-2000:])
    if report.failed and any(sign in str(report.longrepr) for sign in _FATAL):
        os._exit(ENDED_BY_CUDA)
