"""Programmatic dependent launch: a kernel may begin while the one before it still runs, and wait where it must.

The kernel before says with `gdc_launch_dependents` from when on that is welcome; the one that begins early
(`launch_pdl=True`) loads what nobody writes, its weights, and then waits with `gdc_wait` for all that the kernel before
it wrote. To say so costs nothing where the kernel behind does not begin early.
"""

import functools

import torch


@functools.cache
def has_early_start(device: torch.device) -> bool:
    """Whether kernels can begin early on this device: NVIDIA GPUs from sm_90 on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9
