"""Other engines on the same checkpoint, in the same run: outputs first, then times."""
