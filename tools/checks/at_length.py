"""The tests of the server, or of `graphdecode batch`, at full length.

    tools/check at-length server    1,000 mutated requests, 10,000 connections, 20 killed engines, a longer storm
    tools/check at-length batch     5,000 requests, killed three times at random, for each of three seeds

What stands behind goes to pytest.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from harness import ROOT, names

FILES = {"server": ("test_hardship.py", "test_manners.py"), "batch": ("test_batch.py",)}
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=__doc__, context_settings={"ignore_unknown_options": True})
def main(
    subject: Annotated[str, typer.Argument(help="server or batch.")],
    options: Annotated[list[str] | None, typer.Argument(help="Of pytest.")] = None,
) -> None:
    """Become pytest."""
    (known,) = names(subject, FILES, "the subject")
    files = [str(ROOT / "tests" / "server" / name) for name in FILES[known]]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout", "1200", *files, *(options or ())]
    os.chdir(ROOT)
    os.execve(sys.executable, command, os.environ | {"GRAPHDECODE_AT_LENGTH": "1"})
