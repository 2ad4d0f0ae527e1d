"""The registry of quantization methods, by their `quant_method`."""

from collections.abc import Mapping
from typing import Any

from graphdecode.errors import shown
from graphdecode.models.fields import UnsupportedModelError
from graphdecode.models.quantized.compressed_tensors import CompressedTensors
from graphdecode.models.quantized.floats import FbgemmFloat8, Float8, Mxfp4, Nf4
from graphdecode.models.quantized.gptq import Awq, Gptq
from graphdecode.models.quantized.method import Method

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (CompressedTensors, Gptq, Awq, Float8, FbgemmFloat8, Mxfp4, Nf4)
}
CONFIGURATIONS = ("quantization_config", "compression_config")  # fields of a config.json; the latter is older


def method_of(settings: Mapping[str, Any]) -> Method | None:
    """Return the quantization method of a checkpoint, given its config.json; None: weights are plain."""
    described = next((settings[field] for field in CONFIGURATIONS if settings.get(field)), None)
    if not described:
        return None
    name = described.get("quant_method") if isinstance(described, dict) else described
    method = METHODS.get(name) if isinstance(name, str) else None
    if method is None or not isinstance(described, dict):
        raise UnsupportedModelError(
            f"quantization_config ({shown(name, plain=True)}) is not supported; supported are {', '.join(METHODS)}, "
            "and plain weights"
        )
    return method(described)
