"""A step for loops and its life without a graph: rows count down while a product moves their values."""

from __future__ import annotations

import torch
from torch import Tensor

from graphdecode import Slot, StepBuffers
from graphdecode.buffers import Batch
from graphdecode.graphs import Loop

WIDTH = 4
MAX_STEPS = 8
COUNTERS = ("running", "loop_limit", "loop_count")


class Counting:
    """Buffers, the step over them, and what they have to hold.

    Args:
        capacity: rows.

    Attributes:
        launched_behind: what the epilogue saw of the loop's count.
    """

    def __init__(self, capacity: int) -> None:
        slots = [Slot("x", ("batch", WIDTH), torch.float32), Slot("left", ("batch",), torch.int32)]
        slots += [Slot(name, (1,), torch.int32) for name in (*COUNTERS, "launched_behind")]
        self.buffers = StepBuffers(slots, max_batch_size=capacity, device="cpu")
        self.buffers.device = torch.device("cuda", 0)  # where they really are
        self.weight = torch.linspace(-1.0, 1.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH)
        with torch._C._DisableTorchDispatch():
            self.expected_weight = torch.linspace(-1.0, 1.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH)
            self.expected_x, self.expected_left = torch.zeros(capacity, WIDTH), [0] * capacity

    def step(self, batch: Batch) -> None:
        """Move the rows that have something left; the others are inert."""
        moved = torch.tanh(batch.x @ self.weight) + 0.25
        batch.x.copy_(torch.where((batch.left > 0)[:, None], moved, batch.x))
        batch.left.copy_((batch.left - 1).clamp(min=0))
        batch.running.copy_((batch.left > 0).sum().to(torch.int32))

    def epilogue(self, batch: Batch) -> None:
        """Keep what the count was behind the last step."""
        batch.launched_behind.copy_(batch.loop_count)

    def loop(self) -> Loop:
        return Loop(MAX_STEPS, epilogue=self.epilogue)

    def enter(self, values: list[float], left: list[int]) -> None:
        """Write rows, into the buffers and into what is expected."""
        for row, (value, steps) in enumerate(zip(values, left, strict=True)):
            self.buffers.x[row].fill_(value)
            self.buffers.left[row].fill_(steps)
            with torch._C._DisableTorchDispatch():
                self.expected_x[row].fill_(value)
            self.expected_left[row] = steps

    def expect_steps(self, rows: int, steps: int) -> int:
        """Run what is expected on; returns how many steps a loop that ends early runs."""
        ran = min(steps, max(1, *self.expected_left[:rows]))
        with torch._C._DisableTorchDispatch():
            for _ in range(ran):
                for row in range(rows):
                    if self.expected_left[row] > 0:
                        self.expected_x[row] = torch.tanh(self.expected_x[row] @ self.expected_weight) + 0.25
                        self.expected_left[row] -= 1
        return ran

    def check(self, rows: int) -> None:
        """Compare the live rows."""
        torch.cuda.synchronize()
        with torch._C._DisableTorchDispatch():
            found: Tensor = self.buffers.x[:rows].clone()
            assert self.buffers.left[:rows].tolist() == self.expected_left[:rows]
            torch.testing.assert_close(found, self.expected_x[:rows])
