"""How an operation becomes a `torch.library` operator.

An operator has one schema, a torch version (the CPU path, and the oracle of the tests), a Triton version (the CUDA
path), a fake, and for the hot ones a compiled version (the CPU path where there is a C compiler). Being registered is
what makes a step recordable on a CPU, traceable by FakeTensor and checkable with `torch.library.opcheck`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from .library import NativeCall

NAMESPACE = "graphdecode"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_BOUND_VERSIONS: dict[Any, Callable[..., Any]] = {}  # filled while the operators' files are imported, and then read


def _writes_only(*_arguments: Any, **_options: Any) -> None:
    """The fake of an operator that returns nothing: it only writes into tensors that it was given."""


def operator(
    schema: str,
    *,
    torch_version: Callable[..., Any],
    bound_version: Callable[..., Callable[[], Any]] | None = None,
    native_version: Callable[..., NativeCall | None] | None = None,
    triton_version: Callable[..., Any] | None = None,
    fake: Callable[..., Any] = _writes_only,
    keys: tuple[str, ...] = (),
) -> Any:
    """Register one operator and return it as a callable.

    Args:
        schema: `name(arguments) -> ()` in torch's schema language; written tensors are marked `Tensor(a!)`.
        torch_version: runs on CPU tensors, and on CUDA tensors where there is no Triton version.
        bound_version: takes the same arguments and returns a function without any that does the same, bit for bit, on
            CPU tensors. What follows from where the tensors are (views of them) is done once, for a recorded step
            that runs over the same tensors again and again. None means that nothing is to be gained.
        native_version: takes the same arguments and returns the compiled kernel over these CPU tensors, or None where
            it does not serve them; then the torch version does.
        triton_version: runs on CUDA tensors.
        fake: infers outputs without data; operators that return nothing need none.
        keys: further dispatch keys that `torch_version` answers (packed CPU weights have one of their own).
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    bound = bound_version or functools.partial(functools.partial, torch_version)
    on_host = torch_version
    if native_version is not None:
        bound = functools.partial(_bind_natively, native_version, bound)
        on_host = functools.partial(_run_natively, native_version, torch_version)
    for key in ("CPU", *keys):
        _LIBRARY.impl(name, on_host, key)
    _LIBRARY.impl(name, triton_version or torch_version, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    registered = getattr(getattr(torch.ops, NAMESPACE), name).default
    _BOUND_VERSIONS[registered] = bound
    return registered


def _bind_natively(
    native_version: Callable[..., NativeCall | None], otherwise: Callable[..., Callable[[], Any]], *arguments: Any
) -> Callable[[], Any]:
    return native_version(*arguments) or otherwise(*arguments)


def _run_natively(
    native_version: Callable[..., NativeCall | None], otherwise: Callable[..., Any], *arguments: Any
) -> None:
    call = native_version(*arguments)
    if call is None:
        otherwise(*arguments)
    else:
        call()


def bind(registered: Any, *arguments: Any) -> Callable[[], Any] | None:
    """Return a function that runs an operator over these CPU tensors; None if the operator is not one of ours.

    A recorded step calls it without the dispatcher in between, which would cost more than some of the operators.
    """
    bound_version = _BOUND_VERSIONS.get(registered)
    return None if bound_version is None else bound_version(*arguments)
