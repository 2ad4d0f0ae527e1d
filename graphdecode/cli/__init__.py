"""The command line."""

from graphdecode.cli.app import app, main

__all__ = ["app", "main"]
