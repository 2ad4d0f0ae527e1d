"""Copies of checkpoints: with quantized weights, and GGUF dequantized to safetensors."""

from graphdecode.convert.copies import converted_copy, quantized_copy

__all__ = ["converted_copy", "quantized_copy"]
