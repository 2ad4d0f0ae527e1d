"""How a model is computed: the device, the dtype, and the options of its weight forms."""

import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch

from graphdecode.errors import ArgumentError
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.instructions import MissingInstructions, instructions
from graphdecode.linear.forms import check_options, has_form
from graphdecode.linear.linear_choice import ChoiceCache, LinearTuner
from graphdecode.linear.quantization.registry import online_quantizations
from graphdecode.linear.weight_form import FormOptions
from graphdecode.models.config import DTYPES, ModelConfig, ModelShape
from graphdecode.models.family import family_of
from graphdecode.models.quantize_on_load import DEQUANTIZE
from graphdecode.models.transformers_backend import AdoptedConfig
from graphdecode.models.weight_map import num_values


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


def num_parameters(config: ModelShape) -> int:
    """Return the number of a model's parameters."""
    if isinstance(config, AdoptedConfig):
        return config.num_parameters
    assert isinstance(config, ModelConfig)
    return num_values(family_of(config.architecture).weights(config))


class FormRequest(NamedTuple):
    """Options of the weight forms that a caller of `load_model` sets."""

    dtype: str | torch.dtype
    batch_sizes: tuple[int, ...]
    quantize: str | None
    group_size: int | None
    batch_invariant: bool


def form_options(config: ModelShape, device: torch.device, request: FormRequest) -> FormOptions:
    """Return the options of a model's weight forms; raise ArgumentError if no form is as it is asked for."""
    dtype = resolve_dtype(request.dtype, config.dtype, device, integer_quantized=config.integer_quantized)
    quantize = request.quantize
    if device.type == "cpu":
        native.library(dtype)  # starts all compilations at the same time
    tuner = LinearTuner(ChoiceCache())
    options = FormOptions(device, dtype, tuner, request.batch_sizes, quantize, request.batch_invariant)
    has_experts = isinstance(config, ModelConfig) and config.experts is not None
    online = online_quantizations()
    if quantize in online and (request.group_size is not None or has_experts or not has_form(options)):
        options = replace(options, quantize=None)
    check_options(options, (*online, DEQUANTIZE))
    if options.batch_invariant:
        _check_invariance(config, options)
    return options


def _check_invariance(config: ModelShape, options: FormOptions) -> None:
    if isinstance(config, AdoptedConfig):
        raise ArgumentError(
            f"batch_invariant=True needs operators of ours alone, and {config.architecture} is run by transformers"
        )
    if options.device.type == "cuda":
        return
    if native.library(options.dtype) is None:
        raise ArgumentError(f"batch_invariant=True needs compiled kernels on a CPU: {native.unavailable_reason()}")
    for head_dim in [config.head_dim, *(keys.head_dim for keys in config.layer_keys)]:
        if head_dim % native.LANES:
            multiple = f"a head_dim that is a multiple of {native.LANES}"
            raise ArgumentError(f"batch_invariant=True needs {multiple} on a CPU, got {head_dim}")
    for keys in config.layer_keys:
        rope_dim = keys.head_dim - keys.latent_rank if keys.latent_rank else 0
        if rope_dim % (2 * native.LANES):  # else torch attends
            multiple = f"a qk_rope_head_dim that is a multiple of {2 * native.LANES}"
            raise ArgumentError(f"batch_invariant=True needs {multiple} on a CPU, got {rope_dim}")
