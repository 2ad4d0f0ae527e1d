"""Quantization formats: one file each, and the registry of all."""

from graphdecode.linear.quantization.format import OnlineQuantization, QuantizationFormat, WeightType
from graphdecode.linear.quantization.quantized_weight import QuantizedWeight
from graphdecode.linear.quantization.registry import FORMATS, register_format

__all__ = ["FORMATS", "OnlineQuantization", "QuantizationFormat", "QuantizedWeight", "WeightType", "register_format"]
