"""torch's mode that sees every operator of a step.

torch keeps it in a private module. Where it is not to be found, steps cannot be watched, and are refused with this
reason; the eager backend runs them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graphdecode.errors import GraphdecodeError

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchsMode
else:
    try:
        from torch.utils._python_dispatch import TorchDispatchMode as TorchsMode
    except ImportError:

        class TorchsMode:
            """Stands in for torch's."""

            def __enter__(self) -> None:
                raise GraphdecodeError("this torch has no TorchDispatchMode to watch a step with; use backend='eager'")

            def __exit__(self, *_: object) -> None:
                """Never reached."""


class TorchDispatchMode(TorchsMode):
    """torch's mode, which keeps the compiler out of `__torch_dispatch__` without importing it for that.

    torch wraps the method of each subclass so that its first call imports `torch._dynamo`: 70 MB and seconds, where
    nothing was ever compiled. While nobody has imported that, there is no compiler to keep out.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        guarded: Callable[..., Any] | None = cls.__dict__.get("__torch_dispatch__")
        plain = getattr(guarded, "__wrapped__", None)
        if guarded is None or plain is None:
            return

        @functools.wraps(plain)
        def dispatch(*arguments: Any, **keywords: Any) -> Any:
            return (guarded if "torch._dynamo" in sys.modules else plain)(*arguments, **keywords)

        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


__all__ = ["TorchDispatchMode"]
