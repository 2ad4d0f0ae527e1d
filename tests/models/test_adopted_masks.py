"""Windows, chunks and other masks of transformers' modules: read from the mask that transformers makes."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy_tokens import greedy_tokens, reference_tokens
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MinistralConfig,
    ModernBertDecoderConfig,
    MoshiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    RemBertConfig,
    masking_utils,
)

from adopted_models import ADOPTED, TINY, save_random
from graphdecode import LLM
from graphdecode.models import UnsupportedModelError, describe_model
from graphdecode.models.transformers_backend.masks import Visible, code_of_mask, visible_of
from graphdecode.models.transformers_backend.module_decoder import PROBE, register

WINDOW = 16
PROMPTS = [[random.Random(seed).randrange(1, 256) for _ in range(length)] for seed, length in enumerate((60, 33, 5))]
TWO_KINDS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

MASKED: dict[str, tuple[PreTrainedConfig, tuple[int, ...]]] = {
    "a window that attention is not told": (
        PhimoeConfig(**TINY.grouped(sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2)),
        (WINDOW - 1, WINDOW - 1),
    ),
    "of a family, by transformers": (
        Qwen2MoeConfig(
            **TINY.grouped(sliding_window=WINDOW, use_sliding_window=True, layer_types=TWO_KINDS, **EXPERTS),
            shared_expert_intermediate_size=32,
        ),
        (WINDOW - 1, -1),
    ),
    "chunks": (
        Llama4TextConfig(
            **TINY.grouped(head_dim=16, attention_chunk_size=WINDOW, num_local_experts=2, intermediate_size_mlp=96),
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0],
        ),
        (WINDOW - 1, -1),
    ),
    "a decoder that is an output layer": (
        ModernBertDecoderConfig(
            **{name: value for name, value in TINY.fields().items() if value is not None},
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
            local_attention=2 * WINDOW,
            layer_types=TWO_KINDS,
        ),
        (WINDOW - 1, -1),
    ),
    "padding that a warning looks for": (GPT2Config(**TINY.fields() | {"pad_token_id": 0}), (-1, -1)),
}


@pytest.mark.parametrize("name", MASKED)
def test_tokens_beyond_a_window_are_those_of_generate(name: str, tmp_path: Path) -> None:
    config, windows = MASKED[name]
    folder = save_random(config, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = [reference_tokens(model, prompt, 12) for prompt in PROMPTS]
    assert len({token for answer in expected for token in answer}) > 8, "it varies"
    sizes = {"max_batch_size": 3, "max_sequence_length": 96, "page_size": 8, "max_prefill_tokens": 32}
    with LLM(folder, dtype="float32", model_impl="transformers", **sizes) as llm:
        assert llm.model.config.windows == windows
        assert greedy_tokens(llm, PROMPTS, 12) == expected


KNOWN_WINDOWS = {"starcoder2": (19, 19), **dict.fromkeys(("cohere2", "exaone4", "gemma3n"), (19, -1))}


@pytest.mark.parametrize("name", ADOPTED)
def test_windows_of_adopted_modules_are_known_before_weights_are_read(name: str, tmp_path: Path) -> None:
    config = ADOPTED[name](TINY)
    with torch.device("meta"):
        config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    config.save_pretrained(tmp_path)
    assert describe_model(tmp_path).windows == KNOWN_WINDOWS.get(name, (-1, -1))


REFUSED: dict[str, tuple[PreTrainedConfig, str, str]] = {
    "tokens that see those behind them": (
        RemBertConfig(**TINY.fields(input_embedding_size=64, output_embedding_size=64)),
        "RemBertForCausalLM",
        "position 0 sees position 1",
    ),
    "a cache that keeps less than the mask shows": (
        MoshiConfig(**TINY.grouped(sliding_window=20, head_dim=16)),
        "MoshiForCausalLM",
        r"transformers' cache keeps 20 tokens \(sliding_window\) of layer 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_window_is_gets_refused_by_name(name: str, tmp_path: Path) -> None:
    config, architecture, reason = REFUSED[name]
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"{architecture}.*{reason}"):
        describe_model(tmp_path, model_impl="transformers")


def mask_of(make: Callable[..., Any], config: PreTrainedConfig, **others: Any) -> Visible | None:
    """Return what the probe reads of a mask that one of transformers' functions makes for one token."""
    register()
    config._attn_implementation = PROBE
    one = {"inputs_embeds": torch.zeros(1, 1, 8), "attention_mask": None, "past_key_values": None}
    return visible_of(make(config, position_ids=torch.zeros(1, 1, dtype=torch.int64), **one, **others))


@pytest.mark.parametrize("size", [1, 2, 7, 130, 131, 400, 999, 1000, 5000])
def test_all_sizes_of_windows_and_chunks_are_found(size: int) -> None:
    config = MinistralConfig(max_position_embeddings=1000, sliding_window=size)
    config.attention_chunk_size = size
    is_all = size >= 1000  # no position of the model is beyond it
    window = mask_of(masking_utils.create_sliding_window_causal_mask, config)
    assert window == (Visible() if is_all else Visible(size - 1))
    chunk = mask_of(masking_utils.create_chunked_causal_mask, config)
    assert chunk in ([Visible()] if is_all else [Visible(size - 1, is_chunked=True), Visible(0)][: 1 + (size == 1)])
    assert mask_of(masking_utils.create_causal_mask, config) == Visible()


ODD: dict[str, dict[str, Any]] = {
    "a prefix whose tokens see each other": {"or_mask_function": lambda b, h, q, k: (q < 50) & (k < 50)},
    "a prefix far behind": {"or_mask_function": lambda b, h, q, k: (q > 700) & (k < q + 5)},
    "every second key": {"and_mask_function": lambda b, h, q, k: (q - k) % 2 == 0},
    "documents": {"and_mask_function": lambda b, h, q, k: (q < 100) == (k < 100)},
    "tokens of a type": {"block_sequence_ids": torch.zeros(1, 1, dtype=torch.int64)},
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize(
    "make",
    [masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask],
    ids=["causal", "window"],
)
def test_other_masks_are_refused_with_what_was_seen(make: Callable[..., Any], name: str) -> None:
    config = MinistralConfig(max_position_embeddings=1000, sliding_window=64)
    with pytest.raises(
        UnsupportedModelError, match=r"position \d+ (sees|does not see) position|more than their positio"
    ):
        mask_of(make, config, **ODD[name])


def test_masks_that_depend_on_tokens_are_refused() -> None:
    def every(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key <= query

    config = LlamaConfig(max_position_embeddings=64)
    assert visible_of(code_of_mask(mask_function=every, config=config)) == Visible()
    for mask in (torch.tensor([[True, False]]), torch.ones((1, 2), dtype=torch.bool, device="meta")):
        with pytest.raises(UnsupportedModelError, match="masks tokens by what they are"):
            code_of_mask(mask_function=every, config=config, attention_mask=mask)
    assert visible_of(torch.zeros(1, 1, 1, 1)) is None, "the module made another mask of it"
