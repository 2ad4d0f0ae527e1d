"""Programmatic dependent launch: a kernel may begin while the one before it still runs, and wait where it must.

A kernel that begins early (`launch_pdl=True`) reads what nobody writes, then waits with `gdc_wait` for all that the
kernel before it wrote, and then says with `gdc_launch_dependents` that the kernel behind it may begin. Two rules keep a
chain of such kernels right:

- Wait, then trigger. Whoever waits knows that the kernel before has ended; so when a kernel begins early, all but the
  one before it have ended, and what they wrote may be read without a wait.
- Every path through a kernel waits, early returns too: a program that ends without would let the kernel behind begin
  before the one before has ended.
"""

import functools

import torch

from .optional_triton import tl, triton


@functools.cache
def has_early_start(device: torch.device) -> bool:
    """Whether kernels can begin early on this device: NVIDIA GPUs from sm_90 on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def early_start_options(device: torch.device) -> dict[str, bool]:
    """Return what the launch of a kernel with the flag `PDL` is given, for it to begin early where that is possible."""
    return {"PDL": True, "launch_pdl": True} if has_early_start(device) else {"PDL": False}


@triton.jit
def prefetch_l2(at, size):
    """Ask for `size` bytes, a multiple of 16, from each of the addresses `at` to be in the L2 cache; from sm_90 on."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [at, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait_and_trigger():
    """Wait for the kernel before, and let the one behind begin."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
