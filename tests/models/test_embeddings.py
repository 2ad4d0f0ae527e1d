"""Embeddings are transformers' hidden states behind the final norm, pooled, however prompts are cut and batched."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from demo_copies import demo_copy
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3Model

from graphdecode import LLM, PoolingParams

CHUNK, PAGE = 16, 8
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 45)
FAMILIES = {  # name -> pooling; both of those with windows and with recurrent states
    "mistral-window": ("last", "mean"),
    "qwen3-tied": ("last",),
    "gemma3-cap": ("mean",),
    "granite": ("last",),  # whose logits are scaled
    "deepseek-v3": ("last",),
    "lfm2": ("mean",),
    "falcon-h1": ("last", "mean"),
}
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_batch_size": 4,
    "max_sequence_length": 64,
    "page_size": PAGE,
    "max_prefill_tokens": CHUNK,
}
RAW = PoolingParams(use_activation=False)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]


@cache
def hidden_states(folder: Path) -> list[np.ndarray]:
    """The prompts' hidden states by transformers, float64 [t, hidden] each."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    with torch.no_grad():
        return [model.base_model(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in prompts()]


def pooled(folder: Path, pooling: str) -> list[np.ndarray]:
    return [states[-1] if pooling == "last" else states.mean(0) for states in hidden_states(folder)]


def embedded(llm: LLM, *args: Any, **keywords: Any) -> list[np.ndarray]:
    return [np.array(output.outputs.embedding) for output in llm.embed(*args, use_tqdm=False, **keywords)]


@pytest.mark.parametrize(
    ("name", "pooling", "options"),
    [
        *((name, pooling, {}) for name, poolings in FAMILIES.items() for pooling in poolings),
        ("mistral-window", "mean", {"total_num_pages": 8}),  # which all prompts together do not have
        ("qwen3-tied", "mean", {"model_impl": "transformers"}),
        ("qwen3-tied", "last", {"batch_invariant": True}),
    ],
)
def test_embeddings_are_those_of_transformers(checkpoint, name, pooling, options):
    expected = pooled(checkpoint(name), pooling)
    with LLM(checkpoint(name), pooling=pooling, **SIZES, **options) as llm:
        found = embedded(llm, prompts(), pooling_params=RAW)
        again = embedded(llm, prompts(), pooling_params=RAW)  # with cached prefixes, and captured graphs
        runs = [bucket.replays for bucket in llm.graphs.report("pooled").buckets]
        assert sum(runs) > 0 or "batch_invariant" in options
        unit = embedded(llm, prompts()[-1])[0]
    for one, two, vector in zip(found, again, expected, strict=True):
        scale = np.abs(vector).max()
        np.testing.assert_allclose(one, vector, rtol=0, atol=1e-4 * scale)
        np.testing.assert_allclose(two, vector, rtol=0, atol=1e-4 * scale)
    np.testing.assert_allclose(unit, expected[-1] / np.linalg.norm(expected[-1]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("ties", [True, False])
def test_a_checkpoint_for_embeddings_needs_no_output_layer(tmp_path: Path, ties: bool) -> None:
    """As Qwen3-Embedding's: tensors of the body alone, without its prefix, and a tokenizer that appends a token."""
    sizes = {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    torch.manual_seed(3)
    model = Qwen3Model(Qwen3Config(**sizes, **heads, tie_word_embeddings=ties)).eval()
    folder = demo_copy(tmp_path / "model")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    model.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(settings))
    modules = [
        {"path": "", "type": "a.Transformer"},
        {"path": "1_Pooling", "type": "a.Pooling"},
        {"type": "a.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [257], "tokens": ["<|endoftext|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with LLM(folder, **SIZES) as llm:
        (output,) = llm.embed("abc", use_tqdm=False)
        (cut,) = llm.embed("abcdef", truncate_prompt_tokens=4, use_tqdm=False)
    assert output.prompt_token_ids == cut.prompt_token_ids == [97, 98, 99, 257]
    with torch.no_grad():
        expected = model.double()(torch.tensor([output.prompt_token_ids])).last_hidden_state[0, -1].numpy()
    np.testing.assert_allclose(output.outputs.embedding, expected / np.linalg.norm(expected), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(cut.outputs.embedding, output.outputs.embedding)
