"""The process of one rank other than 0.

    python -m graphdecode.engine.rank_process LINK LIFE BOARD

The arguments are the file descriptors of `follower_of`. The process ends with rank 0.
"""

from __future__ import annotations

import sys

from graphdecode.child import leave_signals
from graphdecode.distributed.started import follower_of
from graphdecode.engine.loading import captured_runner
from graphdecode.engine.ranks import run


def main() -> None:
    """Join the group of `start_ranks`."""
    leave_signals()
    sys.exit(run(follower_of([int(each) for each in sys.argv[1:]]), captured_runner))


if __name__ == "__main__":
    main()
