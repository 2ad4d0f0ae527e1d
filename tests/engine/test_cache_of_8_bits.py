"""A cache of 8 bits: reachable by its name, twice the room, and answers that are the same in any company."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.cache import PagedKVCache
from graphdecode.engine.capacity import plan_capacity, resolve_cache_dtype
from graphdecode.engine.loading import make_runner
from graphdecode.kernels.cache.kv_format import KV_FORMATS, decoded, encoded
from graphdecode.kernels.native import library as native
from graphdecode.linear.weight_form import Stored
from graphdecode.models import load_model, resolve_model_path
from graphdecode.models.load import read_cache_scales
from graphdecode.models.weight_map import CheckpointError

PROMPTS = {"417+385=": "802", "12+30=": "42", "999+1=": "1000", "rev oceanic=": "cinaeco"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def answers(llm, prompts=tuple(PROMPTS)):
    return [output.outputs[0].text.strip() for output in llm.generate(list(prompts), GREEDY)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("backend", ["recorded", "eager"])
def test_answers_are_right_over_keys_of_eight_bits(backend, kind, dtype):
    with LLM("demo", kv_cache_dtype=kind, max_batch_size=3, backend=backend, dtype=dtype) as llm:
        assert llm.engine.runner.cache.layers[0].keys.dtype == DTYPES[kind]
        given = [answers(llm, [prompt])[0] for prompt in PROMPTS]
        assert given == list(PROMPTS.values())
        assert answers(llm) == given  # now with prefixes of the cache, and neighbours


@pytest.mark.parametrize("kind", DTYPES)
def test_preemption_and_drafts_change_no_answer(kind):
    tight = {"page_size": 4, "total_num_pages": 9, "max_batch_size": 3, "max_sequence_length": 32}
    with LLM("demo", kv_cache_dtype=kind, dtype="float32", **tight) as llm:
        assert answers(llm) == list(PROMPTS.values())
    with LLM("demo", kv_cache_dtype=kind, dtype="float32", max_batch_size=3, speculation="ngram") as llm:
        assert answers(llm) == list(PROMPTS.values())


@pytest.mark.skipif(native.library() is None, reason=f"no compiled kernels: {native.why_not()}")
@pytest.mark.parametrize("kind", DTYPES)
def test_law_9_a_request_has_the_same_bits_alone_and_in_company(kind):
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)
    with LLM("demo", kv_cache_dtype=kind, batch_invariant=True, max_batch_size=4, dtype="bfloat16") as llm:
        alone = [llm.generate([prompt], params)[0].outputs[0] for prompt in PROMPTS]
        together = [output.outputs[0] for output in llm.generate(list(PROMPTS), params)]
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert one.cumulative_logprob == other.cumulative_logprob


def test_the_same_memory_has_room_for_twice_as_many_tokens():
    model = load_model("demo", device="cpu", dtype="bfloat16")
    config = BucketConfig(max_batch_size=2)
    own, fp8, int8 = (make_runner(model, config, kv_cache_dtype=name) for name in ("auto", "fp8_e4m3", "int8"))
    of_layers = [runner.cache.layers[0] for runner in (own, fp8, int8)]
    assert len({layer.keys.shape for layer in of_layers}) == 1
    assert of_layers[0].nbytes == 2 * of_layers[1].nbytes
    head_dim = model.config.head_dim
    assert of_layers[2].nbytes * head_dim == of_layers[1].nbytes * (head_dim + 2)  # a scale is in bf16
    for runner in (own, fp8, int8):
        held = sum(layer.nbytes for layer in runner.cache.layers)
        assert held == runner.capacity.page_bytes * (runner.capacity.total_num_pages + 1)
    plans = [
        plan_capacity(config, model.config, resolve_cache_dtype(name, model.dtype), model.device, available_bytes=2**18)
        for name in ("auto", "fp8", "int8")
    ]
    assert plans[1].total_num_pages >= 2 * plans[0].total_num_pages
    assert plans[2].total_num_pages >= 1.8 * plans[0].total_num_pages


def test_a_shared_page_is_copied_with_its_scales():
    cache = PagedKVCache(
        num_layers=1, total_num_pages=6, page_size=4, max_pages_per_row=3, num_kv_heads=2, head_dim=16,
        dtype=torch.int8, device="cpu", prefix_caching=True,
    )  # fmt: skip
    for tensor in cache.layers[0]:
        tensor.view(torch.uint8).random_(0, 120, generator=torch.Generator().manual_seed(0))
    tokens = list(range(9))
    cache.add("first", tokens)
    cache.reserve("first", 8)
    cache.publish("first", 8, tokens)
    assert cache.add("second", tokens) == 8
    shared = cache.pages_of("second")[1]
    cache.truncate("second", 6)
    own = cache.pages_of("second")[1]
    assert own != shared
    for tensor in cache.layers[0]:
        assert torch.equal(tensor[own], tensor[shared])


def test_a_head_is_within_half_a_step_of_its_codes_and_what_is_not_finite_stays_so():
    draw = torch.Generator().manual_seed(1)
    heads = torch.randn(5, 7, 3, 64, generator=draw) * torch.logspace(-6, 4, 3).view(3, 1)
    heads[0, 0, 0] = 0.0
    heads[1, 1, 1, 5], heads[2, 2, 2, 6] = math.inf, math.nan
    codes, scales = encoded(heads)
    widened = decoded(codes, scales.transpose(1, 2))
    bad = ~heads.isfinite().all(-1)
    assert widened[bad].isnan().all()
    largest = heads[~bad].abs().amax(-1, keepdim=True)
    assert ((widened[~bad] - heads[~bad]).abs() <= largest / 127 * 0.51 + 1e-30).all()


class Scales:
    """A source that holds numbers."""

    def __init__(self, values):
        self.values = {name: torch.tensor(value) for name, value in values.items()}
        self.tensors = {name: Stored(tuple(value.shape), "F32") for name, value in self.values.items()}

    def read(self, name, out, shard=None):
        out.copy_(self.values[name])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("k_cache.scale", "v_cache.scale"),
    ],
)
def test_scales_are_found_under_every_writers_names(key, value):
    prefix = "model.layers.1.self_attn."
    found = read_cache_scales(Scales({prefix + key: [0.5, 0.25], prefix + value: 2.0}), 3, 2)
    assert found == [(1.0, 1.0), (0.5, 2.0), (1.0, 1.0)]
    assert read_cache_scales(Scales({prefix + "kv_scale": 0.125}), 2, 2) == [(1.0, 1.0), (0.125, 0.125)]
    with pytest.raises(CheckpointError, match=rf"{prefix}{key} .*must be positive, it is -1"):
        read_cache_scales(Scales({prefix + key: -1.0, prefix + value: 2.0}), 2, 2)
    with pytest.raises(CheckpointError, match=rf"{prefix}{key} is \[7\] .*each of 2 heads"):
        read_cache_scales(Scales({prefix + key: [0.5] * 7, prefix + value: 2.0}), 2, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoints_scales_divide_what_fp8_holds(tmp_path, dtype):
    shutil.copytree(resolve_model_path("demo"), tmp_path / "scaled")
    file = tmp_path / "scaled" / "model.safetensors"
    layers = json.loads((tmp_path / "scaled" / "config.json").read_text())["num_hidden_layers"]
    scales = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(value)
        for layer in range(layers)
        for name, value in (("k_scale", 0.0625), ("v_scale", 0.03))
    }
    save_file(load_file(file) | scales, file)
    held = {}
    for model in ("demo", tmp_path / "scaled"):
        with LLM(model, kv_cache_dtype="fp8", max_batch_size=4, dtype=dtype) as llm:
            assert answers(llm) == list(PROMPTS.values())
            layer = llm.engine.runner.cache.layers[0]
            held[str(model)] = layer.keys.float(), layer.scales
    (plain, _), (scaled, of_layer) = held.values()
    assert (of_layer.key, of_layer.value) == pytest.approx((0.0625, 0.03))
    assert scaled.abs().max() > 8 * plain.abs().max()
    with LLM(tmp_path / "scaled", max_batch_size=4, dtype=dtype) as llm:  # a wider cache has no need of them
        assert answers(llm) == list(PROMPTS.values())


def test_another_type_is_a_record(monkeypatch):
    """Floats with two bits of fraction, by the name of those with three: no other file of Python tells them apart."""
    others = KV_FORMATS[torch.float8_e5m2]._replace(names=("fp8",), has_layer_scales=True)
    monkeypatch.setitem(KV_FORMATS, torch.float8_e5m2, others)
    monkeypatch.setitem(KV_FORMATS, torch.float8_e4m3fn, KV_FORMATS[torch.float8_e4m3fn]._replace(names=()))
    assert resolve_cache_dtype("fp8", torch.bfloat16) == torch.float8_e5m2
    with LLM("demo", kv_cache_dtype="fp8", max_batch_size=3, dtype="float32") as llm:
        assert llm.engine.runner.cache.layers[0].keys.dtype == torch.float8_e5m2
        assert answers(llm) == list(PROMPTS.values())
