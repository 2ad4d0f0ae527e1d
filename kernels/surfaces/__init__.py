"""Operators of the drop-in surfaces; the engine uses none of them."""
