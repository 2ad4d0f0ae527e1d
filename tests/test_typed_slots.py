"""What a step reads and writes is declared once, in a dataclass: a wrong name is found without running anything."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import torch
from torch import Tensor

from graphdecode import GraphManager, Slot, StepBuffers
from graphdecode.buffers import SlotField, StepSlots

ROOT = Path(__file__).parents[1]
CHECKED = ["buffers", "models/model", "engine/steps/batches", "kernels/native/registration", "kernels/norm/rms_norm"]
STEP = """
from graphdecode.engine.steps.batches import SpeculativeBatch
from graphdecode.kernels.norm.rms_norm import rms_norm
from graphdecode.buffers import StepBuffers

def step(batch: SpeculativeBatch, buffers: StepBuffers[SpeculativeBatch]) -> None:
    batch.tokens.copy_(buffers.all_rows.num_drafts)
    rms_norm(batch.tokens, batch.tokens, weight=batch.logits, eps=1e-6)
    batch.tokns
    buffers.narrow(2).num_draft
    buffers.tokns.zero_()
    batch.adapters.zero_()
    rms_norm(batch.tokens, batch.tokens, wieght=batch.logits, eps=1e-6)
"""


def test_a_wrong_name_of_a_slot_or_an_argument_is_an_error_of_types(tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(STEP)
    files = [f"graphdecode/{name}.py" for name in CHECKED]
    options = ["--follow-imports=skip", "--explicit-package-bases", f"--cache-dir={tmp_path}", "--config-file="]
    command = [sys.executable, "-m", "mypy", *options, *files, str(tmp_path / "step.py")]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = [line.partition("step.py:")[2] for line in text.splitlines() if "step.py:" in line and "error" in line]
    lines = STEP.splitlines()
    wrong = {lines[int(line.split(":")[0]) - 1].strip() for line in found}
    assert wrong == {line.strip() for line in lines[-5:]}


@dataclass(kw_only=True)
class Sums(StepSlots):
    """Rows of `x`, their sums, and what may be missing."""

    x: Annotated[Tensor, SlotField(("batch", "width"), torch.float32, "pad_value", "rows")]  # float32 [b, width]
    sums: Annotated[Tensor, SlotField(("batch",), torch.float32)]  # float32 [b]
    total: Tensor  # float32 [1]
    bias: Annotated[Tensor | None, SlotField(("batch", "bias"), torch.float32)] = None  # float32 [b, bias]

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        return self.x, self.sums


def buffers_of(bias: int | None) -> StepBuffers[Sums]:
    sizes = {"width": 3, "pad_value": 0.5, "bias": bias}
    buffers = StepBuffers(
        Sums, max_batch_size=4, device="cpu", sizes=sizes, others=[Slot("more", ("batch",), torch.int32)]
    )
    buffers.adopt("total", torch.zeros(1))
    return buffers


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_step_gets_the_dataclass_that_declares_its_slots(backend: str) -> None:
    def step(batch: Sums) -> None:
        x, sums = batch.both
        sums.copy_(x.sum(1))
        if batch.bias is not None:
            sums.add_(batch.bias[:, 0])
        batch.total.copy_(torch.where(torch.arange(batch.size) < batch.live_rows, sums, 0.0).sum())

    for bias in (None, 2):
        buffers = buffers_of(bias)
        assert buffers.x.shape == (4, 3)
        assert buffers.x.eq(0.5).all()
        assert ("bias" in buffers.slots) is (bias is not None)
        assert buffers.all_rows.x is buffers.narrow(4).x
        assert buffers.narrow(2).more.shape == (2,)
        graphs = GraphManager(step, buffers, [2, 4], backend=backend)
        graphs.capture(progress=False)
        buffers.staging("rows")["x"][:2] = [[1, 2, 3], [4, 5, 6]]
        buffers.upload("rows", 2)
        graphs.replay(2)
        assert buffers.all_rows.total.item() == 21.0
        graphs.close()


def test_a_field_without_its_tensor_is_named() -> None:
    buffers = StepBuffers(Sums, max_batch_size=4, device="cpu", sizes={"width": 3, "pad_value": 0.5, "bias": None})
    with pytest.raises(TypeError, match="total"):
        buffers.narrow(2)


def test_a_slot_may_be_left_out_for_a_step() -> None:
    batch = buffers_of(2).narrow(2)
    assert batch.without("bias").bias is None
    assert batch.without("bias").x is batch.x
    assert batch.bias is not None
