"""The device and the dtype that a model computes with."""

import platform
from collections.abc import Callable
from contextlib import suppress

import torch

from graphdecode.errors import ArgumentError
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.instructions import MissingInstructions, instructions
from graphdecode.models.config import DTYPES


def resolve_device(device: str | torch.device) -> torch.device:
    """Return an available device; `"auto"`: CUDA if available, else the CPU.

    Raises:
        ArgumentError: it is unknown or absent, or GRAPHDECODE_ISA names instructions that the processor lacks.
    """
    try:
        instructions()
    except MissingInstructions as error:
        raise ArgumentError(str(error)) from error
    resolved = None
    with suppress(RuntimeError):
        resolved = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if resolved is None or resolved.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device must be auto, cpu or cuda, got {device!r}")
    index = resolved.index or 0
    if resolved.type == "cpu":
        if index:
            raise ArgumentError(f"device is {device}, but there is one CPU: cpu")
        return torch.device("cpu")  # without an index, as tensors have it
    if not torch.cuda.is_available():
        raise ArgumentError("device is cuda, but torch finds no CUDA device here")
    if index >= torch.cuda.device_count():
        raise ArgumentError(f"device is {device}, but there are {torch.cuda.device_count()} CUDA devices")
    return resolved


def resolve_dtype(
    dtype: str | torch.dtype,
    checkpoint: torch.dtype,
    device: torch.device,
    *,
    integer_quantized: bool = False,
    compiles: bool = True,
) -> torch.dtype:
    """Return the compute dtype; `"auto"`: the checkpoint's, or float32 on a CPU that is slow at it.

    Args:
        dtype: a name or `"auto"`; raises ArgumentError if the name is unknown.
        checkpoint: the checkpoint's dtype.
        device: the compute device.
        integer_quantized: the weights are quantized integers; `"auto"` is then float16 on a CPU.
        compiles: whether to compile kernels to find out; False assumes that a compiler succeeds.
    """
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        checkpoint = torch.float16 if integer_quantized and device.type == "cpu" else checkpoint
        if device.type == "cpu" and not _is_fast_on_cpu(checkpoint, native.library if compiles else native.is_expected):
            return torch.float32
        return checkpoint
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype must be auto, {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def _is_fast_on_cpu(dtype: torch.dtype, compiled: Callable[[torch.dtype | None], object]) -> bool:
    """Whether a CPU computes in 16 bits as fast as in 32; weights take half the time to read."""
    is_wide = instructions().name == "portable"  # then float32's kernels are those that are needed
    if compiled(torch.float32 if is_wide else dtype):
        return not is_wide
    if dtype != torch.bfloat16:
        return False
    if platform.machine() in ("x86_64", "AMD64"):  # oneDNN also counts emulation by AVX-512
        checks = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    else:
        checks = [getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)]
    return any(check is not None and check() for check in checks)
