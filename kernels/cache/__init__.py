"""Writing, moving and gathering keys and values."""
