"""Several engines behind one server, placed and kept alive by Ray Serve."""
