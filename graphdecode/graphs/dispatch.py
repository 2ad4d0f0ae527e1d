"""torch's mode that sees every operator of a step.

torch keeps it in a private module. Where it is not to be found, steps cannot be watched, and are refused with this
reason; the eager backend runs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphdecode.errors import GraphdecodeError

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:

        class TorchDispatchMode:
            """Stands in for torch's."""

            def __enter__(self) -> None:
                raise GraphdecodeError("this torch has no TorchDispatchMode to watch a step with; use backend='eager'")

            def __exit__(self, *_: object) -> None:
                """Never reached."""


__all__ = ["TorchDispatchMode"]
