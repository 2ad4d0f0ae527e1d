"""How an operation becomes a `torch.library` operator.

An operator has one schema, a torch version (the CPU path, and the oracle of the tests), a Triton version
(the CUDA path) and a fake. Being registered is what makes a step recordable on a CPU, traceable by
FakeTensor and checkable with `torch.library.opcheck`.
"""

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "graphdecode"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def _writes_only(*_arguments: Any, **_options: Any) -> None:
    """The fake of an operator that returns nothing: it only writes into tensors that it was given."""


def operator(
    schema: str,
    *,
    torch_version: Callable[..., Any],
    triton_version: Callable[..., Any] | None = None,
    fake: Callable[..., Any] = _writes_only,
    keys: tuple[str, ...] = (),
) -> Any:
    """Register one operator and return it as a callable.

    Args:
        schema: `name(arguments) -> ()` in torch's schema language; written tensors are marked `Tensor(a!)`.
        torch_version: runs on CPU tensors, and on CUDA tensors where there is no Triton version.
        triton_version: runs on CUDA tensors.
        fake: infers outputs without data; operators that return nothing need none.
        keys: further dispatch keys that `torch_version` answers (packed CPU weights have one of their own).
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", *keys):
        _LIBRARY.impl(name, torch_version, key)
    _LIBRARY.impl(name, triton_version or torch_version, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
