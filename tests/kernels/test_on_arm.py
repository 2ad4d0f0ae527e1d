"""The compiled kernels of a 64-bit Arm, run by qemu and judged by the tests of this processor's, against float64."""

import os
import re
import subprocess
import sys
from pathlib import Path

import emulated_kernels
import pytest

from graphdecode.kernels.native.instructions import VARIABLE, sets_of_arm

ROOT = Path(__file__).parents[2]
PARTS = {  # names of tests, and files: all of compiled kernels that take seconds there
    "rows": ("rms_norm or native", "tests/kernels/test_rms_norm.py", "tests/kernels/test_native.py"),
    "quantized weights": ("not shape2", "tests/kernels/test_quantized_linear.py"),
    "experts": ("native or quantized", "tests/kernels/test_experts.py", "tests/kernels/test_quantized_experts.py"),
    "attention": (
        "native or compiled",
        *(f"tests/attention/test_{name}.py" for name in ("decode_attention", "extend_attention", "append_attention")),
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not emulated_kernels.is_there(), reason="needs qemu and a cross compiler for 64-bit Arm")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", sets_of_arm(emulated_kernels.EVERYTHING))
def test_the_kernels_compute_what_the_formulas_say(
    name: str, part: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "emulated"
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "kernels")))
    environment = {VARIABLE: name, "EMULATED_FOLDER": str(folder), "PYTHONPATH": path, "PYTEST_ADDOPTS": ""}
    chosen, *files = PARTS[part]
    command = [sys.executable, "-m", "pytest", "-p", "emulated_kernels", "-q", "-n", "0", "--timeout", "1800"]
    ran = subprocess.run(
        [*command, "-k", chosen, *files], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", ran.stdout)[-1]) > 10
