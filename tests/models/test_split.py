"""A rank has its part of a model and no more, reads no more, and gets the logits of all."""

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from driven_decoder import DrivenDecoder

from graphdecode import LLM
from graphdecode.distributed import SharedCollectives
from graphdecode.distributed.board_file import new_board
from graphdecode.errors import ArgumentError
from graphdecode.linear.weight_form import Shard
from graphdecode.models import load_model
from graphdecode.models.checkpoint import Checkpoint
from graphdecode.models.family import family_of
from graphdecode.models.shapes import RandomWeights, shape_config
from graphdecode.models.split import SplitSource, split_config
from graphdecode.models.weight_map import parts


class Watched(Checkpoint):
    """Counts the elements that are read."""

    elements = 0

    def read(self, name: str, out: torch.Tensor, shard: Shard | None = None) -> None:
        self.elements += out.numel()
        super().read(name, out, shard)


def split(source: Checkpoint | RandomWeights, rank: int, count: int) -> SplitSource:
    weight_map = family_of(source.config().architecture).weights_in(source.config(), source.tensors)
    return SplitSource(source, weight_map, rank, count)


def elements(source: SplitSource) -> int:
    return sum(math.prod(stored.shape) for stored in source.tensors.values())


@pytest.mark.parametrize("name", ["llama-biases", "qwen3-tied", "phi3", "mixtral", "qwen2-moe", "gpt-oss", "olmo2"])
def test_a_rank_reads_its_part_alone_and_the_parts_are_the_whole(checkpoint: Callable[[str], Path], name: str) -> None:
    sources = [Watched(checkpoint(name)) for _ in range(2)]
    ranks = [split(source, rank, 2) for rank, source in enumerate(sources)]
    weight_map = family_of(sources[0].config().architecture).weights_in(sources[0].config(), sources[0].tensors)
    for part in parts(weight_map):
        whole = torch.empty(part.shape)
        Checkpoint(checkpoint(name)).read(part.name, whole)
        read = [torch.full(rank.tensors[part.name].shape, math.nan) for rank in ranks]
        for rank, out in zip(ranks, read, strict=True):
            rank.read(part.name, out)
        if part.is_added:
            assert torch.equal(read[0], whole)
            assert not read[1].any()
        elif part.split is None:
            assert all(torch.equal(out, whole) for out in read)
        else:
            sizes = [run.size // 2 for run in part.runs] or None
            dealt = [out.split(sizes, part.split) if sizes else (out,) for out in read]
            joined = [own for run in zip(*dealt, strict=True) for own in run]
            assert torch.equal(torch.cat(joined, part.split), whole), part.name
    added = sum(math.prod(part.shape) for part in parts(weight_map) if part.is_added)
    assert [source.elements for source in sources] == [elements(ranks[0]), elements(ranks[1]) - added]


def test_heads_of_keys_that_are_fewer_than_the_ranks_are_in_several(checkpoint: Callable[[str], Path]) -> None:
    source = Checkpoint(checkpoint("llama-3"))
    assert split_config(source.config(), 4).num_key_value_heads == 1
    name = "model.layers.0.self_attn.k_proj.weight"
    whole = torch.empty(source.tensors[name].shape)
    source.read(name, whole)
    for rank in range(4):
        own = torch.empty(16, 64)
        split(source, rank, 4).read(name, own)
        assert torch.equal(own, whole[16 * (rank // 2) : 16 * (rank // 2 + 1)])


@pytest.mark.parametrize(
    ("shape", "count"),
    [("llama-100m", 2), ("llama-100m", 4), ("llama-3.2-1b", 8), ("llama-3.1-8b", 8), ("qwen3-30b-a3b", 4)],
)
def test_a_rank_has_its_share_of_the_weights_within_a_tenth(shape: str, count: int) -> None:
    source = RandomWeights(f"shape:{shape}")
    whole = sum(math.prod(stored.shape) for stored in source.tensors.values())
    assert elements(split(source, count - 1, count)) == pytest.approx(whole / count, rel=0.1)


def test_sizes_that_do_not_divide_are_refused_by_name() -> None:
    config = shape_config("shape:llama-100m")
    with pytest.raises(ArgumentError, match="tensor_parallel_size=5 does not divide num_attention_heads 12, interm"):
        split_config(config, 5)
    with pytest.raises(ArgumentError, match="does not divide num_key_value_heads 4 of this model"):
        split_config(replace(config, num_attention_heads=12, intermediate_size=1536), 6)
    sparse = shape_config("shape:qwen3-30b-a3b")
    with pytest.raises(ArgumentError, match="moe_intermediate_size 768"):
        split_config(replace(sparse, num_attention_heads=320), 5)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"tensor_parallel_size": 3}, "does not divide num_attention_heads 4"),
        ({"tensor_parallel_size": 2, "speculation": "model", "draft_model": "demo"}, "goes with .* ngram"),
        ({"tensor_parallel_size": 2, "model_impl": "transformers"}, "is run by transformers"),
    ],
)
def test_what_ranks_cannot_share_is_refused_before_any_is_started(wish: dict, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        LLM("demo", skip_tokenizer_init=True, **wish)


@pytest.mark.parametrize("name", ["llama-3", "qwen2-moe", "olmo2"])
def test_logits_have_the_same_bits_on_all_ranks(checkpoint: Callable[[str], Path], name: str) -> None:
    """Each rank is a thread with its own part; they meet over the same memory as processes do."""
    ranks = 2
    _, board = new_board(ranks, limit_seconds=60.0)
    found: dict[int, list[torch.Tensor]] = {}

    def run(rank: int) -> None:
        shared = SharedCollectives(rank, ranks, lambda _: None, board)
        driven = DrivenDecoder(load_model(checkpoint(name), device="cpu", dtype="float32", shared=shared), rows=3)
        with torch.no_grad():
            driven.prefill([[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15]], [0, 0, 0])
            found[rank] = [driven.decode([20 + i, 30 + i, 40 + i], [4 + i, 1 + i, 6 + i]) for i in range(4)]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[0], found[1], strict=True))
    driven = DrivenDecoder(load_model(checkpoint(name), device="cpu", dtype="float32"), rows=3)
    driven.prefill([[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15]], [0, 0, 0])
    for i, logits in enumerate(found[0]):
        whole = driven.decode([20 + i, 30 + i, 40 + i], [4 + i, 1 + i, 6 + i])
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
