"""A shard of a layer is read alone, and the shards together are the layer, along the axis that the map says."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from graphdecode.linear.forms import load_linear
from graphdecode.linear.linear_choice import LinearTuner
from graphdecode.linear.weight_form import FormOptions, LinearNames, Shard, WeightForm
from graphdecode.models.checkpoint import Checkpoint
from graphdecode.models.family import family_of
from graphdecode.models.shapes import RandomWeights
from graphdecode.models.weight_map import Part

OPTIONS = FormOptions(torch.device("cpu"), torch.float32, LinearTuner())
RANKS = 2


class Watched(Checkpoint):
    """Counts the elements that are read."""

    elements = 0

    def read(self, name: str, out: torch.Tensor, shard: Shard | None = None) -> None:
        self.elements += out.numel()
        super().read(name, out, shard)


def product(form: WeightForm, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[0], form.out_features)
    form.apply(out, x)
    return out


@pytest.mark.parametrize("name", ["llama-3", "llama-biases", "qwen2", "qwen3-tied"])
def test_the_shards_of_every_product_are_the_product(checkpoint: Callable[[str], Path], name: str) -> None:
    source = Watched(checkpoint(name))
    config = source.config()
    places = family_of(config.architecture).weights(config)
    products = {place: parts for place, parts in places.items() if len(parts[0].shape) == 2 and place != "embedding"}
    assert len(products) == 4 * config.num_hidden_layers + (not config.tie_word_embeddings)

    def names(parts: tuple[Part, ...]) -> tuple[str, ...]:
        return tuple(part.name for part in parts)

    for place, parts in products.items():
        linear = LinearNames(names(parts), names(places.get(f"{place}.bias", ())))
        whole = load_linear(source, linear, None, OPTIONS)
        x = torch.randn(3, whole.in_features, generator=torch.Generator().manual_seed(1))
        axis = parts[0].split
        assert axis in (0, 1)
        shards = [load_linear(source, linear, Shard(rank, RANKS, axis), OPTIONS) for rank in range(RANKS)]
        assert sum(shard.shape[axis] for shard in shards) == whole.shape[axis]
        assert max(shard.shape[axis] for shard in shards) <= -(-whole.shape[axis] // RANKS)
        expected = product(whole, x)
        if axis == 1:
            columns = x.chunk(RANKS, dim=1)
            given = sum(product(shard, part.contiguous()) for shard, part in zip(shards, columns, strict=True))
        else:  # each fused part is dealt out by itself: a shard of QKV is whole heads of queries, keys and values
            sizes = [[part.shape[0] * end // RANKS for part in parts] for end in range(RANKS + 1)]
            dealt = [[b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(sizes)]
            pieces = [product(shard, x).split(size, dim=1) for shard, size in zip(shards, dealt, strict=True)]
            given = torch.cat([torch.cat(piece, dim=1) for piece in zip(*pieces, strict=True)], dim=1)
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


def test_no_more_than_the_shard_is_read(checkpoint: Callable[[str], Path]) -> None:
    source = Watched(checkpoint("llama-3"))
    name = "model.layers.1.mlp.down_proj.weight"
    shape = source.tensors[name].shape
    load_linear(source, LinearNames((name,)), Shard(1, 4, 1), OPTIONS)
    assert source.elements == shape[0] * shape[1] // 4


def test_random_shards_are_parts_of_one_weight() -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    whole = torch.empty(RandomWeights("shape:llama-100m").tensors[name].shape)
    RandomWeights("shape:llama-100m").read(name, whole)
    part = torch.empty(whole.shape[0], whole.shape[1] // 2)
    RandomWeights("shape:llama-100m").read(name, part, Shard(1, 2, 1))
    assert torch.equal(part, whole[:, whole.shape[1] // 2 :])
