"""The rotary embedding that the metadata and the tensors of a GGUF file describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphdecode.models.config import UnsupportedModelError
from graphdecode.models.gguf.container import GgufTensor
from graphdecode.models.gguf.metadata import Metadata

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def rope_settings(metadata: Metadata, stored: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return `rope_parameters` as a config.json has them.

    Raises:
        UnsupportedModelError: the way of scaling is not known.
    """
    theta = {"rope_theta": metadata.number("rope.freq_base", 10000.0)}
    kind = metadata.text("rope.scaling.type", "none")
    if "rope_freqs.weight" in stored:
        raise UnsupportedModelError("rope_freqs.weight is not supported")
    if kind == "none":
        return {"rope_parameters": {**theta, "rope_type": "default"}}
    if kind == "linear":
        return {"rope_parameters": {**theta, "rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}}
    raise UnsupportedModelError(f"{metadata.architecture}.rope.scaling.type {kind!r} is not supported")
