"""Linear layers, one file for each form that a weight can have."""
