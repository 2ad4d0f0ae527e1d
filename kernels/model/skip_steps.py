"""Skip the steps of a launch that did not run, so that the next launch's tokens land where the host expects them."""

from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import Int32, Int64, Written


# One program writes 8 bytes for each row of the ring and skipped step, and reads and writes a few numbers.
@triton.jit
def _skip_steps_kernel(
    step_index,
    ring_tokens,
    loop_limit,
    loop_count,
    step_entries,
    ring_length,
    ring_rows,
    HAS_ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    step = tl.load(step_index)
    skipped = tl.load(loop_limit) - tl.load(loop_count)
    if HAS_ENTRIES:
        skipped = skipped * tl.load(step_entries)
    nothing = tl.full([ROWS], -1, tl.int64)
    for later in range(skipped):
        entry = ((step + later) % ring_length) * ring_rows
        tl.store(ring_tokens + entry + rows, nothing, mask=rows < ring_rows)
    tl.store(step_index, step + tl.maximum(skipped, 0))


def skip_steps_triton(
    step_index: Tensor, ring_tokens: Tensor, loop_limit: Tensor, loop_count: Tensor, step_entries: Tensor | None = None
) -> None:
    """Launch the kernel; see `skip_steps`."""
    _skip_steps_kernel[(1,)](
        step_index,
        ring_tokens,
        loop_limit,
        loop_count,
        step_entries,
        *ring_tokens.shape,
        HAS_ENTRIES=step_entries is not None,
        ROWS=triton.next_power_of_2(ring_tokens.shape[1]),
        num_warps=4,
    )


@operator(triton_version=skip_steps_triton)
def skip_steps(
    step_index: Written[Int64],
    ring_tokens: Written[Int64],
    loop_limit: Int32,
    loop_count: Int32,
    step_entries: Int32 | None = None,
) -> None:
    """Go on to the step behind the last one of a launch, and leave no tokens in the places of those that did not run.

    Args:
        step_index: int64 [1], entries taken so far; those of `loop_limit - loop_count` steps are added, if there are
            any.
        ring_tokens: int64 [R, b_max], R at least that many; -1 is written into the skipped steps' entries.
        loop_limit: int32 [1], steps that the launch was asked for.
        loop_count: int32 [1], steps that it ran.
        step_entries: int32 [1], entries of a step; None: one.
    """
    step, ring = step_index.numpy(), ring_tokens.numpy()
    skipped = max(int(loop_limit.numpy()[0]) - int(loop_count.numpy()[0]), 0)
    skipped *= 1 if step_entries is None else int(step_entries.numpy()[0])
    for later in range(int(step[0]), int(step[0]) + skipped):
        ring[later % len(ring)] = -1
    step[0] += skipped
