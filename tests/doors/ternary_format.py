"""A quantization format in one file: weights are -1, 0 or 1 times a scale for each row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.kernels.linear.quantized_linear import Numbers, QuantizedPanels, quantized_panels
from graphdecode.kernels.linear.weight_tiles import WeightTiles, tiled
from graphdecode.linear.quantization.format import OnlineQuantization, PackedTensor, QuantizationFormat, Read, require
from graphdecode.linear.quantization.quantized_weight import QuantizedWeight, WeightType
from graphdecode.linear.quantization.registry import register_format
from graphdecode.linear.weight_form import Shard, Stored

VALUES = torch.tensor([-1, 0, 1, 0], dtype=torch.int8)


@dataclass(frozen=True)
class TernaryWeight(QuantizedWeight):
    path = "ternary"
    codes: Tensor  # uint8 [out_features, in_features]
    scales: Tensor  # [out_features, 1]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, rows: slice) -> TernaryWeight:
        return replace(self, codes=self.codes[rows], scales=self.scales[rows])

    def part(self, shard: Shard) -> TernaryWeight:
        rows, *columns = shard.slices(self.shape)
        return replace(self.rows(rows), codes=self.codes[(rows, *columns)])

    @classmethod
    def joined(cls, parts: Sequence[TernaryWeight]) -> TernaryWeight:
        return cls(torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts]))

    def some_panels(self) -> QuantizedPanels:  # for a CPU's kernels
        return quantized_panels(self.codes, 2, VALUES, Numbers(self.scales))

    def for_tiles(self) -> TernaryWeight:
        return self

    def some_tiles(self) -> WeightTiles:  # for a GPU's
        return tiled(self.codes + 7, "s4", self.scales, 0)


class RoundedToTernary(OnlineQuantization):
    name = "ternary"
    file_format = "safetensors"

    def sized(self, group_size: int | None, columns: Iterable[int]) -> RoundedToTernary:
        if group_size is not None:
            raise ArgumentError("quantize='ternary' has a scale for each row: leave the group size out")
        return self

    def type_of(self, name: str, columns: int, *, is_outer: bool) -> str:
        return "TERNARY"

    def quantized(self, weight: Tensor, weight_type: str) -> TernaryWeight:
        scales = weight.float().abs().mean(dim=1, keepdim=True) * 1.5
        return TernaryWeight((weight / scales).round().clamp(-1, 1).add(1).to(torch.uint8), scales)

    def written(self, name: str, weight: QuantizedWeight) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(weight, TernaryWeight)
        yield f"{name}_codes", weight.codes
        yield f"{name}_scales", weight.scales

    def written_config(self, ignored: list[str]) -> dict[str, Any]:
        return {"quant_method": "ternary"}


class Ternary(QuantizationFormat):
    name = "ternary"
    weight_types = (WeightType("TERNARY", 2),)
    online = (RoundedToTernary(),)

    def find(self, tensors: Mapping[str, Stored], read: Read) -> Iterator[tuple[str, PackedTensor]]:
        for codes, stored in tensors.items():
            name = codes.removesuffix("_codes")
            if name != codes:
                require(tensors, f"{name}_scales", (stored.shape[0], 1), ("F32",))
                names = {"codes": codes, "scales": f"{name}_scales"}
                yield name, PackedTensor(Stored(stored.shape, "TERNARY"), names, TernaryWeight)


register_format(Ternary)
