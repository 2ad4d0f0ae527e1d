"""The command line as a person types it: in a process of its own, or in this one, where the imports are paid for."""

import contextlib
import importlib
import io
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WIDTH = {"COLUMNS": "120"}


def spawn_command(
    *arguments: str, stdin: str = "", folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m graphdecode` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "graphdecode", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=folder,
        env=os.environ | WIDTH | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
    )


def run_python(code: str, *arguments: str, **environment: str) -> str:
    """Run a script in a process of its own, which has to succeed; return its standard output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def run_command(
    *arguments: str, stdin: str = "", folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the same program in this process: same arguments, standard streams, folder, exit code and traceback.

    What it imports from `folder` is forgotten afterwards, as the end of a process would.
    """
    loaded = set(sys.modules)
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        patch.setattr(sys, "argv", ["graphdecode", *arguments])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "path_importer_cache", {})  # for which "." would be the folder of an earlier run
        for name, value in (WIDTH | environment).items():
            patch.setenv(name, value)
        if folder is not None:
            patch.chdir(folder)
            importlib.invalidate_caches()  # "." was another folder before
        status = _status_of_main()
    if folder is not None:
        for name in set(sys.modules) - loaded:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).resolve().is_relative_to(folder.resolve()):
                del sys.modules[name]
    return subprocess.CompletedProcess(["graphdecode", *arguments], status, stdout.getvalue(), stderr.getvalue())


def _status_of_main() -> int:
    """Run `graphdecode/__main__.py`; return what the interpreter would exit with."""
    try:
        runpy.run_module("graphdecode", run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except Exception:
        traceback.print_exc()
        return 1
    return 0
