"""Collectives of tensor-parallel ranks."""
