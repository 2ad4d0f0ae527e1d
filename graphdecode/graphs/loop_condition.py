"""The kernel that decides on the device whether a loop goes on, compiled where it runs."""

from __future__ import annotations

from typing import Any

try:
    from cuda.bindings import nvrtc
except ImportError:  # without cuda-python steps are launched one by one
    nvrtc = None

NAME = b"graphdecode_loop_goes_on"

# The declaration stands for a header, which NVRTC would need a toolkit for; the function is the compiler's own.
SOURCE = b"""
typedef unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ void cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned int value);

extern "C" __global__ void graphdecode_loop_goes_on(
    cudaGraphConditionalHandle handle, int *count, const int *limit, const int *running, const int *live_rows,
    long long *tally)
{
    int steps = *count + 1;
    *count = steps;
    tally[0] += 1;
    tally[1] += *live_rows;
    cudaGraphSetConditional(handle, steps < *limit && *running > 0);
}
"""


def compile_condition(capability: tuple[int, int]) -> bytes:
    """Return the kernel's code for one kind of GPU, a cubin.

    Args:
        capability: of the device, (9, 0) for instance.

    Raises:
        RuntimeError: there is no NVRTC, or it refuses.
    """
    if nvrtc is None:
        raise RuntimeError("cuda-python is not installed")
    major, minor = capability
    option = f"--gpu-architecture=sm_{major}{minor}".encode()
    (program,) = _checked(nvrtc.nvrtcCreateProgram(SOURCE, b"loop_condition.cu", 0, [], []))
    try:
        _checked(nvrtc.nvrtcCompileProgram(program, 1, [option]))
        (size,) = _checked(nvrtc.nvrtcGetCUBINSize(program))
        code = b" " * size
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code


def _checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = answer
    if int(error) != 0:
        raise RuntimeError(f"NVRTC refused to compile the loop's condition: {error.name}")
    return tuple(values)
