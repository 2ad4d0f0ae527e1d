"""A rank has its part of a model and no more, reads no more, and gets the logits of all."""

import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from compiled_kernels import compiled
from driven_decoder import DrivenDecoder
from gguf_checkpoints import ARCHITECTURES, quantized_file
from products import product
from quantized_checkpoints import FORMS, write_pair
from test_against_transformers import PARAMS, assert_greedy, prompts, reference

from graphdecode import LLM, Engine, EngineConfig, Request, SamplingParams, StructuredOutputsParams
from graphdecode.distributed import Collectives, Leader, RankError, SharedCollectives
from graphdecode.distributed.started import new_board, start_ranks
from graphdecode.engine.loading import load_engine
from graphdecode.engine.steps import step as step_module
from graphdecode.errors import ArgumentError
from graphdecode.kernels.norm.gated_rms_norm import gated_rms_norm
from graphdecode.linear.composite import RowParallelLinear
from graphdecode.linear.experts import ExpertPanels
from graphdecode.linear.forms import load_linear
from graphdecode.linear.linear_choice import LinearTuner
from graphdecode.linear.quantized_linear import PanelLinear
from graphdecode.linear.weight_form import FormOptions, LinearNames, Shard, Stored
from graphdecode.models import Model, load_model
from graphdecode.models.adapters import Adapter
from graphdecode.models.blocks import Norm
from graphdecode.models.checkpoint import Checkpoint
from graphdecode.models.family import family_of
from graphdecode.models.recurrent_blocks import JointlyNormedMamba2
from graphdecode.models.shapes import RandomWeights, shape_config
from graphdecode.models.split import SplitSource, split_adapter, split_config
from graphdecode.models.weight_map import Part, parts

T = TypeVar("T")


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


# one of each family with recurrent states that can be split, and of those with other keys
RECURRENT = (
    *("bamba-biases", "falcon-h1-biases", "granite-4-experts", "lfm2-biases", "mamba2", "nemotron-h-biases"),
    *("qwen3.5", "qwen3-next"),
)
NEWEST = ("gemma4-inputs", "gemma4-experts", "llama4", "deepseek-v2", "deepseek-v3", "glm-4.7-flash")


@pytest.mark.parametrize(
    "name",
    [
        *("llama-biases", "qwen3-tied", "phi3", "mixtral", "qwen2-moe", "gpt-oss", "olmo2"),
        *("falcon-h1-biases", "lfm2-biases", "qwen3.5"),
    ],
)
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
            joined = [piece for run in zip(*dealt, strict=True) for piece in run]
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
        shard = torch.empty(16, 64)
        split(source, rank, 4).read(name, shard)
        assert torch.equal(shard, whole[16 * (rank // 2) : 16 * (rank // 2 + 1)])


@pytest.mark.parametrize(
    ("shape", "count"),
    [("llama-100m", 2), ("llama-100m", 4), ("llama-3.2-1b", 8), ("llama-3.1-8b", 8), ("qwen3-30b-a3b", 4)],
)
def test_a_rank_has_its_share_of_the_weights_within_a_tenth(shape: str, count: int) -> None:
    source = RandomWeights(f"shape:{shape}")
    whole = sum(math.prod(stored.shape) for stored in source.tensors.values())
    assert elements(split(source, count - 1, count)) == pytest.approx(whole / count, rel=0.1)


class TensorSource:
    """A source of tensors in memory."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self.values = values
        self.tensors = {name: Stored((*tensor.shape,), "F64") for name, tensor in values.items()}

    def read(self, name: str, out: torch.Tensor, shard: Shard | None = None) -> None:
        out.copy_(self.values[name] if shard is None else self.values[name][shard.slices(self.tensors[name].shape)])


@pytest.mark.parametrize(("name", "count"), [("llama-3", 4), ("phi3", 2), ("qwen2-moe", 2)])
def test_a_rank_has_the_part_of_an_adapter_that_changes_its_part_of_a_product(checkpoint, name, count):
    source, drawn = Checkpoint(checkpoint(name)), torch.Generator().manual_seed(1)
    every = family_of(source.config().architecture).weights_in(source.config(), source.tensors)
    products = {key: piece for key, piece in every.items() if len(piece[0].shape) == 2}
    matrices, changes = {}, {}
    for key, piece in products.items():
        down = torch.randn(len(piece), 3, piece[0].shape[1], generator=drawn, dtype=torch.float64)
        ups = [torch.randn(3, part.shape[0], generator=drawn, dtype=torch.float64) for part in piece]
        matrices[key] = (down, torch.cat(ups, dim=1))
        changes |= {part.name: up.T @ a for part, a, up in zip(piece, down, ups, strict=True)}
    for rank in range(count):
        split_changes = SplitSource(TensorSource(changes), products, rank, count)
        part_of_it = split_adapter(Adapter(matrices), products, rank, count)
        for key, (down, up) in Adapter.of_bytes(part_of_it.to_bytes()).matrices.items():
            expected = [
                torch.empty(split_changes.tensors[part.name].shape, dtype=torch.float64) for part in products[key]
            ]
            for part, out in zip(products[key], expected, strict=True):
                split_changes.read(part.name, out)
            ups = up.split([len(out) for out in expected], dim=1)
            for piece, a, out in zip(ups, down, expected, strict=True):
                torch.testing.assert_close(piece.T @ a, out)


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


def on_all_ranks(
    ranks: int, work: Callable[[Collectives], T], kind: type[SharedCollectives] = SharedCollectives
) -> list[T]:
    """Let each rank, a thread, do its part; they meet over the same memory as processes do."""
    descriptor, board = new_board(ranks, limit_seconds=60.0)
    os.close(descriptor)
    barrier = threading.Barrier(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        return list(
            pool.map(lambda rank: work(kind(rank, ranks, lambda _: barrier.wait() and None, board)), range(ranks))
        )


class OwnFirst(SharedCollectives):
    """Each rank begins the sum with its own numbers."""

    def _reduce(self, x: torch.Tensor) -> None:
        parts = torch.empty(1, self.count * x.numel())
        self._gather(parts, x.reshape(1, -1))
        x.copy_(reduce(torch.add, parts.view(self.count, *x.shape).roll(-self.rank, 0)))


def logits_of(path: Path, shared: Collectives | None, **options: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        driven = DrivenDecoder(load_model(path, device="cpu", dtype="float32", shared=shared, **options), rows=3)
        driven.prefill([[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15]], [0, 0, 0])
        return [driven.decode([20 + i, 30 + i, 40 + i], [4 + i, 1 + i, 6 + i]) for i in range(4)]


def same_bits(ranks: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(mine, theirs) for others in ranks[1:] for mine, theirs in zip(ranks[0], others, strict=True))


def check_ranks(path: Path, count: int, **options: Any) -> None:
    """Check that the logits have the same bits on all ranks, and are those of one process."""
    results = on_all_ranks(count, lambda shared: logits_of(path, shared, **options))
    assert same_bits(results)
    for actual, expected in zip(results[0], logits_of(path, None, **options), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("llama-3", 4), ("qwen2-moe", 4), ("olmo2", 4), ("mamba2", 2), ("mamba2", 4), ("nemotron-h-biases", 2)),
        *(("granite-4-experts", 4), ("falcon-h1-biases", 2), ("lfm2-biases", 4), ("qwen3.5", 2), ("qwen3-next", 2)),
    ],
)
def test_logits_have_the_same_bits_on_all_ranks(checkpoint: Callable[[str], Path], name: str, count: int) -> None:
    check_ranks(checkpoint(name), count)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_group_that_ranks_share_is_normed_as_on_one(norm_first: bool) -> None:
    read, gate, gain = torch.randn(11, 24, generator=torch.Generator().manual_seed(1)).split((5, 5, 1))
    expected = torch.empty(5, 24)
    gated_rms_norm(expected, read, gate, gain[0], 1e-5, 12, norm_first)

    def normed(shared: Collectives) -> torch.Tensor:
        columns, out = slice(6 * shared.rank, 6 * shared.rank + 6), torch.empty(5, 6)
        fields = dict.fromkeys(("in_proj", "conv", "conv_bias", "heads", "group", "step_limits", "out_proj"))
        of_group = {"collectives": shared, "param_name": "norm", "ranks_of_group": 2, "norm_first": norm_first}
        mixer = JointlyNormedMamba2(**fields, **of_group, norm=Norm(gain[0, columns], 1e-5))
        mixer.finish(out, read[:, columns], gate[:, columns])
        return out

    torch.testing.assert_close(torch.cat(on_all_ranks(4, normed), 1), expected)


def test_sums_have_the_same_bits_on_all_ranks_which_an_order_of_each_one_s_own_would_not_give() -> None:
    """Logits would not tell: they are gathered, each column from one rank."""

    def summed(shared: Collectives) -> list[torch.Tensor]:
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(shared.rank))
        shared.all_reduce(x, "here")
        return [x]

    assert same_bits(on_all_ranks(4, summed))
    assert not same_bits(on_all_ranks(4, summed, OwnFirst))


WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 640, "tie_word_embeddings": True}


@compiled
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_rank_keeps_blocks_of_products_and_embedding_in_half_the_memory(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(ARCHITECTURES, "wide", ("llama", "Llama", WIDE))
    path = quantized_file(tmp_path / "wide.gguf", "wide", {"weight": kind})

    def load(shared: Collectives | None) -> Model:
        return load_model(path, device="cpu", dtype="float32", quantize="gguf", shared=shared)

    ranks = on_all_ranks(2, load)
    for model in ranks:
        assert model.stem.part.table is not None
        o = model.layers[0].linears["o"]
        assert isinstance(o, RowParallelLinear)
        assert isinstance(o.form, PanelLinear)
    whole, *of_ranks = (sum(tensor.nbytes for tensor in model.constants) for model in (load(None), *ranks))
    assert of_ranks == pytest.approx([whole / 2] * 2, rel=0.1)
    check_ranks(path, 2, quantize="gguf")


@compiled
def test_a_row_in_parts_is_rounded_to_int8_as_the_whole(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("llama-3")

    def columns(shared: Collectives | None) -> torch.Tensor:
        model = load_model(path, device="cpu", dtype="float32", quantize="int8", shared=shared)
        down = model.layers[1].linears["down"]
        return product(down.form if isinstance(down, RowParallelLinear) else down)

    assert torch.equal(torch.cat(on_all_ranks(2, columns)), columns(None))


@compiled
@pytest.mark.parametrize("quantize", ["int8", "q8_0"])
def test_ranks_share_experts_that_are_rounded_while_they_are_read(checkpoint, quantize):
    check_ranks(checkpoint("gpt-oss"), 2, quantize=quantize)


def test_columns_in_gptq_s_own_order_are_refused_by_name(tmp_path: Path) -> None:
    packed, _ = write_pair(FORMS["gptq desc_act"], tmp_path)
    with pytest.raises(ArgumentError, match=r"o_proj.weight, \[64, 64\], has columns of all groups.*desc_act"):
        split(Checkpoint(packed), 0, 2).read_quantized("model.layers.0.self_attn.o_proj.weight")


OPTIONS = FormOptions(torch.device("cpu"), torch.float32, LinearTuner())
RANKS = 2


@pytest.mark.parametrize("name", ["llama-3", "llama-biases", "qwen2", "qwen3-tied"])
def test_the_shards_of_every_product_are_the_product(checkpoint: Callable[[str], Path], name: str) -> None:
    source = Checkpoint(checkpoint(name))
    config = source.config()
    weight_map = family_of(config.architecture).weights(config)
    products = {key: parts for key, parts in weight_map.items() if len(parts[0].shape) == 2 and key != "embedding"}
    assert len(products) == 4 * config.num_hidden_layers + (not config.tie_word_embeddings)

    def names(parts: tuple[Part, ...]) -> tuple[str, ...]:
        return tuple(part.name for part in parts)

    for key, pieces_of in products.items():
        linear = LinearNames(names(pieces_of), names(weight_map.get(f"{key}.bias", ())))
        whole = load_linear(source, linear, OPTIONS)
        x = torch.randn(3, whole.in_features, generator=torch.Generator().manual_seed(1))
        axis = pieces_of[0].split
        assert axis in (0, 1)
        shards = [load_linear(split(source, rank, RANKS), linear, OPTIONS) for rank in range(RANKS)]
        assert sum(shard.shape[axis] for shard in shards) == whole.shape[axis]
        assert max(shard.shape[axis] for shard in shards) <= -(-whole.shape[axis] // RANKS)
        expected = product(whole, x)
        if axis == 1:
            columns = x.chunk(RANKS, dim=1)
            actual = sum(product(shard, part.contiguous()) for shard, part in zip(shards, columns, strict=True))
        else:  # each fused part is dealt out by itself: a shard of QKV is whole heads of queries, keys and values
            sizes = [[part.shape[0] * end // RANKS for part in pieces_of] for end in range(RANKS + 1)]
            dealt = [[b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(sizes)]
            pieces = [product(shard, x).split(size, dim=1) for shard, size in zip(shards, dealt, strict=True)]
            actual = torch.cat([torch.cat(piece, dim=1) for piece in zip(*pieces, strict=True)], dim=1)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_random_shards_are_parts_of_one_weight() -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    whole = torch.empty(RandomWeights("shape:llama-100m").tensors[name].shape)
    RandomWeights("shape:llama-100m").read(name, whole)
    part = torch.empty(whole.shape[0], whole.shape[1] // 2)
    RandomWeights("shape:llama-100m").read(name, part, Shard(1, 2, 1))
    assert torch.equal(part, whole[:, whole.shape[1] // 2 :])


LIMIT_SECONDS = 5.0


def settings(count: int, **changes: Any) -> EngineConfig:
    """Return small settings: prompts come in chunks, and pages run out soon."""
    defaults = {
        "max_batch_size": 4,
        "batch_sizes": [4],
        "page_size": 4,
        "max_sequence_length": 64,
        "max_prefill_tokens": 12,
        "dtype": "float32",
        "rank_limit_seconds": LIMIT_SECONDS,
    }
    return EngineConfig.of(None, tensor_parallel_size=count, **(defaults | changes))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Leader]:
    """Processes that load one model after the other; steps take prompts along if this process asks for it, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        leader = start_ranks(2, "cpu", "auto", LIMIT_SECONDS, "mixing_rank")
    yield leader
    leader.close()


def sampled(seed: int, length: int, **fields: Any) -> Request:
    """Return a request of a prompt whose first tokens others have, too."""
    params = SamplingParams(**{"temperature": 0.8, "seed": seed, "max_tokens": 12, "ignore_eos": True} | fields)
    return Request([5, 6, 7, 8, 9, 10, 11, 12, *range(20 + seed, 20 + seed + length)], params)


def answers(engine: Engine, requests: list[Request]) -> list[tuple[list[int], list[int], list[int]]]:
    """Return each request's tokens, the most likely ones beside them, and those of its prompt."""
    answers_by_id = {engine.add(request): ([], [], []) for request in requests}
    while engine.has_work:
        for event in engine.step():
            tokens, tops, prompt = answers_by_id[event.request_id]
            tokens += event.token_ids
            tops += [entry.top[0][0] for entry in event.logprobs or () if entry.top]
            prompt += [entry.top[0][0] for entry in event.prompt_logprobs or () if entry and entry.top]
    return list(answers_by_id.values())


def same_on_one_and_on_two(
    folder: Path,
    ranks: Leader,
    requests: list[Request],
    prepare: Callable[[Engine], None] = lambda _: None,
    **wish: Any,
) -> Engine:
    """Compare the answers; return the engine of two ranks, closed."""
    alone = load_engine(folder, settings(1, **wish))
    prepare(alone)
    expected = answers(alone, requests)
    alone.close()
    shared = load_engine(folder, settings(2, **wish), ranks=ranks)
    prepare(shared)
    assert answers(shared, requests) == expected
    shared.close()
    return shared


@pytest.mark.parametrize("name", ["llama-biases", "qwen3-tied", "phi3", "qwen2-moe", "gpt-oss", "gemma3-cap", "olmo2"])
def test_two_ranks_give_the_tokens_of_one(checkpoint: Callable[[str], Path], ranks: Leader, name: str) -> None:
    requests = [sampled(0, 1, temperature=0.0), sampled(1, 20), sampled(2, 6, temperature=0.0)]
    same_on_one_and_on_two(checkpoint(name), ranks, requests)


@pytest.mark.parametrize("name", [*RECURRENT, *NEWEST])
def test_two_ranks_give_the_tokens_of_transformers(checkpoint, monkeypatch, ranks, name):
    """Nine prompts in one batch and alone, in chunks of 7, which steps take along, until pages run out."""
    monkeypatch.setattr(step_module, "CACHED_BYTES", 0)
    sizes = {"max_batch_size": 9, "batch_sizes": [1, 4, 9], "max_sequence_length": 160, "page_size": 8}
    engine = load_engine(checkpoint(name), settings(2, max_prefill_tokens=7, total_num_pages=60, **sizes), ranks=ranks)
    requests = [Request(prompt, PARAMS) for prompt in prompts()]
    results = answers(engine, requests)
    assert engine.stats.batch_sizes[9] > 0
    assert engine.stats.mixed_steps > 0
    assert engine.num_preemptions > 0
    engine.runner.cache.reset()  # of prefixes
    results += [answers(engine, [request])[0] for request in requests]
    engine.close()
    for prompt, (tokens, _, _) in zip(2 * prompts(), results, strict=True):
        assert len(tokens) == PARAMS.max_tokens
        assert_greedy(reference(checkpoint(name)), prompt, tokens)


@pytest.mark.parametrize(("name", "gate_up", "down"), [("mixtral", "Q4_0", "Q8_0"), ("gpt-oss", "MXFP4", "MXFP4")])
def test_experts_in_blocks_are_dealt_out_and_give_the_tokens_of_one(tmp_path, monkeypatch, ranks, name, gate_up, down):
    architecture, kind, changes = ARCHITECTURES[name]
    monkeypatch.setitem(ARCHITECTURES, name, (architecture, kind, changes | {"intermediate_size": 128}))
    types = {"gate_exps.weight": gate_up, "up_exps.weight": gate_up, "down_exps.weight": down}
    file = quantized_file(tmp_path / "model.gguf", name, types)
    requests = [sampled(0, 1, temperature=0.0), sampled(1, 20), sampled(2, 6, temperature=0.0)]
    engine = same_on_one_and_on_two(file, ranks, requests, quantize="gguf")
    whole = load_model(file, device="cpu", dtype="float32", quantize="gguf")
    for half_layer, layer in zip(engine.runner.model.layers, whole.layers, strict=True):
        for product_name in ("gate_up", "down"):
            half, all_of_it = getattr(half_layer.mlp.experts, product_name), getattr(layer.mlp.experts, product_name)
            assert isinstance(half, ExpertPanels)
            sizes = [
                sum(part.nbytes for part in form.weight._replace(table=None) if isinstance(part, torch.Tensor))
                for form in (half, all_of_it)
            ]
            assert 2 * sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("name", "wish"), [("llama-3", {}), ("qwen3.5", {"state_checkpoints": 3, "state_checkpoint_tokens": 4})]
)
def test_preemption_shared_prefixes_and_launches_ahead_change_no_token(checkpoint, ranks, name, wish):
    def look_ahead(engine: Engine) -> None:
        engine.loop.lookahead = 1

    requests = [sampled(seed, 3 * seed, max_tokens=20) for seed in range(7)]
    engine = same_on_one_and_on_two(
        checkpoint(name), ranks, requests, look_ahead, total_num_pages=20, batch_sizes=[1, 2, 4], **wish
    )
    assert engine.num_preemptions > 0
    assert engine.stats.prefilled_tokens > 0


def test_logprobs_penalties_and_biases_are_those_of_one(checkpoint: Callable[[str], Path], ranks: Leader) -> None:
    requests = [
        sampled(0, 2, logprobs=2, repetition_penalty=1.3, presence_penalty=0.5),
        sampled(1, 9, prompt_logprobs=2, max_tokens=3),
        sampled(2, 1, logit_bias={7: 4.0, 9: -4.0}, frequency_penalty=0.4),
        sampled(3, 1, allowed_token_ids=[3, 5, 8, 13], logprobs=1),
    ]
    same_on_one_and_on_two(checkpoint("llama-3"), ranks, requests, capture_when="first-use")


@pytest.mark.parametrize(
    ("name", "wish"), [("qwen3", {}), ("falcon-h1", {"speculation": "ngram", "num_tokens": 3, "ngram_min": 1})]
)
def test_several_steps_a_launch_and_batch_invariance_hold_too(checkpoint, ranks, name, wish):
    requests = [sampled(seed, 5 + seed) for seed in range(3)]
    same_on_one_and_on_two(checkpoint(name), ranks, requests, steps_per_launch=4, batch_invariant=True, **wish)


def test_a_rank_that_stalls_is_named_within_the_limit(checkpoint: Callable[[str], Path], ranks: Leader) -> None:
    engine = load_engine(checkpoint("llama-3"), settings(2), ranks=ranks)
    (pid,) = ranks.pids
    engine.add(sampled(0, 3, max_tokens=50))
    engine.step()
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 (has stalled|did not reach)"):
        answers(engine, [])
    assert time.monotonic() - began < 60 < LIMIT_SECONDS * 50
    with pytest.raises(RankError, match="rank 1 of 2"):
        answers(engine, [sampled(1, 3)])
    ranks.close()
    assert not Path(f"/proc/{pid}").exists()


def test_the_library_starts_ranks_holds_answers_to_forms_and_names_the_dead() -> None:
    choice = StructuredOutputsParams(choice=["yes", "no", "perhaps"])
    schema = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}})
    wishes = [
        SamplingParams(temperature=0.9, seed=1, max_tokens=20, structured_outputs=choice),
        SamplingParams(temperature=0.9, seed=2, max_tokens=20, structured_outputs=schema),
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    ]
    texts = []
    options = {"max_batch_size": 4, "batch_sizes": [4], "max_sequence_length": 64, "speculation": "ngram"}
    for count in (1, 2):
        llm = LLM("demo", tensor_parallel_size=count, dtype="float32", **options)
        texts.append([output.outputs[0].token_ids for output in llm.generate(["rev abcabc="] * 3, wishes)])
        if count == 1:
            llm.close()
    assert texts[0] == texts[1]
    (pid,) = llm.engine.runner.ranks.pids
    pieces = llm.stream("sort hello=", SamplingParams(max_tokens=40, ignore_eos=True))
    next(pieces)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 1 of 2 was ended by SIGKILL"):
        list(pieces)
    llm.close()
    assert not Path(f"/proc/{pid}").exists()
