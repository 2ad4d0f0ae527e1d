"""Architectures without a family here, run as transformers' own modules: its tokens, captured like any step."""

import json
import random
import re
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from driven_decoder import DrivenDecoder
from greedy_tokens import assert_prompt_logprobs, greedy_tokens, reference_tokens
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    GPTJConfig,
    GptOssConfig,
    LlamaConfig,
    MllamaConfig,
    OlmoeConfig,
    Qwen2AudioConfig,
    Qwen2Config,
    Qwen3VLMoeConfig,
    T5Config,
    ViTConfig,
)

from adopted_models import ADOPTED, TINY, save_random
from graphdecode import LLM, BucketConfig, CaptureError, EngineConfig, SamplingParams
from graphdecode.engine.capacity import plan_capacity
from graphdecode.errors import ArgumentError
from graphdecode.models import (
    CheckpointError,
    Decoder,
    UnsupportedModelError,
    check_model,
    describe_model,
    load_model,
    num_parameters,
)
from graphdecode.models.transformers_backend import ModuleDecoder

ROWS, BUCKETS = 3, (1, 3)
NEW_TOKENS = 20
SHARED = 16  # tokens with which two prompts begin
PROMPT_LENGTHS = (1, 20, 17, 41, 30)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.fixture(scope="module")
def adopted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of an architecture's checkpoint, written at its first use."""
    return cache(lambda name: save_random(ADOPTED[name](TINY), tmp_path_factory.mktemp(name)))


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    texts = [[rng.randrange(256) for _ in range(length)] for length in PROMPT_LENGTHS]
    texts[4][:SHARED] = texts[3][:SHARED]
    return texts


def answers_of_transformers(folder: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [reference_tokens(model, prompt, NEW_TOKENS) for prompt in prompts()]


def tokens_of(llm: LLM) -> list[list[int]]:
    return greedy_tokens(llm, prompts(), NEW_TOKENS)


@pytest.mark.parametrize("name", ADOPTED)
def test_greedy_tokens_are_those_of_generate(adopted: Callable[[str], Path], name: str) -> None:
    """In chunks of 32 tokens, with a prefix that is shared, and with too few pages for all rows at once."""
    expected = answers_of_transformers(adopted(name))
    assert len({token for answer in expected for token in answer}) > NEW_TOKENS, "it does not always say the same"
    config = BucketConfig(max_batch_size=4, max_sequence_length=96, page_size=8, total_num_pages=12)
    with LLM(adopted(name), config=config, dtype="float32", max_prefill_tokens=32) as llm:
        assert isinstance(llm.model, ModuleDecoder)
        assert tokens_of(llm) == expected
        assert llm.num_preemptions > 0
        assert llm.graphs.backend in ("recorded", "cuda")
        again = llm.generate(prompts()[4], SamplingParams(max_tokens=1), use_tqdm=False)[0]
        assert again.metrics.num_cached_tokens >= SHARED, "the prefix is found"


@pytest.fixture(params=ADOPTED)
def driven(request: pytest.FixtureRequest, adopted: Callable[[str], Path], device: str) -> DrivenDecoder:
    """Rows of mixed lengths in the middle of their answers."""
    model = load_model(adopted(request.param), device=device, dtype="float32", batch_sizes=BUCKETS)
    driven = DrivenDecoder(model, ROWS, max_length=48)
    driven.prefill([[(7 * i + row) % 256 for i in range(length)] for row, length in enumerate((3, 30, 8))], [0] * ROWS)
    return driven


def test_laws_2_4_and_5_hold_for_a_module_that_was_not_written_for_graphs(driven: DrivenDecoder) -> None:
    driven.assert_captured(BUCKETS, (3, 30, 8))


def test_a_step_reads_all_weights_but_the_tables(adopted: Callable[[str], Path]) -> None:
    model = load_model(adopted("stablelm"), device="cpu", dtype="float32")
    config = describe_model(adopted("stablelm"))
    table = config.vocab_size * TINY.hidden_size * 4
    # panels of a product are padded to whole panels
    assert 0 <= model.weight_bytes - (4 * num_parameters(config) - table) < 0.2 * model.weight_bytes
    assert {"q_proj 64x64", "gate_proj 96x64", "lm_head 259x64"} <= model.linear_choices(1).keys()


def test_a_cache_is_planned_before_any_weight_is_read(adopted: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(adopted("cohere") / "config.json", tmp_path)  # and nothing else
    config = describe_model(tmp_path)
    settings = EngineConfig(BucketConfig(max_batch_size=1))
    capacity = plan_capacity(settings, config, torch.float32, torch.device("cpu"), available_bytes=2**30)
    assert capacity.max_sequence_length == TINY.max_position_embeddings
    assert capacity.token_bytes == 2 * TINY.num_hidden_layers * TINY.hidden_size // 2 * 4
    stored = load_file(adopted("cohere") / "model.safetensors").values()
    assert 4 * num_parameters(config) == sum(tensor.nbytes for tensor in stored)


def test_8_bit_weights_serve_a_module_too(adopted: Callable[[str], Path]) -> None:
    plain, rounded = (load_model(adopted("opt"), device="cpu", quantize=form) for form in (None, "int8"))
    assert rounded.weight_bytes < 0.5 * plain.weight_bytes


def test_what_reads_on_the_host_is_refused_with_file_and_line_and_runs_eagerly(tmp_path: Path) -> None:
    folder = save_random(LlamaConfig(**TINY.grouped(), rope_parameters=DYNAMIC), tmp_path)
    settings: dict[str, Any] = {"dtype": "float32", "max_batch_size": 2, "model_impl": "transformers"}
    with pytest.raises(CaptureError) as caught:
        LLM(folder, **settings)
    message = r"(?s)modeling_rope_utils\.py:\d+: Tensor\.__bool__.*can still be run without graphs: backend='eager'"
    assert re.search(message, str(caught.value)), caught.value
    with LLM(folder, backend="eager", **settings) as llm:
        assert tokens_of(llm) == answers_of_transformers(folder)


def test_a_familys_model_runs_either_way(tmp_path: Path) -> None:
    folder = save_random(LlamaConfig(**TINY.grouped()), tmp_path)
    tokens = {}
    for impl in ("auto", "transformers"):
        with LLM(folder, dtype="float32", max_batch_size=4, model_impl=impl) as llm:
            tokens[type(llm.model)] = tokens_of(llm)
    assert tokens.keys() == {Decoder, ModuleDecoder}
    assert tokens[Decoder] == tokens[ModuleDecoder]
    described = [describe_model(folder, model_impl=impl) for impl in ("native", "transformers")]
    for name in ("architecture", "vocab_size", "num_key_value_heads", "head_dim", "max_position_embeddings", "dtype"):
        assert getattr(described[0], name) == getattr(described[1], name)
    assert num_parameters(described[0]) == num_parameters(described[1])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (GPTJConfig(vocab_size=259, n_embd=64, n_layer=1, n_head=4, rotary_dim=8), "AttentionInterface"),
        (BloomConfig(vocab_size=259, hidden_size=64, n_layer=1, n_head=4), "position_ids"),
        (BartConfig(vocab_size=259, d_model=64, encoder_layers=1, decoder_layers=1), "position_ids"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_needs_another_cache_is_refused_before_its_weights_are_read(
    tmp_path: Path, config: Any, says: str
) -> None:
    with torch.device("meta"):
        architecture = type(AutoModelForCausalLM.from_config(config)).__name__
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"{architecture} .*{says}"):
        describe_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "architecture", "says"),
    [
        (Qwen3VLMoeConfig(), "Qwen3VLMoeForConditionalGeneration", "images"),
        (MllamaConfig(), "MllamaForConditionalGeneration", "images"),
        (BertConfig(), "BertForMaskedLM", "encoder"),
        (BertConfig(), "BertLMHeadModel", "encoder"),
        (Qwen2AudioConfig(), "Qwen2AudioForConditionalGeneration", "sound"),
        (ViTConfig(), "ViTForImageClassification", "only causal decoders"),
        (Qwen2Config(), "Qwen2Model", "Qwen2ForCausalLM"),
        (T5Config(), "T5ForConditionalGeneration", "encoder and a decoder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_causal_decoder_of_text_is_refused_with_the_reason(tmp_path, config, architecture, says):
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"{architecture}.* {says}"):
        describe_model(tmp_path)


def test_missing_weights_are_named_and_pickles_never_read(adopted: Callable[[str], Path], tmp_path: Path) -> None:
    for file in adopted("opt").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "layers.1.fc1" in name)
    save_file(
        {n: t for n, t in weights.items() if n != name} | {"more": weights[name].clone()},
        tmp_path / "model.safetensors",
    )
    check_model(tmp_path)
    with pytest.raises(CheckpointError, match=r"missing: .*layers\.1\.fc1"):
        load_model(tmp_path, device="cpu")
    save_file({n: t for n, t in weights.items() if n != name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="numbers"):
        check_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="is a pickle"):
        load_model(tmp_path, device="cpu")


def test_code_of_a_checkpoint_runs_by_permission_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = save_random(LlamaConfig(**TINY.grouped()), tmp_path / "model")
    ran = tmp_path / "ran"
    (folder / "odd.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OddConfig(LlamaConfig):\n    model_type = 'odd'\n"
        "class OddModel(LlamaForCausalLM):\n    config_class = OddConfig\n"
    )
    config = LlamaConfig(**TINY.grouped()).to_dict() | {
        "model_type": "odd",
        "architectures": ["OddModel"],
        "auto_map": {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="trust_remote_code"):
        describe_model(folder)
    assert not ran.exists()
    with LLM(folder, dtype="float32", max_batch_size=4, trust_remote_code=True) as llm:
        answers = tokens_of(llm)
    assert ran.exists()
    assert len(answers) == len(prompts())


def test_who_runs_a_model_can_be_said(adopted: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="is not supported; supported are"):
        describe_model(adopted("gpt2"), model_impl="native")
    with pytest.raises(ArgumentError, match="runs checkpoint folders"):
        describe_model("shape:llama-100m", model_impl="transformers")
    with pytest.raises(ArgumentError, match="model_impl must be one of auto, native, transformers"):
        describe_model(adopted("gpt2"), model_impl="vllm")
    with pytest.raises(ArgumentError, match="batch_invariant=True needs operators of ours alone"):
        load_model(adopted("gpt2"), device="cpu", batch_invariant=True)


@pytest.mark.parametrize("name", ["cohere", "opt", "gpt2", "gemma3n"])
def test_log_probabilities_of_prompts_are_those_of_the_module(adopted: Callable[[str], Path], name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(adopted(name), dtype=torch.float32).eval()
    with LLM(adopted(name), dtype="float32", max_batch_size=2, max_prefill_tokens=16) as llm:
        assert_prompt_logprobs(llm, model, prompts()[3])


EXPERTS = {
    "grouped experts": OlmoeConfig(**TINY.grouped(num_experts=4, num_experts_per_tok=2)),
    "sinks": GptOssConfig(**TINY.windowed(head_dim=16, num_local_experts=4, num_experts_per_tok=2)),
    "values smaller than keys": DeepseekV3Config(
        **TINY.fields(kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16),
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_what_a_module_does_on_the_device_is_captured(tmp_path: Path, name: str) -> None:
    folder = save_random(EXPERTS[name], tmp_path)
    with LLM(folder, dtype="float32", max_batch_size=4, model_impl="transformers") as llm:
        assert llm.graphs.backend in ("recorded", "cuda")
        assert tokens_of(llm) == answers_of_transformers(folder)
