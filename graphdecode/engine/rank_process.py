"""A process that is one rank of a model, and not the first.

    python -m graphdecode.engine.rank_process LINK LIFE BOARD

The descriptors are those of `follower_of`. It ends with rank 0, and when rank 0 ends it.
"""

from __future__ import annotations

import sys

from graphdecode.distributed.child import leave_signals
from graphdecode.distributed.started import follower_of
from graphdecode.engine.loading import captured_runner
from graphdecode.engine.ranks import run


def main() -> None:
    """Take part in the group that `start_ranks` has started this process for."""
    leave_signals()
    sys.exit(run(follower_of([int(each) for each in sys.argv[1:]]), captured_runner))


if __name__ == "__main__":
    main()
