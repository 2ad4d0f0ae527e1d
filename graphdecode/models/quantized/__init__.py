"""Quantized checkpoints of Hugging Face: each method's format, read as `Groups`."""
