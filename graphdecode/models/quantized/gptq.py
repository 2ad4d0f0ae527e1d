"""GPTQ (Frantar et al., 2022) as AutoGPTQ and GPTQModel write it, and AWQ (Lin et al., 2023) as AutoAWQ does.

Both have of a module NAME `qweight`, `qzeros` and `scales` (float16 [groups, out_features]), the integers packed into
int32. GPTQ packs along the input features, [in_features * bits / 32, out_features], and zero points along the output
features, in its first version less one; `g_idx` says which group an input feature is in. AWQ packs both along the
output features, [in_features, out_features / 8], the even ones of eight first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from graphdecode.errors import shown
from graphdecode.linear.groups import Groups, packed, unpacked
from graphdecode.linear.weight_form import Stored
from graphdecode.models.fields import UnsupportedModelError, flag
from graphdecode.models.quantized.packed_tensor import PackedTensor, Read, group_size_of, is_one_of, reordered, require
from graphdecode.models.weight_map import CheckpointError

_SCALES = ("F16", "BF16", "F32")
_PLACE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight outputs of AWQ, in an int32


@dataclass(frozen=True)
class _Weight(PackedTensor):
    module: str
    bits: int
    group_size: int

    def _part(self, read: Read, name: str) -> Tensor:
        return read(f"{self.module}.{name}", ())


@dataclass(frozen=True)
class _GptqWeight(_Weight):
    zero_offset: int

    def groups(self, read: Read) -> Groups:
        """Return it as it is stored."""
        zeros = self._part(read, "qzeros").contiguous().view(torch.uint8)
        zeros = unpacked(zeros) if self.bits == 4 else zeros
        groups = Groups(
            code="integer",
            bits=self.bits,
            codes=self._part(read, "qweight").T.contiguous().view(torch.uint8),
            scales=self._part(read, "scales").T.contiguous(),
            zeros=((zeros + self.zero_offset) & (2**self.bits - 1)).T.contiguous(),
            group_size=self.group_size,
        )
        if f"{self.module}.g_idx" not in self.tensors:
            return groups
        return reordered(groups, self._part(read, "g_idx"), self.module)


@dataclass(frozen=True)
class _AwqWeight(_Weight):
    def groups(self, read: Read) -> Groups:
        """Return it as it is stored."""
        zeros = _outputs_in_order(self._part(read, "qzeros")) if f"{self.module}.qzeros" in self.tensors else None
        return Groups(
            code="integer",
            bits=4,
            codes=packed(_outputs_in_order(self._part(read, "qweight")).T.contiguous()),
            scales=self._part(read, "scales").T.contiguous(),
            zeros=None if zeros is None else zeros.T.contiguous(),
            group_size=self.group_size,
        )


def _outputs_in_order(stored: Tensor) -> Tensor:
    """Return the codes in int32 [rows, out_features / 8], uint8 [rows, out_features]."""
    places = unpacked(stored.contiguous().view(torch.uint8)).view(len(stored), -1, 8)
    return places[..., _PLACE_OF_OUTPUT].flatten(1)


class _Packed:
    """What the two have in common."""

    spare: ClassVar[tuple[str, ...]] = ()
    of_integers = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._bits = is_one_of(settings, "bits", self._known_bits, 4)
        self._group_size = settings.get("group_size", settings.get("q_group_size", 128))
        size = self._group_size
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise UnsupportedModelError(f"quantization_config: group_size must be an integer >= 1, got {shown(size)}")

    _known_bits: ClassVar[tuple[int, ...]] = (4, 8)

    def find(self, tensors: Mapping[str, Stored], read: Read) -> Iterator[tuple[str, PackedTensor]]:
        """Yield the weights of modules that have a `qweight`."""
        for name, stored in tensors.items():
            module = name.removesuffix(".qweight")
            if module == name:
                continue
            if stored.dtype != "I32" or len(stored.shape) != 2:
                raise CheckpointError(f"{name} is {stored.dtype} {list(stored.shape)} and should be a matrix of I32")
            yield f"{module}.weight", self._weight(module, tensors)

    @abstractmethod
    def _weight(self, module: str, tensors: Mapping[str, Stored]) -> PackedTensor: ...

    def _groups(self, module: str, tensors: Mapping[str, Stored], in_features: int, out_features: int) -> int:
        """Return how many columns share a scale."""
        name = f"{module}.scales"
        scales = tensors.get(name)
        groups = scales.shape[0] if scales is not None and scales.shape else 0
        require(tensors, name, (groups, out_features), _SCALES)
        size = group_size_of(module, in_features, groups, (self._group_size,))
        if f"{module}.qzeros" in tensors:
            require(tensors, f"{module}.qzeros", (groups, out_features * self._bits // 32), ("I32",))
        return size


class Gptq(_Packed):
    """GPTQ; see the file's docstring."""

    name: ClassVar[str] = "gptq"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        flag(settings, "desc_act", False)
        if settings.get("dynamic"):
            raise UnsupportedModelError("quantization_config: dynamic is not supported: all layers must be alike")
        # in the first version what is stored is the zero point less one, as the first kernels wanted it
        self._zero_offset = 1 if is_one_of(settings, "checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq" else 0

    def _weight(self, module: str, tensors: Mapping[str, Stored]) -> PackedTensor:
        words, out_features = tensors[f"{module}.qweight"].shape
        in_features = words * 32 // self._bits
        size = self._groups(module, tensors, in_features, out_features)
        if f"{module}.qzeros" not in tensors:
            raise CheckpointError(f"{module}.qzeros is missing")
        parts = [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")]
        if f"{module}.g_idx" in tensors:
            require(tensors, f"{module}.g_idx", (in_features,), ("I32", "I64"))
            parts.append(f"{module}.g_idx")
        stored = Stored((out_features, in_features), f"INT{self._bits}")
        return _GptqWeight(stored, tuple(parts), module, self._bits, size, self._zero_offset)


class Awq(_Packed):
    """AWQ; see the file's docstring."""

    name: ClassVar[str] = "awq"
    _known_bits: ClassVar[tuple[int, ...]] = (4,)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__({"bits": settings.get("w_bit", 4)} | dict(settings))
        version = settings.get("version")
        lower = {"version": version.lower() if isinstance(version, str) else version}
        is_one_of(lower, "version", ("gemm",), "gemm")
        flag(settings, "zero_point", True)

    def _weight(self, module: str, tensors: Mapping[str, Stored]) -> PackedTensor:
        in_features, words = tensors[f"{module}.qweight"].shape
        size = self._groups(module, tensors, in_features, words * 8)
        parts = tuple(name for part in ("qweight", "qzeros", "scales") if (name := f"{module}.{part}") in tensors)
        return _AwqWeight(Stored((words * 8, in_features), "INT4"), parts, module, 4, size)
