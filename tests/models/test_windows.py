"""Layers with a window take memory for it alone, and a request's answer has the bits that full pages give it."""

import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_kernels import compiled_or_gpu
from known_models import KNOWN_MODELS, sizes
from test_against_transformers import assert_greedy
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from graphdecode import LLM, BucketConfig, Engine, EngineConfig, Request, SamplingParams
from graphdecode.cli.app import app
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.capacity import plan_capacity
from graphdecode.engine.steps import step as step_module
from graphdecode.models import load_model
from graphdecode.models.family import config_of

LENGTH = 256
SMALL = {"max_sequence_length": LENGTH, "page_size": 4, "max_batch_size": 4, "max_prefill_tokens": 7, "device": "cpu"}
# two kinds of layers, shared keys of two sizes, sinks, chunks, one kind, 12 keys
WINDOWED = ["gemma3", "gemma4-inputs", "gpt-oss", "llama4", "mistral-window", "qwen2-window"]
Answer = tuple[list[int], list[Any]]


def requests(seed: int, count: int) -> list[Request]:
    """Prompts shorter and longer than a window, many of them going on from an earlier one."""
    rng = random.Random(seed)
    made_requests: list[Request] = []
    for index in range(count):
        text = [rng.randrange(256) for _ in range(rng.choice([1, 2, 7, 19, 20, 21, 40, 90]))]
        before = rng.choice(made_requests).prompt_token_ids if made_requests and rng.random() < 0.5 else []
        prompt = [*before, *text][:140]
        if rng.random() < 0.3:
            prompt = [text[0], text[-1]] * 12  # which drafts are found in
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8]), seed=index, max_tokens=rng.choice([3, 30, 90]), logprobs=1,
            ignore_eos=True, prompt_logprobs=rng.choice([None, None, None, 0]),
        )  # fmt: skip
        made_requests.append(Request(prompt, params))
    return made_requests


def answers(engine: Engine, batch: Sequence[Request], rng: random.Random | None = None) -> tuple[list[Answer], int]:
    """Answer requests at once or as they come, among some that are given up; return how many found a prefix, too."""
    waiting, strangers, reused = list(enumerate(batch)), [], set()
    answers_by_index: dict[int, Answer] = {}
    index_of: dict[int, int] = {}
    while waiting or engine.has_work:
        while waiting and (rng is None or rng.random() < 0.2):
            index, request = waiting.pop(0)
            index_of[engine.add(request)], answers_by_index[index] = index, ([], [])
        if rng is not None and rng.random() < 0.05:
            strangers.append(engine.add(Request([97, 98] * 20, SamplingParams(max_tokens=60, ignore_eos=True))))
        if rng is not None and strangers and rng.random() < 0.05:
            engine.abort(strangers.pop())
        for event in engine.step():
            assert event.error is None
            if event.metrics.num_cached_tokens:
                reused.add(event.request_id)
            if event.request_id in index_of:
                tokens, logprobs = answers_by_index[index_of[event.request_id]]
                tokens += event.token_ids
                logprobs += [*(event.prompt_logprobs or []), *(event.logprobs or [])]
    return [answers_by_index[index] for index in range(len(batch))], len(reused)


def engine_of(decoder: Any, **settings: Any) -> Engine:
    engine = Engine(make_runner(decoder, EngineConfig.of(None, **{**SMALL, "batch_invariant": True, **settings})))
    engine.graphs.capture(progress=False)
    return engine


@pytest.fixture(scope="module")
def alone(checkpoint: Callable[[str], Path]) -> Callable[[str, str], tuple[Any, list[Request], list[Answer]]]:
    """Return a decoder, requests, and what each gets by itself, of layers that all have full pages."""

    @cache
    def make(name: str, kv_cache_dtype: str) -> Any:
        sizes = {"max_sequence_length": LENGTH, "batch_invariant": True}
        decoder = load_model(checkpoint(name), device="cpu", dtype="float32", **sizes)
        batch, expected = requests(5, 20), []
        settings = {"max_batch_size": 1, "max_prefill_tokens": 512, "prefix_cache": False}
        engine = engine_of(decoder, kv_cache_dtype=kv_cache_dtype, **settings)
        assert engine.cache.rolling is None  # a ring of such passes is no shorter than a row
        for request in batch:
            expected += answers(engine, [request])[0]
        return decoder, batch, expected

    return make


SETTINGS: list[dict[str, Any]] = [
    {},
    {"total_num_pages": 66},
    {"total_num_pages": 66, "prefix_cache": False, "steps_per_launch": 3},
    {"max_prefill_tokens": 33, "steps_per_launch": 5, "batch_sizes": [4]},
    {"speculation": "ngram", "num_tokens": 5, "ngram_min": 1},
    {"speculation": "ngram", "ngram_min": 1, "steps_per_launch": 2, "total_num_pages": 66},
    {"kv_cache_dtype": "int8", "total_num_pages": 66},
    {"kv_cache_dtype": "fp8", "backend": "eager"},
]
PAIRS = [  # of names and settings, each with some of the other; all are slow
    pytest.param(name, settings, id=f"{name}-{settings}", marks=[pytest.mark.slow] if (row + column) % 3 else [])
    for row, name in enumerate(WINDOWED)
    for column, settings in enumerate(SETTINGS)
]


@compiled_or_gpu
@pytest.mark.parametrize(("name", "settings"), PAIRS)
def test_rolling_pages_change_no_bit_of_an_answer(alone: Any, name: str, settings: dict[str, Any]) -> None:
    decoder, batch, expected = alone(name, settings.get("kv_cache_dtype", "auto"))
    engine = engine_of(decoder, **settings)
    assert engine.cache.rolling is not None
    for seed in (None, 1, 2):
        actual, reused = answers(engine, batch, None if seed is None else random.Random(seed))
        wrong = [index for index in range(len(batch)) if actual[index] != expected[index]]
        assert not wrong, (
            name,
            settings,
            seed,
            wrong[0],
            batch[wrong[0]],
            actual[wrong[0]],
            expected[wrong[0]],
        )
        if "speculation" not in settings:  # whose steps may have written past the window of a ring as short as here
            assert (reused > 0) == settings.get("prefix_cache", True)
    assert (engine.num_preemptions > 0) == ("total_num_pages" in settings)
    assert engine.cache.pool.used == 0
    engine.close()


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "olmo3", "phi3", "gemma2"])
def test_tokens_are_those_of_transformers_many_windows_long(checkpoint, monkeypatch, name):
    monkeypatch.setattr(step_module, "CACHED_BYTES", 0)  # so that steps take prompts along
    reference = AutoModelForCausalLM.from_pretrained(
        checkpoint(name), dtype=torch.float32, experts_implementation="eager"
    ).eval()
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (1, 15, 19, 20, 21, 47, 90, 130, 8)]
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, n=2)
    settings = {**SMALL, "total_num_pages": 110}
    with LLM(checkpoint(name), dtype="float32", **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.cache.rolling is not None
        assert llm.num_preemptions > 0
        assert llm.stats.mixed_steps > 0
    for output in outputs:
        for answer in output.outputs:
            assert_greedy(reference, output.prompt_token_ids, answer.token_ids)


def test_padding_and_rows_of_nobody_write_to_no_ring(checkpoint: Callable[[str], Path]) -> None:
    """Law 4, of the second page table."""
    answers_of = []
    for poisons in (False, True):
        with LLM(checkpoint("gemma3"), dtype="float32", **{**SMALL, "batch_sizes": [4]}) as llm:
            engine = llm.engine
            for length in (3, 50, 21):
                engine.add(Request([7] * length, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)))
            tokens: dict[int, list[int]] = {}
            while engine.has_work:
                if poisons:
                    llm.engine.runner.buffers.poison(max(len(engine.scheduler.decoding), 1))
                for event in engine.step():
                    tokens.setdefault(event.request_id, []).extend(event.token_ids)
            answers_of.append(list(tokens.values()))
            ring_pages = {page for row in range(4) for page in llm.cache.rolling.ring(row)}
            for layer in llm.cache.layers:
                used = [page for page in range(layer.keys.shape[0] - 1) if layer.keys[page].any()]
                assert layer.keys.isfinite().all() or poisons
                assert set(used) <= ring_pages or not layer.is_rolling
    assert answers_of[0] == answers_of[1]


def gemma3(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, window: int) -> dict[str, Any]:
    return sizes(
        "Gemma3ForCausalLM", 262144, hidden, intermediate, heads, kv_heads, num_hidden_layers=layers, head_dim=256,
        sliding_window=window, sliding_window_pattern=6, rope_theta=1e6, rope_local_base_freq=1e4,
        query_pre_attn_scalar=256, hidden_activation="gelu_pytorch_tanh",
    )  # fmt: skip


SHAPES = {  # and the share of today's memory that their keys and values may take
    "gpt-oss-20b": (KNOWN_MODELS["gpt-oss-20b"] | {"num_hidden_layers": 24, "layer_types": None}, 0.55),
    "gemma-3-1b": (gemma3(26, 1152, 6912, 4, 1, 512), 0.25),
    "gemma-3-4b": (gemma3(34, 2560, 10240, 8, 4, 1024), 0.25),
    "gemma-3-27b": (gemma3(62, 5376, 21504, 32, 16, 1024), 0.25),
}


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize("name", SHAPES)
def test_keys_and_values_of_32k_tokens_take_a_part_of_what_full_pages_take(name: str, device_type: str) -> None:
    settings, share = SHAPES[name]
    config = BucketConfig(max_batch_size=8, max_sequence_length=32768)
    prefill_tokens = EngineConfig().prefill_tokens(device_type)
    arguments = (EngineConfig(config, prefill_tokens), config_of(settings), torch.bfloat16, torch.device("cpu"))
    full, rolling = (plan_capacity(*arguments, available_bytes=2**45, may_roll=rolls) for rolls in (False, True))
    assert full.rolling is None
    assert full.cache_bytes == (full.total_num_pages + 1) * full.page_bytes
    assert rolling.total_num_pages == full.total_num_pages == 8 * 2048
    assert rolling.token_bytes == full.token_bytes
    assert rolling.cache_bytes <= share * full.cache_bytes, rolling.cache_bytes / full.cache_bytes


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "first_k_dense_replace": 1, "max_position_embeddings": 32768}
V3 = {"qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256, "moe_intermediate_size": 2048}
FLASH = {"qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64, "moe_intermediate_size": 1536}
LATENT_SHAPES = {  # and the share of expanded keys and values that latent keys may take
    "DeepSeek-V3": (sizes("DeepseekV3ForCausalLM", 129280, 7168, 18432, 128, 128, **LATENT, **V3), 0.0141),
    "GLM-4.7-Flash": (sizes("Glm4MoeLiteForCausalLM", 154880, 2048, 10240, 20, 20, **LATENT, **FLASH), 0.0563),
}


@pytest.mark.parametrize("name", LATENT_SHAPES)
def test_latent_keys_take_a_part_of_what_expanded_ones_take(name: str) -> None:
    settings, share = LATENT_SHAPES[name]
    config, settings_of = config_of(settings), partial(EngineConfig, BucketConfig(max_batch_size=8), 512)
    arguments = {"model": config, "dtype": torch.bfloat16, "device": torch.device("cpu"), "available_bytes": 2**40}
    capacity = plan_capacity(settings_of(), **arguments)
    assert capacity.token_bytes == 4 * (512 + 64) * 2  # of four layers
    channels = settings["qk_nope_head_dim"] + 64 + settings["v_head_dim"]
    assert capacity.token_bytes <= share * 4 * config.num_attention_heads * channels * 2
    with pytest.raises(ValueError, match=f"kv_cache_dtype='fp8' cannot be had: {config.architecture} has latent keys"):
        plan_capacity(settings_of(kv_cache_dtype="fp8"), **arguments)


@pytest.mark.parametrize("name", ["gemma3", "gemma4-inputs", "gpt-oss"])
def test_what_is_planned_is_what_is_allocated(checkpoint: Callable[[str], Path], name: str) -> None:
    settings = {"max_batch_size": 8, "max_sequence_length": LENGTH, "page_size": 4, "max_prefill_tokens": 16}
    with LLM(checkpoint(name), dtype="float32", **settings) as llm:
        rolling, capacity = llm.cache.rolling, llm.engine.capacity
        assert sum(layer.nbytes for layer in llm.cache.layers) == capacity.cache_bytes
        assert f"rings of 9 pages in {sum(rolling.layers)} layers" in repr(llm.cache)
        assert rolling.pages == -(-(19 + 16 + 1) // 4)
        full = capacity.token_bytes * 4 * (capacity.total_num_pages + 1)
        windowed = sum(rolling.layers) / len(rolling.layers)
        assert capacity.cache_bytes < full * (1 - windowed + windowed * (rolling.pages + 1) / 64)


def test_the_plan_of_memory_counts_both_kinds_of_layers(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    sizes = "[capacity]\nmax_batch_size = 8\nmax_sequence_length = 256\npage_size = 4\n"
    (tmp_path / "b.toml").write_text(f"{sizes}[scheduling]\nmax_prefill_tokens = 16\n")
    arguments = ["buckets", str(tmp_path / "b.toml"), "--model", str(checkpoint("gemma3")), "--dtype", "float32"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False, env={"COLUMNS": "160"})
    cells = [[cell.strip() for cell in line.split("│")] for line in result.output.splitlines() if line.startswith("│")]
    lines = {line[1]: line for line in cells if len(line) == 5 and "." in line[2]}
    page = 2 * 2 * 256 * 4 * 4  # keys and values, heads, channels, tokens, float32
    assert float(lines["key-value cache"][2]) == pytest.approx((8 * 64 + 1) * page / 2**20, abs=0.06)
    assert float(lines["of windows"][2]) == pytest.approx(2 * (8 * 9 + 1) * page / 2**20, abs=0.06)
    assert "9 pages a row for 2 layers with a window" in lines["of windows"][3]


def test_pages_roll_only_where_that_takes_less_memory(checkpoint: Callable[[str], Path]) -> None:
    model = load_model(checkpoint("gemma3"), device="cpu", dtype="float32", max_sequence_length=LENGTH).config
    settings = EngineConfig(BucketConfig(max_batch_size=4, max_sequence_length=LENGTH, page_size=4), 7)
    sizes = (model, torch.float32, torch.device("cpu"))
    ring = -(-(19 + 7 + 1) // 4)
    for pages, rolls in ((4 * ring, False), (4 * ring + 1, True)):
        capacity = plan_capacity(settings.with_settings(total_num_pages=pages), *sizes)
        assert (capacity.rolling is not None) == rolls
        assert capacity.total_num_pages == pages
    least = 10**9
    for available in range(10_000, 4_000_000, 30_000):  # more memory never gives fewer pages, and all of it suffices
        try:
            capacity, full = (
                plan_capacity(settings, *sizes, available_bytes=available, may_roll=rolls) for rolls in (True, False)
            )
        except ValueError:
            continue
        assert capacity.cache_bytes <= 0.9 * available
        assert capacity.total_num_pages >= full.total_num_pages
        least = min(least, capacity.total_num_pages)
    assert least < 10
