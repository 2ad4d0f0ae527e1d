"""Checkpoints written anew: quantized weights, and GGUF expanded to safetensors."""

from graphdecode.convert.copies import converted_copy, quantized_copy

__all__ = ["converted_copy", "quantized_copy"]
