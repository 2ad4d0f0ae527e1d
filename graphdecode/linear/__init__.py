"""Linear layers: the weight forms, and the measured choice of the fastest."""
