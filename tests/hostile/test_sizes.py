"""Sizes that no memory holds are refused by name and bytes, before anything is allocated."""

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from graphdecode import LLM, GraphdecodeError
from graphdecode.engine import Engine, capacity, loading
from graphdecode.engine.loading import load_runner
from graphdecode.linear.linear_choice import ChoiceCache
from graphdecode.models import describe_model, resolve_model_path

GIB = 2**30


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"total_num_pages": 2**31 - 1}, r"total_num_pages=2147483647 takes \d+ bytes for keys and values"),
        (
            {"max_batch_size": 65536, "config": {"loop": {"steps_per_launch": 4096}}},
            r"steps_per_launch=4096 takes \d{11,} bytes for tokens of 65536 rows",
        ),
        (
            {"max_batch_size": 4096, "config": {"capacity": {"max_logit_biases": 2**20}}},
            rf"max_logit_biases={2**20} takes {2**20 * 8 * 4096} bytes for biases of 4096 rows",
        ),
        (
            {"max_batch_size": 8192, "config": {"capacity": {"max_bad_words": 65536}}},
            rf"max_bad_words=65536 takes {65536 * 16 * 4 * 8192} bytes for forbidden words of 8192 rows",
        ),
        ({"max_prefill_tokens": 2**31 - 1}, r"max_prefill_tokens=2147483647 takes \d+ bytes for tokens of prompts"),
        (
            {"max_adapters": 1024, "max_adapter_rank": 512},
            r"max_adapters=1024 takes \d{11} bytes for adapters of rank 512",
        ),
    ],
)
def test_what_no_memory_holds_is_refused_by_key_and_bytes(settings, said, monkeypatch):
    monkeypatch.setattr(capacity, "total_bytes", lambda device: 16 * GIB)
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("weights were loaded first"))
    tracemalloc.start()
    try:
        with pytest.raises(GraphdecodeError, match=rf"{said}; all sizes together take \d+, and cpu has {16 * GIB}"):
            LLM("demo", device="cpu", **settings)
        assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    finally:
        tracemalloc.stop()


def test_what_is_there_is_what_the_process_may_use() -> None:
    assert 2**28 < capacity.total_bytes(torch.device("cpu")) < 2**63


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu", 0)])
def test_the_cpu_may_be_numbered(device: Any) -> None:
    with LLM("demo", device=device, max_batch_size=2) as llm:
        assert llm.device == torch.device("cpu")
        assert llm.generate("12+30=", use_tqdm=False)[0].error is None


def test_there_is_no_second_cpu() -> None:
    with pytest.raises(GraphdecodeError, match="device is cpu:1, but there is one CPU"):
        LLM("demo", device="cpu:1")


DEMO = resolve_model_path("demo")
INFINITE = float("inf")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def spoilt(tmp_path: Path, file: str, **changes: Any) -> Path:
    folder = Path(shutil.copytree(DEMO, tmp_path / "model"))
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))
    return folder


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1024, got 1000000000"),
        ({"num_hidden_layers": 10**4000}, "num_hidden_layers must be at most 1024, got 1000"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer >= 1, got True"),
        ({"head_dim": 65536}, "head_dim must be at most 512, got 65536"),
        ({"vocab_size": 2**60}, "vocab_size must be at most"),
        ({"hidden_size": 2**60}, "hidden_size must be at most"),
        ({"intermediate_size": 1e400}, "intermediate_size must be an integer >= 1, got inf"),
        ({"num_attention_heads": 2**40}, "num_attention_heads must be at most 4096"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be an integer >= 1, got 0"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings must be at most 2147483647"),
        ({"hidden_size": 1, "head_dim": None}, "head_dim must be an integer >= 1, got 0"),
        ({"rms_norm_eps": INFINITE}, "rms_norm_eps must be a number > 0, got inf"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number > 0, got nan"),
        ({"rms_norm_eps": [1e-6]}, "rms_norm_eps must be a number > 0, got [1e-06]"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"attention_bias": "false"}, "attention_bias must be true or false, got 'false'"),
        ({"mlp_bias": 1}, "mlp_bias must be true or false, got 1"),
        ({"hidden_act": {"a": 1}}, "hidden_act {'a': 1} is not supported"),
        ({"hidden_act": ["silu"]}, "hidden_act ['silu'] is not supported"),
        ({"dtype": ["float32"]}, "is not supported; supported are float32"),
        ({"eos_token_id": 2**40}, "eos_token_id must be in 0..2147483647, got 1099511627776"),
        ({"eos_token_id": -1}, "eos_token_id must be in 0..2147483647, got -1"),
        ({"eos_token_id": [1, True]}, "eos_token_id must be a token id or a list of them, got [1, True]"),
        ({"eos_token_id": list(range(129))}, "eos_token_id must be at most 128 tokens, got 129"),
        ({"architectures": [["a"]]}, "architecture ['a'] is not supported"),
        ({"architectures": ["\x1b[2J"]}, r"'\x1b[2J' is not supported"),
        ({"quantization_config": {"quant_method": "\ud800"}}, r"quantization_config ('\ud800') is not supported"),
        ({"rope_parameters": {"rope_theta": INFINITE}}, "rope_theta must be a number > 0, got inf"),
        ({"rope_parameters": {"rope_theta": 1}}, "rope_theta must be above 1, got 1"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope type ['yarn'] is not supported"),
        (
            {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}},
            "low_freq_factor 1.0 must be below high_freq_factor",
        ),
        ({"rope_parameters": {**LLAMA3, "factor": 10**400}}, "factor must be a number > 0"),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": 0.5}}, "must be in 1..2147483647, got 0.5"),
        (
            {"rope_parameters": {**YARN, "original_max_position_embeddings": 1e30}},
            "must be in 1..2147483647, got 1e+30",
        ),
        ({"rope_parameters": {**YARN, "beta_fast": 5e-324}}, "beta_fast must be a number > 0, got 5e-324"),
        ({"rope_parameters": {**YARN, "truncate": "no"}}, "truncate must be true or false, got 'no'"),
        ({"rope_scaling": [1]}, "rope_parameters must be one object"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_a_value_that_no_model_has_is_refused_by_file_and_field(tmp_path, changes, said):
    folder = spoilt(tmp_path, "config.json", **changes)
    for use in (describe_model, LLM):
        with pytest.raises(GraphdecodeError) as caught:
            use(folder)
        assert isinstance(caught.value, ValueError)
        assert str(caught.value).startswith(f"{folder / 'config.json'}: ")
        assert said in str(caught.value)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("Qwen2", {"use_sliding_window": "yes"}, "use_sliding_window must be true or false, got 'yes'"),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": "two"}, "max_window_layers must be an integer"),
        ("Qwen2", {"use_sliding_window": True, "layer_types": 7}, "layer_types must name 4 layers"),
        ("Qwen3", {"use_sliding_window": True, "layer_types": [{}] * 4}, "layer_types must name 4 layers"),
        ("Qwen3", {"attention_bias": []}, "attention_bias must be true or false, got []"),
        ("Mistral", {"sliding_window": [4096]}, "sliding_window must be an integer >= 1"),
    ],
)
def test_so_is_what_one_family_alone_reads(tmp_path: Path, family: str, changes: dict[str, Any], said: str) -> None:
    folder = spoilt(tmp_path, "config.json", architectures=[f"{family}ForCausalLM"], **changes)
    with pytest.raises(GraphdecodeError, match=r"config\.json: ") as caught:
        describe_model(folder)
    assert said in str(caught.value)


@pytest.mark.parametrize("content", ["[" * 200_000, '{"a":' * 200_000, '{"vocab_size": ' + "9" * 10_000 + "}"])
def test_a_file_that_no_parser_takes_is_named(tmp_path: Path, content: str) -> None:
    folder = spoilt(tmp_path, "config.json")
    (folder / "config.json").write_text(content)
    with pytest.raises(GraphdecodeError) as caught:
        LLM(folder)
    assert str(caught.value).startswith(str(folder / "config.json"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eos_token_id": -5}, "eos_token_id must be in 0..2147483647, got -5"),
        ({"do_sample": "no"}, "do_sample must be true or false, got 'no'"),
        ({"do_sample": True, "temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"do_sample": True, "top_k": True}, "top_k must be a number, got True"),
        ({"do_sample": True, "temperature": -1.0}, "temperature must be a number >= 0 and at most 1e+30, got -1.0"),
        ({"repetition_penalty": 1e400}, "repetition_penalty must be a number in"),
    ],
)
def test_a_generation_config_that_cannot_be_is_refused_by_file_and_field(tmp_path, changes, said):
    folder = spoilt(tmp_path, "generation_config.json", **changes)
    with pytest.raises(GraphdecodeError) as caught:
        LLM(folder, max_batch_size=1).get_default_sampling_params()
    assert str(caught.value).startswith(f"{folder / 'generation_config.json'}: ")
    assert said in str(caught.value)


def test_an_end_of_sequence_token_beyond_the_vocabulary_ends_nothing_and_breaks_nothing(tmp_path: Path) -> None:
    folder = spoilt(tmp_path, "generation_config.json", eos_token_id=[257, 2**31 - 1])
    with LLM(folder, max_batch_size=2) as llm:
        from graphdecode import SamplingParams

        params = SamplingParams(temperature=0.0, min_tokens=2)
        assert llm.generate("417+385=", params, use_tqdm=False)[0].outputs[0].text.strip() == "802"


def test_a_seed_that_is_no_integer_is_refused() -> None:
    with pytest.raises(GraphdecodeError, match="seed must be an integer"):
        LLM("demo", seed=1.5)  # type: ignore[arg-type]
    with pytest.raises(GraphdecodeError, match=r"seed must be an integer of 64 bits, got 1\.5"):
        Engine(load_runner("demo", max_batch_size=1, device="cpu"), seed=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "[]", "\ud800".encode("utf-8", "replace"), ""])
def test_a_damaged_file_of_choices_costs_a_measurement_and_no_more(tmp_path: Path, content: str | bytes) -> None:
    (tmp_path / "choices.json").write_bytes(content.encode() if isinstance(content, str) else content)
    cache = ChoiceCache(tmp_path)
    assert cache.get("a") is None
    cache.put("a", 5)
    assert ChoiceCache(tmp_path).get("a") == 5
