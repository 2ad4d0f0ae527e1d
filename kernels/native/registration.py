"""How an operation becomes a `torch.library` operator.

The function that is decorated is the operation: its annotations are the only place where its signature stands (see
`signature.py`), its docstring says what callers give it, its body computes with torch operators and is the oracle of
the tests. Beside it an operation may have a Triton version, which runs on CUDA tensors, and a kernel in C of the same
name, which runs on a CPU where there is a C compiler. Being registered is what makes a step recordable on a CPU,
traceable by FakeTensor and checkable with `torch.library.opcheck`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec

import torch

from . import library
from .calls import NativeCall, NativeSequence
from .signature import Signature

NAMESPACE = "graphdecode"
P = ParamSpec("P")
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


class Versions(NamedTuple):
    """The versions of one operator; all take its arguments one by one, as the dispatcher does.

    Attributes:
        torch: computes with torch operators.
        triton: launches the Triton kernel; the torch version where there is none.
        native: returns the compiled kernel over these tensors, or None where it does not serve them; None where there
            is no such kernel.
    """

    torch: Callable[..., None]
    triton: Callable[..., None]
    native: Callable[..., NativeCall | NativeSequence | None] | None

    def bound(self, *arguments: Any) -> Callable[[], Any]:
        """Return a function without arguments that computes over these CPU tensors, natively if that can be."""
        call = None if self.native is None else self.native(*arguments)
        return call or functools.partial(self.torch, *arguments)


_VERSIONS: dict[Any, Versions] = {}  # filled while the operators' files are imported, and then read


def operator(
    *,
    triton_version: Callable[..., Any] | None = None,
    is_compiled: Callable[..., bool] | bool = False,
    constants: dict[str, int] | None = None,
    keys: tuple[str, ...] = (),
    parts: Callable[..., Sequence[tuple[str, Sequence[Any]]]] | None = None,
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return a decorator that registers a function as an operator, and returns what callers call instead.

    Args:
        triton_version: takes the function's arguments; runs on CUDA tensors.
        is_compiled: takes the function's arguments and says whether the kernel of the operation's name in C serves
            them, their dtypes apart; True: all; False: there is no such kernel.
        constants: integers that the kernel knows by these names.
        keys: further dispatch keys that the torch version answers (packed CPU weights have one of their own).
        parts: takes the function's arguments and returns which operators do the same one after another, by name and
            with their arguments as the dispatcher has them; where all of these have compiled kernels it is them.
    """

    def registered(function: Callable[P, None]) -> Callable[P, None]:
        signature = Signature(function)
        on_host = plain = signature.flat(function)
        native: Callable[..., NativeCall | NativeSequence | None] | None = None
        if is_compiled is not False:
            library.declare(signature, constants or {})
            serves = None if is_compiled is True else signature.flat(is_compiled)
            native = functools.partial(_native, signature, serves)
            on_host = functools.partial(_run_on_host, native, plain)
        if parts is not None:
            native = functools.partial(_sequence, signature.flat(parts))
            on_host = functools.partial(_run_on_host, native, plain)
        on_device = plain if triton_version is None else signature.flat(triton_version)
        guarded = plain if triton_version is None else _where_its_tensors_are(on_device)
        _LIBRARY.define(signature.schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", *keys):
            _LIBRARY.impl(signature.name, on_host, key)
        _LIBRARY.impl(signature.name, guarded, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{signature.name}", _writes_only, lib=_LIBRARY)
        overload = getattr(getattr(torch.ops, NAMESPACE), signature.name).default
        _VERSIONS[overload] = Versions(plain, on_device, native)
        return signature.face(overload)

    return registered


def _where_its_tensors_are(launches: Callable[..., None]) -> Callable[..., None]:
    """Triton launches on the current device, whatever the tensors say; torch's own operators look at these."""

    def launched(*arguments: Any) -> None:
        with torch.cuda.device(next(given.device for given in arguments if isinstance(given, torch.Tensor))):
            launches(*arguments)

    return launched


def _writes_only(*_arguments: Any) -> None:
    """The fake of an operator that returns nothing: it only writes into tensors that it was given."""


def _native(signature: Signature, serves: Callable[..., bool] | None, *arguments: Any) -> NativeCall | None:
    if library.library() is None or (serves is not None and not serves(*arguments)):
        return None
    packed = signature.packed(arguments)
    if packed is None or (signature.has_element and packed[1] not in library.ELEMENTS):
        return None
    return NativeCall(library.kernel(signature.name, packed[1]), packed[0], arguments)


def _sequence(parts: Callable[..., Sequence[tuple[str, Sequence[Any]]]], *arguments: Any) -> NativeSequence | None:
    calls: list[NativeCall] = []
    for name, given in parts(*arguments):
        native = versions(name).native
        call = None if native is None else native(*given)
        if not isinstance(call, NativeCall):
            return None
        calls.append(call)
    return NativeSequence(calls)


def _run_on_host(
    native: Callable[..., NativeCall | NativeSequence | None], otherwise: Callable[..., None], *arguments: Any
) -> None:
    call = native(*arguments)
    if call is None:
        otherwise(*arguments)
    else:
        call()


def versions(name: str) -> Versions:
    """Return the versions of an operator whose file has been imported."""
    return _VERSIONS[getattr(getattr(torch.ops, NAMESPACE), name).default]


def bind(registered: Any, *arguments: Any) -> Callable[[], Any] | None:
    """Return a function that runs an operator over these CPU tensors; None if the operator is not one of ours.

    A recorded step calls it without the dispatcher in between, which would cost more than some of the operators.
    """
    found = _VERSIONS.get(registered)
    return None if found is None else found.bound(*arguments)
