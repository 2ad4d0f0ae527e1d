"""Checks of arguments that the surfaces share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from graphdecode.cache import require_integers


def require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise a ValueError if an argument is not one of some words."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def require_fit(name: str, tensor: Tensor, shape: Sequence[int | str], *dtypes: torch.dtype) -> None:
    """Raise a ValueError if a tensor has another shape or none of the dtypes; a size with a name may be any."""
    fits = tensor.dim() == len(shape) and all(
        isinstance(wanted, str) or wanted == size for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits or (dtypes and tensor.dtype not in dtypes):
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        sizes = ", ".join(map(str, shape))
        raise ValueError(
            f"{name} must be {wanted} [{sizes}], got {tensor.dtype} {list(tensor.shape)}".replace("  ", " ")
        )


def require_range(low: int, high: int, **values: int) -> None:
    """Raise a ValueError naming the first of these arguments that is no integer of a range."""
    require_integers(**values)
    for name, value in values.items():
        if not low <= value <= high:
            raise ValueError(f"{name} must be in {low}..{high}, got {value}")
