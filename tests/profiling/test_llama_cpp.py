"""llama.cpp gets the same weights: what is written as GGUF, and that its tokens are the greedy ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from graphdecode.models import describe_model
from peers.contest import PEERS, Reference
from peers.llama_cpp import interleaved, why_not_gguf
from peers.peer import Workload

SMALL: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


def checkpoint(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**SMALL | changes)).save_pretrained(folder)
    return folder


def test_rotary_pairs_become_neighbours() -> None:
    weight = torch.arange(2 * 6.0).view(12, 1)  # two heads of six channels
    assert interleaved(weight, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "default rope"),
        ({"attention_bias": True}, "without biases"),
        ({"mlp_bias": True}, "without biases"),
        ({"hidden_act": "gelu"}, "silu"),
        ({}, ""),
    ],
)
def test_models_that_are_not_written_are_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    found = why_not_gguf(describe_model(checkpoint(tmp_path, **changes)))
    assert reason in found
    assert bool(reason) == bool(found)


def test_other_families_are_not_written(tmp_path: Path) -> None:
    Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16)).save_pretrained(tmp_path)
    assert "this is Qwen3ForCausalLM" in why_not_gguf(describe_model(tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
        {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ],
    ids=["plain", "tied", "wide-heads"],
)
def test_llama_cpp_gives_the_greedy_tokens_of_every_row(tmp_path: Path, changes: dict[str, Any], dtype: str) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    folder = checkpoint(tmp_path, **changes)
    workload = Workload("cpu", dtype, (1, 3), prompt_tokens=9, new_tokens=11, threads=1)
    peer, reference = PEERS["llama-cpp"](), Reference(folder, workload)
    assert peer.why_not(folder, workload) == ""
    peer.open(folder, workload)
    try:
        for size in (1, 3, 1):
            prompts = torch.randint(3, 301, (size, 9), generator=torch.Generator().manual_seed(size)).tolist()
            answers = peer.generate(prompts, 11)
            assert reference.judge(prompts, answers, 11)[1] == ""
            assert peer.generate(prompts, 4) == [answer[:4] for answer in answers]
    finally:
        peer.close()
