"""`LLM(batch_invariant=True)`: a request's tokens and log-probabilities have the same bits alone and in any company."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compiled_kernels import compiled, compiled_or_gpu
from safetensors.torch import load_file, save_file

from graphdecode import LLM, BucketConfig, EngineConfig, SamplingParams
from graphdecode.cache import PagedKVCache
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.capacity import plan_capacity
from graphdecode.kernels.cache.kv_format import KV_FORMATS, decoded, encoded, format_named
from graphdecode.kernels.native import library as native
from graphdecode.linear.weight_form import Stored
from graphdecode.models import load_model, resolve_model_path
from graphdecode.models.cache_scales import read_cache_scales
from graphdecode.models.weight_map import CheckpointError

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"initializer_range": 0.3}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"sliding_window": 20}),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 20, "initializer_range": 0.3},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {"kv_lora_rank": 64, "q_lora_rank": 48, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
        | {"n_group": 4, "topk_group": 2, "initializer_range": 0.2},
    ),
}
Answer = tuple[list[int], list[dict[int, float]]]


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts about the borders of pages and chunks, some with a common beginning; greedy and sampled."""
    rng = random.Random(5)
    common = [rng.randrange(97, 123) for _ in range(40)]
    found = []
    for index, length in enumerate([1, 2, 15, 16, 17, 31, 40, 47, 5, 33, 1, 60]):
        own = [rng.randrange(97, 123) for _ in range(length)]
        params = SamplingParams(
            temperature=[0.0, 0.9][index % 2],
            top_p=0.95,
            seed=index,
            max_tokens=10 + index,
            logprobs=3,
            ignore_eos=True,
            repetition_penalty=[1.0, 1.3][index % 3 == 0],
        )
        found.append((common + own if index % 3 == 1 else own, params))
    return found


def answers(llm: LLM, given: list[tuple[list[int], SamplingParams]]) -> list[Answer]:
    outputs = llm.generate([prompt for prompt, _ in given], [params for _, params in given], use_tqdm=False)
    return [
        (
            output.outputs[0].token_ids,
            [{token: entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


def make(model: str | Path, dtype: str, quantize: str | None = None, budget: int = 512, **config: Any) -> LLM:
    settings = BucketConfig(**{"max_batch_size": 1, "max_sequence_length": 160, "page_size": 16, **config})
    return LLM(model, config=settings, dtype=dtype, quantize=quantize, batch_invariant=True, max_prefill_tokens=budget)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Small random checkpoints whose products are wide enough for several threads and panels."""
    demo = resolve_model_path("demo")

    def save(name: str) -> Path | str:
        if name == "demo":
            return "demo"
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(3)
        sizes = {"vocab_size": 300, "hidden_size": 192, "intermediate_size": 416, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
        model_name, changes = FAMILIES[name]
        heads |= {"num_key_value_heads": 6} if "kv_lora_rank" in changes else {}
        model_class = getattr(transformers, f"{model_name}ForCausalLM")
        model_class(model_class.config_class(**sizes, **heads, **changes)).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((demo / file).read_bytes())
        return folder

    return save


@compiled_or_gpu
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        *(("demo", "float32"), ("llama", "bfloat16"), ("qwen3", "float32"), ("gemma2", "float16")),
        *(("gpt-oss", "float32"), ("deepseek-v3", "bfloat16")),
    ],
)
def test_a_request_has_the_same_bits_alone_and_in_any_company(folder_of: Any, model: str, dtype: str) -> None:
    folder, given = folder_of(model), requests()
    with make(folder, dtype) as llm:
        expected = [answers(llm, [request])[0] for request in given]
    order = list(range(len(given)))
    random.Random(1).shuffle(order)
    for budget, config in (
        (512, {"max_batch_size": 12}),
        (7, {"max_batch_size": 5, "batch_sizes": [3]}),
        (33, {"max_batch_size": 8, "page_size": 4, "total_num_pages": 45}),
        (512, {"max_batch_size": 4, "steps_per_launch": 3}),
    ):
        with make(folder, dtype, budget=budget, **config) as llm:
            found = answers(llm, [given[index] for index in order])
            for index, answer in zip(order, found, strict=True):
                assert answer == expected[index], (config, index)
            again = answers(llm, given)  # beginnings are shared now
            assert again == expected
            if "total_num_pages" in config:
                assert llm.num_preemptions > 0


@compiled
@pytest.mark.skipif(torch.cuda.is_available(), reason="of products on a CPU")
@pytest.mark.parametrize(
    ("model", "quantize"), [("llama", "int8"), ("llama", "int4"), ("llama", "q8_0"), ("gpt-oss", "q8_0")]
)
def test_quantized_weights_give_the_same_bits_in_any_batch(folder_of: Any, model: str, quantize: str) -> None:
    folder, given = folder_of(model), requests()
    with make(folder, "bfloat16", quantize) as llm:
        expected = [answers(llm, [request])[0] for request in given]
    with make(folder, "bfloat16", quantize, 7, max_batch_size=5, batch_sizes=[3], steps_per_launch=2) as llm:
        assert answers(llm, given) == expected


@compiled_or_gpu
def test_the_number_of_threads_changes_no_bit(folder_of: Any) -> None:
    folder, given = folder_of("llama"), requests()
    found = []
    for count in (1, 3):
        torch.set_num_threads(count)
        with make(folder, "float32", max_batch_size=6) as llm:
            found.append(answers(llm, given))
    assert found[0] == found[1]


def test_unsupported_settings_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda *element: None)
    monkeypatch.setattr(native, "unavailable_reason", lambda: "no compiler")
    with pytest.raises(ValueError, match="no compiler"):
        LLM("demo", device="cpu", batch_invariant=True)


PROMPTS = {"417+385=": "802", "12+30=": "42", "999+1=": "1000", "rev oceanic=": "cinaeco"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def answers_of(llm, prompts=tuple(PROMPTS)):
    return [output.outputs[0].text.strip() for output in llm.generate(list(prompts), GREEDY)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("backend", ["recorded", "eager"])
def test_outputs_with_an_fp8_cache(backend, kind, dtype):
    with LLM("demo", kv_cache_dtype=kind, max_batch_size=3, backend=backend, dtype=dtype) as llm:
        assert llm.engine.runner.cache.layers[0].keys.dtype == DTYPES[kind]
        given = [answers_of(llm, [prompt])[0] for prompt in PROMPTS]
        assert given == list(PROMPTS.values())
        assert answers_of(llm) == given  # now with prefixes of the cache, and neighbours


@pytest.mark.parametrize("kind", DTYPES)
def test_preemption_and_drafts_change_no_output(kind):
    tight = {"page_size": 4, "total_num_pages": 9, "max_batch_size": 3, "max_sequence_length": 32}
    with LLM("demo", kv_cache_dtype=kind, dtype="float32", **tight) as llm:
        assert answers_of(llm) == list(PROMPTS.values())
    with LLM("demo", kv_cache_dtype=kind, dtype="float32", max_batch_size=3, speculation="ngram") as llm:
        assert answers_of(llm) == list(PROMPTS.values())


@compiled
@pytest.mark.parametrize("kind", DTYPES)
def test_law_9_a_request_has_the_same_bits_alone_and_batched(kind):
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
        plan_capacity(
            EngineConfig(config, kv_cache_dtype=name), model.config, model.dtype, model.device, available_bytes=2**18
        )
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
def test_cache_scales_are_read_by_all_known_names(key, value):
    prefix = "model.layers.1.self_attn."
    found = read_cache_scales(Scales({prefix + key: [0.5, 0.25], prefix + value: 2.0}), 3, 2)
    assert found == [(1.0, 1.0), (0.5, 2.0), (1.0, 1.0)]
    assert read_cache_scales(Scales({prefix + "kv_scale": 0.125}), 2, 2) == [(1.0, 1.0), (0.125, 0.125)]
    with pytest.raises(CheckpointError, match=rf"{prefix}{key} .* -1"):
        read_cache_scales(Scales({prefix + key: -1.0, prefix + value: 2.0}), 2, 2)
    with pytest.raises(CheckpointError, match=rf"{prefix}{key} .*\[7\]"):
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
            assert answers_of(llm) == list(PROMPTS.values())
            layer = llm.engine.runner.cache.layers[0]
            held[str(model)] = layer.keys.float(), layer.scales
    (plain, _), (scaled, of_layer) = held.values()
    assert (of_layer.key, of_layer.value) == pytest.approx((0.0625, 0.03))
    assert scaled.abs().max() > 8 * plain.abs().max()
    with LLM(tmp_path / "scaled", max_batch_size=4, dtype=dtype) as llm:  # a wider cache has no need of them
        assert answers_of(llm) == list(PROMPTS.values())


def test_a_new_cache_dtype_is_one_record(monkeypatch):
    """Floats with two bits of fraction, by the name of those with three: no other file of Python tells them apart."""
    others = KV_FORMATS[torch.float8_e5m2]._replace(names=("fp8",), has_layer_scales=True)
    monkeypatch.setitem(KV_FORMATS, torch.float8_e5m2, others)
    monkeypatch.setitem(KV_FORMATS, torch.float8_e4m3fn, KV_FORMATS[torch.float8_e4m3fn]._replace(names=()))
    assert format_named("fp8", torch.bfloat16).dtype == torch.float8_e5m2
    with LLM("demo", kv_cache_dtype="fp8", max_batch_size=3, dtype="float32") as llm:
        assert llm.engine.runner.cache.layers[0].keys.dtype == torch.float8_e5m2
        assert answers_of(llm) == list(PROMPTS.values())
