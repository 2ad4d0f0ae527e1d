"""Operators of layers with a recurrent state."""
