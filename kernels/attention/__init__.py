"""Decode and prompt attention over paged keys and values, and the merging of partial results."""
