"""Decode and prompt attention over paged keys and values."""
