"""Linear layers, one module per weight layout."""
