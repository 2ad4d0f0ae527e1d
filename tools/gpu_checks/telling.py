"""A plugin of pytest's that tells, line by line in a file, which test runs and how it ended.

After an error that no process recovers from (an illegal address leaves every later call of CUDA failing) the process
ends, so that the other tests are run in a new one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

TOLD = "GRAPHDECODE_TOLD"  # names the file
ENDED_BY_CUDA = 70
_FATAL = ("CUDA error", "CUDA_ERROR", "illegal memory access", "misaligned address", "device-side assert")


def _tell(**line: str) -> None:
    with Path(os.environ[TOLD]).open("a") as told:
        told.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Say that a test begins."""
    _tell(begins=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say how it ended; a test that fails while it is set up does not run."""
    failed_around = report.when != "call" and report.outcome != "passed"
    if report.when == "call" or failed_around:
        _tell(test=report.nodeid, outcome=report.outcome, why=str(report.longrepr or "")[-2000:])
    if report.failed and any(sign in str(report.longrepr) for sign in _FATAL):
        os._exit(ENDED_BY_CUDA)
