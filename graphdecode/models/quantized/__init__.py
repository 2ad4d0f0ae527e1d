"""Quantized checkpoints of Hugging Face: how each method stores a weight, read as groups of codes and scales."""
