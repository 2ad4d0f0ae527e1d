"""Writing keys and values."""
