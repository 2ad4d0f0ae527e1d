"""What a new user sees first: the quickstart's question, answered with defaults alone, whichever processor it is."""

import os
import re
import shlex
from pathlib import Path

import pytest
from command_line import spawn_command
from compiled_kernels import compiled

from graphdecode.hub.model_path import installable
from graphdecode.kernels.native.instructions import VARIABLE, available, instructions

ROOT = Path(__file__).parents[1]
ALWAYS = (instructions().name, "avx2")

pytestmark = pytest.mark.skipif(
    installable("smollm2").installed_file() is None,
    reason="needs smollm2: tools/quickstart, or graphdecode models install smollm2",
)


def quickstart() -> list[str]:
    """Return the arguments of the command that tools/quickstart ends with."""
    found = re.search(
        r"^graphdecode (chat .*?[^\\])$", (ROOT / "tools/quickstart").read_text(), re.DOTALL | re.MULTILINE
    )
    assert found is not None
    return shlex.split(found[1].replace("\\\n", " "))


def answers(tmp_path: Path, *, is_whole: bool = True, **environment: str) -> str:
    arguments = quickstart()
    ran = spawn_command(
        *(arguments if is_whole else arguments[: arguments.index("--then")]), folder=tmp_path, **environment
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@compiled
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.slow]) for name in available()]
)
def test_the_quickstart_says_paris_on_each_set_of_instructions(tmp_path: Path, name: str) -> None:
    folder = os.environ["GRAPHDECODE_TEST_RUN"]  # where all workers find what one has compiled
    environment = {"GRAPHDECODE_CACHE_DIR": folder, VARIABLE: name}
    assert "The capital of France is Paris." in answers(tmp_path, is_whole=name in ALWAYS, **environment)


def test_the_quickstart_says_paris_without_a_compiler(tmp_path: Path) -> None:
    assert "The capital of France is Paris." in answers(tmp_path, GRAPHDECODE_NATIVE="0")
