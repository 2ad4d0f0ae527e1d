"""The command line."""

import sys

__all__ = ["main"]

_INTERRUPTED = 130  # as in shells


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback while its modules are imported, too."""
    try:
        from graphdecode.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    run()
