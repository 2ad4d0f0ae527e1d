"""Mixtures of experts: which experts a token goes to, the experts' products, and the sum of what they give."""
