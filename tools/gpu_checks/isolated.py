"""Run tests in parallel processes; a crash or hang does not affect the others.

    python -m gpu_checks.isolated [--processes N] [--test-limit 60] [--limit 240] [--known FILE] [--out FILE] ARGUMENTS

The arguments are pytest's.

A test that hangs, crashes or leaves the device unusable is reported, and the next ones get a new process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from gpu_checks.part import stop
from gpu_checks.telling import TOLD

GROUP_TESTS = 40
COLLECTION_FAILED = 3  # the exit code: tests that are not collected would go unnoticed
START_S = 60.0  # until a process starts its first test
_POLL_S = 0.1
_TAIL_CHARACTERS = 3000


@dataclass
class Outcome:
    """How a test ended.

    Attributes:
        outcome: "passed", "failed", "skipped", "hung", "crashed", "not started" or "not run".
        why: an error, or "".
    """

    outcome: str
    why: str = ""


@dataclass
class Run:
    """Tests to run, and their outcomes.

    Attributes:
        test_limit_s: for one test.
        deadline: on the monotonic clock; later tests are not run.
        pytest: the command, without tests.
    """

    test_limit_s: float
    deadline: float
    pytest: list[str]
    waiting: deque[list[str]] = field(default_factory=deque)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def work(self) -> None:
        """Run groups of tests until none is left."""
        while True:
            with self.lock:
                if not self.waiting:
                    return
                tests = self.waiting.popleft()
            self._run_group(tests)

    def _run_group(self, tests: list[str]) -> None:
        while tests:
            if time.monotonic() > self.deadline:
                self._note({test: Outcome("not run", "no time left") for test in tests})
                return
            done = self._run_process(tests)
            self._note(done)
            tests = [test for test in tests if test not in done]

    def _note(self, done: dict[str, Outcome]) -> None:
        with self.lock:
            self.outcomes |= done
            for test, result in done.items():
                if result.outcome not in ("passed", "skipped"):
                    print(f"{result.outcome}: {test}\n{result.why}", flush=True)

    def _run_process(self, tests: list[str]) -> dict[str, Outcome]:
        """Run tests in one process until it ends; at least one gets an outcome."""
        with tempfile.TemporaryDirectory() as scratch:
            told, log = Path(scratch, "told"), Path(scratch, "log")
            told.touch()
            with log.open("w") as output:
                process = subprocess.Popen(
                    [*self.pytest, *tests],
                    env=os.environ | {TOLD: str(told)},
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                late = self._watch(process, told)
                stop(process)
            return self._told(
                tests, told, late, process.returncode, log.read_text(errors="replace")[-_TAIL_CHARACTERS:]
            )

    def _watch(self, process: subprocess.Popen, told: Path) -> str | None:
        """Wait for a process; return why it was stopped, or None."""
        size, since = 0, time.monotonic()
        while process.poll() is None:
            now = time.monotonic()
            if told.stat().st_size != size:
                size, since = told.stat().st_size, now
            if now > self.deadline:
                return "no time left"
            if now - since > (self.test_limit_s if size else max(START_S, self.test_limit_s)):
                return f"over {self.test_limit_s:.0f} s"
            time.sleep(_POLL_S)
        return None

    def _told(self, tests: list[str], told: Path, late: str | None, code: int, tail: str) -> dict[str, Outcome]:
        done: dict[str, Outcome] = {}
        running = None
        for line in map(json.loads, told.read_text().splitlines()):
            if "begins" in line:
                running = line["begins"]
            else:
                if line["test"] not in done or line["outcome"] == "failed":
                    done[line["test"]] = Outcome(line["outcome"], line["why"])
                running = None
        if running is not None and running not in done:
            what = "crashed" if late is None else "not run" if late == "no time left" else "hung"
            done[running] = Outcome(what, f"{late or f'exit {code}'}\n{tail}")
        if not done:
            outcome = Outcome("not started", f"{late or f'exit {code}'}\n{tail}")
            return dict.fromkeys(tests, outcome)
        if late is None and code in (0, 1):  # it has finished: remaining tests are unknown to it
            done = dict.fromkeys(tests, Outcome("not started", tail)) | done
        return done


def collected(pytest: list[str], arguments: list[str]) -> tuple[list[str], bool]:
    """Return the tests that pytest collects, and whether a file failed."""
    listed = subprocess.run([*pytest, "--collect-only", *arguments], capture_output=True, text=True, check=False)
    tests = [line for line in listed.stdout.splitlines() if "::" in line and not line.startswith((" ", "ERROR"))]
    is_broken = listed.returncode not in (0, 5)
    if is_broken:
        print(listed.stdout[-_TAIL_CHARACTERS:] + listed.stderr[-_TAIL_CHARACTERS:], flush=True)
    return tests, is_broken


def groups_of(tests: list[str]) -> deque[list[str]]:
    """Group tests by file: the first tests of each file, then the next of each, so that a limit cuts all alike."""
    files = [list(group) for _, group in groupby(tests, lambda test: test.split("::")[0])]
    files.sort(key=len, reverse=True)
    starts = range(0, max(map(len, files), default=0), GROUP_TESTS)
    return deque(file[start : start + GROUP_TESTS] for start in starts for file in files if start < len(file))


def main() -> int:
    """Run the tests; print failures and counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--test-limit", type=float, default=60.0, help="seconds for one test")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for all")
    parser.add_argument("--out", type=Path, help="a file for what became of each test")
    parser.add_argument("--known", type=Path, help="such a file of an earlier run; what passed there is not run again")
    options, arguments = parser.parse_known_args()
    deadline = time.monotonic() + options.limit
    pytest = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "gpu_checks.absent"]
    tests, is_broken = collected(pytest, arguments)
    known = json.loads(options.known.read_text()) if options.known is not None else {}
    tests = [test for test in tests if known.get(test, {}).get("outcome") not in ("passed", "skipped")]
    run = Run(options.test_limit, deadline, [*pytest, "-p", "gpu_checks.telling"], groups_of(tests))
    workers = [threading.Thread(target=run.work) for _ in range(options.processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    counts = Counter(result.outcome for result in run.outcomes.values())
    print(f"{len(tests)} tests: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    if options.out is not None:
        outcomes = known | {test: vars(result) for test, result in run.outcomes.items()}
        options.out.write_text(json.dumps(outcomes, indent=1))
    if is_broken:
        return COLLECTION_FAILED
    return 0 if (tests or known) and not counts.keys() - {"passed", "skipped"} else 1


if __name__ == "__main__":
    sys.exit(main())
