"""The subjects of `tools/make`: modules with a function `main`."""
