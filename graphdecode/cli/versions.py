"""What runs here: versions, and with `--debug` the device and the compiled kernels."""

from __future__ import annotations

import platform
from importlib import metadata

import graphdecode

_PACKAGES = ("torch", "triton", "cuda-bindings", "numpy", "safetensors", "transformers", "tokenizers")


def versions() -> str:
    """Return the versions that say most, in one line."""
    return ", ".join(
        [f"graphdecode {graphdecode.__version__}", *(f"{name} {_of(name)}" for name in ("torch", "triton"))]
    )


def state() -> str:
    """Return all that a report of a bug should tell, one fact a line."""
    import torch

    from graphdecode.kernels.native import library
    from graphdecode.models import resolve_device, resolve_dtype
    from graphdecode.profiling.environment import describe_environment

    facts: dict[str, object] = {"graphdecode": graphdecode.__version__, "platform": platform.platform()}
    facts |= {name: _of(name) for name in _PACKAGES}
    device = resolve_device("auto")
    facts |= describe_environment(device)
    dtypes = {
        "plain weights in bfloat16": resolve_dtype("auto", torch.bfloat16, device),
        "in float16": resolve_dtype("auto", torch.float16, device),
        "integers of few bits": resolve_dtype("auto", torch.bfloat16, device, few_bits=True),
    }
    told = ", ".join(f"{str(dtype).removeprefix('torch.')} for {what}" for what, dtype in dtypes.items())
    return "\n".join(
        [*(f"{name}: {value}" for name, value in facts.items()), library.describe(), f"dtype auto: {told}"]
    )


def _of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
