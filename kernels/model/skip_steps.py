"""Skip the steps of a launch that did not run, so that the next launch's tokens land where the host expects them."""

from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import Int32, Int64, Written


# One program writes 8 bytes for each row of the ring and skipped step, and reads and writes three numbers.
@triton.jit
def _skip_steps_kernel(step_index, ring_tokens, loop_limit, loop_count, ring_length, ring_rows, ROWS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    step = tl.load(step_index)
    skipped = tl.load(loop_limit) - tl.load(loop_count)
    nothing = tl.full([ROWS], -1, tl.int64)
    for later in range(skipped):
        entry = ((step + later) % ring_length) * ring_rows
        tl.store(ring_tokens + entry + rows, nothing, mask=rows < ring_rows)
    tl.store(step_index, step + tl.maximum(skipped, 0))


def skip_steps_triton(step_index: Tensor, ring_tokens: Tensor, loop_limit: Tensor, loop_count: Tensor) -> None:
    """Launch the kernel; see `skip_steps`."""
    length, rows = ring_tokens.shape
    block = triton.next_power_of_2(rows)
    _skip_steps_kernel[(1,)](step_index, ring_tokens, loop_limit, loop_count, length, rows, ROWS=block, num_warps=4)


@operator(triton_version=skip_steps_triton)
def skip_steps(step_index: Written[Int64], ring_tokens: Written[Int64], loop_limit: Int32, loop_count: Int32) -> None:
    """Go on to the step behind the last one of a launch, and leave no tokens in the places of those that did not run.

    Args:
        step_index: int64 [1], steps taken so far; `loop_limit - loop_count` is added to it, if that is positive.
        ring_tokens: int64 [R, b_max], R at least that many; -1 is written into the skipped steps' entries.
        loop_limit: int32 [1], steps that the launch was asked for.
        loop_count: int32 [1], steps that it ran.
    """
    step, ring = step_index.numpy(), ring_tokens.numpy()
    skipped = max(int(loop_limit.numpy()[0]) - int(loop_count.numpy()[0]), 0)
    for later in range(int(step[0]), int(step[0]) + skipped):
        ring[later % len(ring)] = -1
    step[0] += skipped
