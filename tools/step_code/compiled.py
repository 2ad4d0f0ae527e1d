"""Compiles a launch for a GPU that this machine lacks."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from step_code import figures as figures_module
from step_code import sass
from step_code.figures import Figures, figures_of
from step_code.launches import Launch, spread

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}
_ALIGNED = [["tt.divisibility", 16]]
_FIRST_ARGUMENT = {80: 0x160, 90: 0x210, 100: 0x380, 120: 0x380}  # its offset in the constant bank
_LARGEST_INT32 = 2**31 - 1


def form_of(launch: Launch) -> tuple[Any, ...]:
    """Return all that a launch's code depends on, as a key."""
    parameters = {parameter.name: parameter for parameter in launch.kernel.params}

    def form(name: str, value: Any) -> Any:
        name = name.partition(".")[0]
        if isinstance(value, torch.Tensor):
            return str(value.dtype), value.storage_offset() * value.element_size() % 16 == 0
        if parameters[name].is_constexpr or not isinstance(value, int):
            return float if isinstance(value, float) and not parameters[name].is_constexpr else value
        return value == 1, value % 16 == 0, abs(value) > _LARGEST_INT32

    arguments = tuple((name, form(name, value)) for name, value in spread(launch.arguments).items())
    return launch.name, arguments, tuple(sorted(launch.options.items()))


def source_of(kernel: JITFunction, arguments: dict[str, Any]) -> ASTSource:
    """Return a kernel, specialized as Triton does for these arguments."""
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def kind_of(place: tuple[int, ...], value: Any, is_constexpr: bool, is_free: bool) -> Any:
        if not is_constexpr and isinstance(value, tuple):
            kinds = [kind_of((*place, at), part, False, is_free) for at, part in enumerate(value)]
            return type(value)(*kinds) if hasattr(value, "_fields") else tuple(kinds)
        if is_constexpr or value is None or (type(value) is int and value == 1 and not is_free):
            constants[place] = value
            return "constexpr"
        if isinstance(value, torch.Tensor):
            if value.storage_offset() * value.element_size() % 16 == 0:
                attributes[place] = _ALIGNED
            return POINTERS[value.dtype]
        if isinstance(value, float):
            return "fp32"
        if value % 16 == 0 and not is_free:
            attributes[place] = _ALIGNED
        return "i32" if abs(value) <= _LARGEST_INT32 else "i64"

    signature = {
        parameter.name: kind_of(
            (place,), arguments[parameter.name], parameter.is_constexpr, parameter.do_not_specialize
        )
        for place, parameter in enumerate(kernel.params)
    }
    return ASTSource(kernel, signature, constants, attributes)


def pointers_of(source: ASTSource, arch: int) -> dict[int, str]:
    """Return the names of a kernel's pointers by their offsets in the constant bank."""
    found: dict[int, str] = {}
    offset = _FIRST_ARGUMENT[arch]
    for name, kind in spread(source.signature).items():
        if kind == "constexpr":
            continue
        size = 8 if kind.startswith("*") or kind == "i64" else 4
        offset = -(-offset // size) * size
        if kind.startswith("*"):
            found[offset] = name
        offset += size
    return found


def compiled(
    kernel: JITFunction, arguments: dict[str, Any], options: dict[str, Any], arch: int
) -> tuple[CompiledKernel, ASTSource]:
    """Compile a launch, without loading it; return the result and its source."""
    source = source_of(kernel, arguments)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options), source


class Measured:
    """Figures of launches; each code is analysed once.

    Args:
        arch: compute capability as one number.
        folder: cache of figures.
    """

    def __init__(self, arch: int, folder: Path) -> None:
        self._arch = arch
        self._folder = folder
        self._known: dict[tuple[Any, ...], Figures] = {}
        self._rules = Path(sass.__file__).read_bytes() + Path(figures_module.__file__).read_bytes()

    def __call__(self, launch: Launch) -> Figures | None:
        """Return the figures of a launch; None for a library's kernel."""
        return None if launch.kernel is None else self.of_ours(launch)

    def of_ours(self, launch: Launch) -> Figures:
        """Return the figures of a launch of our kernels."""
        form = form_of(launch)
        if form not in self._known:
            code, source = compiled(launch.kernel, launch.arguments, launch.options, self._arch)
            self._known[form] = self._looked_at(code, pointers_of(source, self._arch))
        return self._known[form]

    def _looked_at(self, code: CompiledKernel, pointers: dict[int, str]) -> Figures:
        cubin, shared = code.asm["cubin"], code.metadata.shared
        seen = hashlib.sha256(cubin + json.dumps([shared, *pointers.items()]).encode() + self._rules)
        file = self._folder / f"{seen.hexdigest()}.json"
        if file.exists():
            return Figures.from_dict(json.loads(file.read_text()))
        figures = figures_of(sass.Code.of(cubin), shared, pointers)
        self._folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(figures)))
        return figures
