"""The fields of a configuration as keywords of a call, with their types for whoever checks them."""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class EngineKeywords(TypedDict, total=False):
    """The fields of both configurations that a call can override; torch's own objects are fine."""

    max_batch_size: int
    max_sequence_length: int
    page_size: int
    total_num_pages: int | Literal["auto"]
    memory_fraction: float
    max_logprobs: int
    max_stop_token_ids: int
    max_logit_biases: int
    max_bad_words: int
    max_automata: int
    max_automaton_states: int
    batch_sizes: tuple[int, ...] | list[int] | Literal["auto"]
    max_graphs: int
    capture_when: Literal["startup", "first-use"]
    backend: Literal["auto", "cuda", "recorded", "eager"]
    warmup_steps: int
    steps_per_launch: int
    max_prefill_tokens: int | Literal["auto"]
    target_itl_ms: float
    device: Any  # a name or a torch.device
    dtype: Any  # a name or a torch.dtype
    seed: int
    quantize: str | None
    quantize_group_size: int | None
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "int8"]
    batch_invariant: bool
    prefix_cache: bool
    tensor_parallel_size: int
    collectives: Literal["auto", "shared", "gloo", "nccl"]
    rank_limit_seconds: float
    model_impl: Literal["auto", "native", "transformers"]
    trust_remote_code: bool
    load_modules: tuple[str, ...] | list[str]
    step_kind: str | None
    skip_tokenizer_init: bool
    speculation: Any  # a method's name, a dict of the section [speculation], or None
    draft_model: str | None
    num_tokens: int | Literal["auto"]
    ngram_min: int
    ngram_max: int
