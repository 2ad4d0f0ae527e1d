"""The registry of quantization formats, and what it knows of their weights."""

from collections.abc import Mapping
from typing import Any

from graphdecode.errors import UnsupportedModelError, shown
from graphdecode.extensions import HOW_TO_REGISTER, EntryPoints, refuse_duplicate
from graphdecode.linear.quantization.awq import Awq
from graphdecode.linear.quantization.bitsandbytes import BitsAndBytes
from graphdecode.linear.quantization.compressed_tensors import CompressedTensors
from graphdecode.linear.quantization.format import OnlineQuantization, QuantizationFormat
from graphdecode.linear.quantization.fp8 import FbgemmFp8, Fp8
from graphdecode.linear.quantization.gguf import GgufFormat
from graphdecode.linear.quantization.gptq import Gptq
from graphdecode.linear.quantization.mxfp4 import Mxfp4
from graphdecode.linear.quantization.quantized_weight import WeightType

FORMATS: dict[str, type[QuantizationFormat]] = {
    format.name: format for format in (CompressedTensors, Gptq, Awq, Fp8, FbgemmFp8, Mxfp4, BitsAndBytes, GgufFormat)
}
CONFIGURATIONS = ("quantization_config", "compression_config")  # fields of a config.json; the latter is older


def register_format(format: type[QuantizationFormat], *, replace: bool = False) -> None:
    """Register a quantization format; `replace` one of the same name.

    Raises:
        ArgumentError: the name is taken.
    """
    refuse_duplicate("a quantization format", format.name, format.name in FORMATS, replace)
    FORMATS[format.name] = format


_OUTSIDE = EntryPoints("graphdecode.quantization", lambda _, format: register_format(format), FORMATS)


def _formats() -> list[type[QuantizationFormat]]:
    if not _OUTSIDE.is_loaded:
        _OUTSIDE.find()
    return list(FORMATS.values())


def format_of(settings: Mapping[str, Any]) -> QuantizationFormat | None:
    """Return the format of a checkpoint's weights, given its config.json; None: they are unquantized."""
    described = next((settings[field] for field in CONFIGURATIONS if settings.get(field)), None)
    if not described:
        return None
    name = described.get("quant_method") if isinstance(described, dict) else described
    formats = {format.name: format for format in _formats() if format is not GgufFormat}
    chosen = formats.get(name) if isinstance(name, str) else None
    if chosen is None or not isinstance(described, dict):
        raise UnsupportedModelError(
            f"quantization_config ({shown(name, plain=True)}) is not supported; supported are {', '.join(formats)}, "
            f"and unquantized weights; a format {HOW_TO_REGISTER}"
        )
    return chosen(described)


def weight_type(dtype: str) -> WeightType | None:
    """Return the weight type that `Stored.dtype` names; None: weights are unquantized, or of an unknown type."""
    return next((each for format in _formats() for each in format.weight_types if each.name == dtype), None)


def has_kernels(dtype: str, device: str) -> bool:
    """Whether weights of a type stay quantized on a kind of device; None of it is known of unquantized ones."""
    entry = weight_type(dtype)
    return entry is not None and device in entry.devices


def online_quantizations() -> dict[str, OnlineQuantization]:
    """Return how unquantized weights are rounded on load, by the value of `quantize`."""
    return {each.name: each for format in _formats() for each in format.online}
