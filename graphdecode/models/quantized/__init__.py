"""Quantized checkpoints of Hugging Face: how each method stores a weight, read as groups of few bits."""

from graphdecode.models.quantized.methods import CONFIGURATIONS, METHODS, method_of

__all__ = ["CONFIGURATIONS", "METHODS", "method_of"]
