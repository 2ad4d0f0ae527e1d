"""Mixtures of experts: routing, the experts' products, and the weighted sum of their outputs."""
