"""The checker names each hazard by kind and line, and is silent where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bad_steps import BAD_STEPS
from good_steps import GOOD_STEPS
from step_buffers import CONSTANTS, make_buffers

from graphdecode import LLM, BucketConfig
from graphdecode.graphs import check

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_bad_step_is_found_with_kind_and_line(name: str) -> None:
    step, kind = BAD_STEPS[name]
    findings = check(step, make_buffers(), constants=CONSTANTS)
    assert kind in {finding.kind for finding in findings}, [str(finding) for finding in findings]
    finding = next(finding for finding in findings if finding.kind == kind)
    assert finding.file == str(HERE / "bad_steps.py")
    first = step.__code__.co_firstlineno
    assert finding.line is not None
    assert first <= finding.line <= first + 8
    assert finding.why
    assert finding.remedy
    assert f"bad_steps.py:{finding.line}" in str(finding)


def test_the_corpus_is_large_enough() -> None:
    assert len(BAD_STEPS) >= 40
    assert len(GOOD_STEPS) >= 15


@pytest.mark.parametrize("name", GOOD_STEPS)
def test_a_good_step_has_no_findings(name: str) -> None:
    findings = check(GOOD_STEPS[name], make_buffers(), constants=CONSTANTS)
    assert not findings, [str(finding) for finding in findings]


def test_a_check_leaves_the_slots_as_they_were() -> None:
    buffers = make_buffers()
    buffers.x.fill_(3.0)
    check(GOOD_STEPS["in_place"], buffers, constants=CONSTANTS)
    assert (buffers.x == 3.0).all()
    assert torch.rand(2).shape == (2,)


def test_the_command_line_prints_findings_and_exits_with_1(tmp_path: Path) -> None:
    source = (
        "import torch\nfrom graphdecode import Slot, StepBuffers\n"
        "buffers = StepBuffers([Slot('x', ('batch',), torch.float32)], max_batch_size=2, device='cpu')\n"
        "def bad(batch):\n    print(batch.x)\n"
        "def good(batch):\n    batch.x.add_(1)\n"
    )
    (tmp_path / "mystep.py").write_text(source)

    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}

    def run(target: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "graphdecode", "check", target]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)

    bad, good, none = run("mystep:bad"), run("mystep:good"), run("mystep:none")
    assert (bad.returncode, good.returncode, none.returncode) == (1, 0, 2), bad.stderr + good.stderr + none.stderr
    assert "mystep.py:5: host-read" in bad.stdout
    assert "can be captured" in good.stdout
    assert none.stderr.startswith("error: mystep:none")


def test_the_demo_decoder_has_no_findings() -> None:
    with LLM("demo", config=BucketConfig(max_batch_size=2, max_sequence_length=64)) as llm:
        runner = llm._runner
        assert not check(runner._step, runner.buffers, constants=runner.model.constants)
