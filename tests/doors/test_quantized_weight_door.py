"""A weight code is one class: this one has -1, 0 and 1 with a scale for each row, and no file of ours knows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from compiled_kernels import compiled
from torch import Tensor

from graphdecode.kernels.linear.quantized_linear import Numbers, QuantizedPanels, quantized_panels
from graphdecode.kernels.linear.weight_tiles import WeightTiles, dequantized, tiled
from graphdecode.linear import FormOptions, Shard, Stored, load_linear
from graphdecode.linear.kept import KeptPanels
from graphdecode.linear.linear_choice import LinearTuner
from graphdecode.linear.quantized_weight import QuantizedWeight
from graphdecode.linear.weight_form import LinearNames

TABLE = torch.tensor([-1, 0, 1, 0], dtype=torch.int8)
OPTIONS = FormOptions(torch.device("cpu"), torch.float32, LinearTuner())


@dataclass(frozen=True)
class Ternary(QuantizedWeight):
    path = "ternary"
    codes: Tensor  # uint8 [out_features, in_features]
    scales: Tensor  # [out_features, 1]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, rows: slice) -> Ternary:
        return replace(self, codes=self.codes[rows], scales=self.scales[rows])

    def part(self, shard: Shard) -> Ternary:
        rows, *columns = shard.slices(self.shape)
        return replace(self.rows(rows), codes=self.codes[(rows, *columns)])

    @classmethod
    def joined(cls, parts: Sequence[Ternary]) -> Ternary:
        return cls(torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts]))

    def for_panels(self, *, by_values: bool) -> Ternary:
        return self

    def some_panels(self) -> QuantizedPanels:
        return quantized_panels(self.codes, 2, TABLE, Numbers(self.scales))

    def for_tiles(self) -> Ternary:
        return self

    def some_tiles(self) -> WeightTiles:
        return tiled(self.codes + 7, "s4", self.scales, 0)

    def values(self) -> Tensor:
        return TABLE[self.codes.int()] * self.scales


class Source:
    def __init__(self, shard: Shard | None = None) -> None:
        draw = torch.Generator().manual_seed(3)
        self.weights = {
            name: Ternary(
                torch.randint(0, 3, (40, 96), generator=draw, dtype=torch.uint8), torch.rand(40, 1, generator=draw)
            )
            for name in "qk"
        }
        if shard is not None:
            self.weights = {name: weight.part(shard) for name, weight in self.weights.items()}
        self.tensors = {name: Stored(weight.shape, "T2") for name, weight in self.weights.items()}

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        raise AssertionError("it is never undone")

    def read_quantized(self, name: str, expert: int | None = None) -> QuantizedWeight:
        return self.weights[name]


@pytest.fixture
def registered() -> Iterator[None]:
    KeptPanels.kinds.add("T2")
    yield
    KeptPanels.kinds.remove("T2")


@compiled
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("shard", [None, Shard(1, 2, 0), Shard(2, 3, 1)], ids=str)
def test_a_layer_is_fused_cut_and_multiplied_in_a_code_from_outside(shard: Shard | None) -> None:
    source = Source(shard)
    form = load_linear(source, LinearNames(("q", "k")), OPTIONS)
    assert form.choice(1).path == "ternary"
    assert form.nbytes < form.out_features * form.in_features  # two bits, and whole panels
    weight = torch.cat([source.weights[name].values() for name in "qk"])
    x, out = torch.randn(3, form.in_features), torch.empty(3, form.out_features)
    form.apply(out, x)
    torch.testing.assert_close(out, x @ weight.T, rtol=1e-5, atol=1e-5)


def test_a_gpu_has_its_values_too() -> None:
    weight = Source().weights["q"]
    tiles = weight.tiles()
    assert tiles is not None
    torch.testing.assert_close(dequantized(tiles)[:, :96], weight.values())
