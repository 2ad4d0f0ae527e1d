"""The clocks and the power of a GPU while it works, as its driver tells them; nothing is set."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
from types import TracebackType
from typing import IO, Self

FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_NAMES = ("sm_mhz", "memory_mhz", "watts", "celsius")
_EVERY_MS = 50


class ClockUnderLoad:
    """Samples clocks and power while its block runs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the block)
        self._printed = ""

    def __enter__(self) -> Self:
        program = shutil.which("nvidia-smi")
        if program is not None:
            query = f"--query-gpu={','.join(FIELDS)}"
            command = [program, query, "--format=csv,noheader,nounits", "--loop-ms", str(_EVERY_MS)]
            self._process = subprocess.Popen(command, stdout=self._file, stderr=subprocess.DEVNULL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._file.seek(0)
        self._printed = self._file.read().decode(errors="replace")
        self._file.close()

    def medians(self) -> dict[str, float]:
        """Return the median of each field, after the block; nothing without samples."""
        return medians_of(self._printed)


def medians_of(printed: str) -> dict[str, float]:
    """Return the medians of what the driver's tool printed, a line for each sample; a line cut off does not count."""
    samples: list[list[float]] = []
    for line in printed.splitlines():
        try:
            values = [float(value) for value in line.split(",")]
        except ValueError:  # cut off, or "[N/A]"
            continue
        if len(values) == len(FIELDS):
            samples.append(values)
    columns = zip(*samples, strict=True)
    return {name: statistics.median(column) for name, column in zip(_NAMES, columns, strict=False)}
