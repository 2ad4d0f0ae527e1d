"""Over a cache of 8 bits a model is transformers' own whose keys and values are rounded to what such a cache holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import edited_tensors, save_checkpoint
from key_mixing import mixing
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from graphdecode import LLM, RequestOutput, SamplingParams

PROMPTS = [[65, 66, 67], list(range(100, 145)), [70] * 17]
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, prompt_logprobs=0, logprobs=0)
SCALES = [(0.031, 0.007), (0.0625, 0.02), (0.011, 0.013)]  # of each layer's keys, and of its values
NO_SCALES = [(1.0, 1.0)] * len(SCALES)
Rounded = tuple[Callable, Callable]  # how keys are, and how values
ONE_CODE = 5e-3  # of logarithms: what a key that lies between two codes, and is rounded the other way, may cost


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with the scales of a cache."""
    folder = save_checkpoint("qwen3", tmp_path_factory.mktemp("scaled"))
    names = [f"model.layers.{layer}.self_attn.{name}_scale" for layer in range(len(SCALES)) for name in "kv"]
    values = [torch.tensor(value) for pair in SCALES for value in pair]
    with edited_tensors(folder) as tensors:
        tensors |= zip(names, values, strict=True)
    return folder


def in_fp8(heads: Tensor, scale: float) -> Tensor:
    return (heads / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def in_int8(heads: Tensor, _: float) -> Tensor:
    """Each token's head has a scale of its own, which is bf16."""
    unit = (heads.abs().amax(-1, keepdim=True) / 127).bfloat16().float()
    return (heads / unit).round().clamp(-127, 127) * unit


def mixed_in_int8(heads: Tensor, scale: float) -> Tensor:
    """Keys are multiplied with a Hadamard matrix before."""
    matrix = mixing(heads.shape[-1]).float()
    return in_int8(heads @ matrix, scale) @ matrix.T


def expected(folder: Path, texts: list[list[int]], rounded: Rounded, scales: list, patch: pytest.MonkeyPatch) -> list:
    """Return the logarithm of each token behind the first one, with keys and values that were rounded."""
    attend = modeling_qwen3.eager_attention_forward

    def attend_rounded(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        of_keys, of_values = scales[module.layer_idx]
        return attend(module, query, rounded[0](key, of_keys), rounded[1](value, of_values), *rest, **options)

    patch.setattr(modeling_qwen3, "eager_attention_forward", attend_rounded)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logprobs = []
    for text in texts:
        with torch.no_grad():
            shares = model(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
        logprobs.append(shares.gather(1, torch.tensor(text[1:])[:, None])[:, 0])
    patch.undo()
    return logprobs


def logarithms(output: RequestOutput) -> Tensor:
    """Return those of all tokens behind the first one."""
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    tokens = [*output.prompt_token_ids[1:], *output.outputs[0].token_ids]
    return torch.tensor([entry[token].logprob for entry, token in zip(entries, tokens, strict=True)])


@pytest.mark.parametrize(
    ("kind", "rounded", "scales"),
    [("fp8", (in_fp8, in_fp8), SCALES), ("int8", (mixed_in_int8, in_int8), NO_SCALES)],
    ids=["fp8", "int8"],
)
def test_logarithms_are_those_over_rounded_keys_and_values(scaled, monkeypatch, kind, rounded, scales):
    limits = {"max_batch_size": 2, "max_sequence_length": 96, "page_size": 8, "max_prefill_tokens": 16}
    with LLM(scaled, kv_cache_dtype=kind, dtype="float32", **limits) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    texts = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    actual = torch.cat([logarithms(output) for output in outputs])
    errors = (actual - torch.cat(expected(scaled, texts, rounded, scales, monkeypatch))).abs()
    assert errors.max() < ONE_CODE
    assert errors.median() < 1e-4
    others = NO_SCALES if kind == "fp8" else SCALES  # in fp8: what other scales would give is far away
    distances = (actual - torch.cat(expected(scaled, texts, (in_fp8, in_fp8), others, monkeypatch))).abs()
    assert distances.max() > 5 * ONE_CODE
    assert distances.median() > 1e-3
