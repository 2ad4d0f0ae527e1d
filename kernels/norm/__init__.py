"""Norms, fused with the residual."""
