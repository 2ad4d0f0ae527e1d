"""Capacity of a configuration and a model: lengths, pages, and memory."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import compress

import torch

from graphdecode.buckets import query_widths
from graphdecode.cache import RollingPages
from graphdecode.config import BucketConfig, EngineConfig
from graphdecode.engine.steps.decode import state_bytes
from graphdecode.engine.steps.step import MIXED_TOKENS, mixed_shapes, prompt_shapes, ring_length
from graphdecode.errors import ArgumentError
from graphdecode.kernels.cache.kv_format import KVFormat, format_named
from graphdecode.kernels.sampling.sampling_slots import BAD_WORD_LENGTH, SamplingCapacity, sampling_slots
from graphdecode.memory import GRANULE, free_bytes, total_bytes
from graphdecode.models import ModelConfig, ModelShape, adapter_bytes

# estimates for graphs
_NODE_BYTES = 16 * 2**10  # memory of the driver, per kernel
_LAYER_NODES = 12  # kernels of a layer
_TOKEN_WIDTHS = 16  # intermediates of a token in the shared pool, in multiples of the hidden size
_LEDGER_BYTES = 64  # host memory per page: its number, its count, its list entries
_SLOT_BYTES = 64  # per row, or token of a prompt, besides what depends on the model
_TOP_BYTES = 8  # per top token in slots and rings: its id and its log-probability
_RING_BYTES = 16  # per token in the rings, with its log-probability and rank
_NO_SAMPLING = SamplingCapacity(0, 0, 0, 0)
_REQUESTS = {  # key -> slots that grow with it
    "max_logprobs": "the likeliest tokens",
    "max_stop_token_ids": "stop tokens",
    "max_logit_biases": "biases",
    "max_bad_words": "forbidden words",
}


@dataclass(frozen=True)
class Capacity:
    """The sizes that follow from a configuration, a model and the free memory."""

    max_sequence_length: int  # tokens of one sequence, prompt and output
    pages_per_row: int  # pages of such a sequence
    total_num_pages: int  # pages of the pool, without the null page
    token_bytes: int  # keys and values of one token in all layers
    page_bytes: int  # one page, in all layers with full pages
    token_limit: int  # tokens of one sequence that owns the whole pool
    rolling: RollingPages | None = None  # rings of layers with a window; None: all layers have full pages
    rolling_page_bytes: int = 0  # one rolling page, in all of these layers

    @property
    def rolling_bytes(self) -> int:
        """Bytes of all rolling pages, including the null page."""
        return 0 if self.rolling is None else (self.rolling.null_page + 1) * self.rolling_page_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes of all keys and values, including null pages."""
        return (self.total_num_pages + 1) * self.page_bytes + self.rolling_bytes


def plan_capacity(
    settings: EngineConfig,
    model: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    available_bytes: int | None = None,
    may_roll: bool = True,
) -> Capacity:
    """Return the capacity; `total_num_pages = "auto"` fills the free memory, less an estimate for graphs.

    "auto" takes at most the pages of all rows at full length.

    Args:
        settings: rows, lengths, pages, and the dtype of the cache.
        model: the model's shape.
        dtype: the model's dtype.
        device: where the cache is.
        available_bytes: free memory; None: as the device reports.
        may_roll: whether model and step support rolling pages, which layers with a window get if that saves memory.
            Draft models, registered steps and checkpoints of recurrent states need full pages.

    Raises:
        ArgumentError: not even one page fits.
    """
    config = settings.buckets
    widths = (1,) if settings.speculation == "off" else (1, *query_widths(settings.num_tokens))
    max_sequence_length = min(config.max_sequence_length, model.max_position_embeddings)
    pages_per_row = -(-max_sequence_length // config.page_size)
    kv_format = kv_format_of(settings, model, dtype)
    layer_bytes = [
        0 if keys is None else keys.entries * kv_format.entry_bytes(keys.head_dim) for keys in model.cached_keys
    ]
    token_bytes = sum(layer_bytes)
    page_bytes = token_bytes * config.page_size
    rolling, most = None, config.max_batch_size * pages_per_row
    checkpoint_bytes = checkpoint_bytes_of(settings, model)
    states_bytes = state_bytes_of(config, model) + checkpoint_bytes + draft_state_bytes_of(settings, model)
    if may_roll and settings.speculation != "model" and settings.step_kind is None and not checkpoint_bytes:
        rolling = _rolling_pages(config, model, pages_per_row, settings.prefill_tokens(device.type), widths)
    rolls = [False] * len(layer_bytes) if rolling is None else rolling.layers
    rolling_page_bytes = sum(compress(layer_bytes, rolls)) * config.page_size
    total = config.total_num_pages
    if isinstance(total, str):
        free = free_bytes(device) if available_bytes is None else available_bytes
        if device.type == "cuda" and config.backend != "eager":
            free = max(free - graph_bytes(config, model, widths, settings.prefill_tokens(device.type)), 0)
        beside = rounding_bytes_of(settings, device) + paired_adapter_bytes_of(settings, model, dtype, device)
        free = max(free - states_bytes - beside, 0)
        budget = int(free * config.memory_fraction)
        total = min(budget // max(page_bytes, 1) - 1, most)
        if rolling is not None:
            left = budget - (rolling.null_page + 1) * rolling_page_bytes
            beside = min(left // max(page_bytes - rolling_page_bytes, 1) - 1, most)
            if beside >= total and beside > rolling.null_page:
                total = beside
            else:
                rolling = None
        if total < 1:
            raise ArgumentError(
                f"no memory is left on {device} for a key-value cache: one page takes {page_bytes} bytes"
            )
    if rolling is None or rolling.null_page >= total:  # nothing is saved
        rolling, rolling_page_bytes = None, 0
    token_limit, page_bytes = min(max_sequence_length, total * config.page_size), page_bytes - rolling_page_bytes
    sizes = (max_sequence_length, pages_per_row, total, token_bytes, page_bytes, token_limit)
    return Capacity(*sizes, rolling, rolling_page_bytes)


def kv_format_of(settings: EngineConfig, model: ModelShape, dtype: torch.dtype) -> KVFormat:
    """Return the format of keys and values; an ArgumentError if the model cannot have it."""
    kv_format = format_named(settings.kv_cache_dtype, dtype)
    if kv_format.dtype.itemsize == 1 and any(keys is not None and keys.latent_rank for keys in model.cached_keys):
        setting = f"kv_cache_dtype={settings.kv_cache_dtype!r}"
        raise ArgumentError(
            f"{setting} cannot be had: {model.architecture} has latent keys, which are of the model's dtype"
        )
    return kv_format


def _rolling_pages(
    config: BucketConfig, model: ModelShape, pages_per_row: int, prefill_tokens: int, widths: Collection[int]
) -> RollingPages | None:
    """Return the rings of layers with a window; None if there are none, or a ring is no shorter than a row."""
    has_state = [state is not None for state in model.recurrent] or [False] * len(model.windows)
    of_layers = zip(model.windows, has_state, model.cached_keys, strict=False)  # unknown so far for an adopted module
    layers = tuple(window >= 0 and not state and keys is not None for window, state, keys in of_layers)
    window = max((window for window, rolls in zip(model.windows, layers, strict=True) if rolls), default=0)
    # the window of a pass's first query, and the tokens that the pass writes; a mixed step's row writes one more
    pages = -(-(window + max(prefill_tokens, *widths) + 1) // config.page_size)
    if not any(layers) or pages >= pages_per_row:
        return None
    ahead = 2 * config.steps_per_launch * max(widths)  # tokens of a launch and the next one
    return RollingPages(layers, config.max_batch_size, pages, config.page_size, window, ahead)


def state_bytes_of(config: BucketConfig, model: ModelShape) -> int:
    """Return the bytes of the recurrent states of all rows, including the null row."""
    return (config.max_batch_size + 1) * _state_bytes(model)


def checkpoint_bytes_of(settings: EngineConfig, model: ModelShape) -> int:
    """Return the bytes of the recurrent states of prefixes; 0 if the model has no states, or shares no prefixes."""
    count = settings.state_checkpoints if settings.prefix_cache else 0
    return count * _state_bytes(model)


def draft_states_of(settings: EngineConfig) -> int:
    """Return how many recurrent states a step keeps while it verifies drafts: one for each query of each row."""
    if settings.speculation == "off":
        return 0
    return settings.buckets.max_batch_size * query_widths(settings.num_tokens)[-1]


def draft_state_bytes_of(settings: EngineConfig, model: ModelShape) -> int:
    """Return the bytes of the recurrent states after drafts."""
    return draft_states_of(settings) * _state_bytes(model)


def rounding_bytes_of(settings: EngineConfig, device: torch.device) -> int:
    """Return the bytes that weights, and a cache, in memory that can be unmapped take at most besides their own."""
    return 2 * GRANULE if settings.enable_sleep_mode and device.type == "cuda" else 0


def paired_adapter_bytes_of(settings: EngineConfig, model: ModelShape, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes that a pass takes for what adapters add for each token and expert, or head of latent attention.

    Adapters add to `gate` and `up` of experts from copies of a token's input, and to the other products from its own.
    """
    if not (isinstance(model, ModelConfig) and settings.max_adapters):
        return 0
    experts, rank = model.experts, settings.max_adapter_rank
    tokens = settings.prefill_tokens(device.type) + settings.buckets.max_batch_size
    has_latents = any(keys.latent_rank for keys in model.layer_keys)
    of_heads = model.num_attention_heads * 4 * (model.head_dim + rank) if has_latents else 0
    if experts is None or not settings.adapt_experts:
        return tokens * of_heads
    first = 4 * 2 * (experts.intermediate_size + rank) + dtype.itemsize * model.hidden_size
    return tokens * max(of_heads, experts.top_k * max(first, 4 * (model.hidden_size + rank)))


def _state_bytes(model: ModelShape) -> int:
    """Return the bytes of one sequence's recurrent states."""
    return sum(state.nbytes for state in model.recurrent if state is not None)


def graph_bytes(
    config: BucketConfig, model: ModelShape, widths: Collection[int] = (1,), prefill_tokens: int = 1
) -> int:
    """Return an estimate of the memory of a GPU's graphs, which are captured after the cache is allocated.

    Also of those that are captured later: graphs share the memory of their intermediates, which the largest bounds.
    """
    queries = config.max_batch_size * max(widths)
    most = max(*MIXED_TOKENS["cuda"], queries, prefill_tokens)
    with_prompts = [
        *prompt_shapes("cuda", most, model.width),
        *mixed_shapes("cuda", most, config.ladder, model.width),
    ]
    most = max(queries, *(shape.tokens for shape in with_prompts))
    nodes = (len(with_prompts) + len(config.ladder.sizes) * len(widths)) * _LAYER_NODES * model.num_hidden_layers
    pool = 4 * (most * model.width * _TOKEN_WIDTHS + queries * model.vocab_size)
    return nodes * _NODE_BYTES + pool


def plan_checked_capacity(
    settings: EngineConfig, model: ModelShape, dtype: torch.dtype, device: torch.device, *, may_roll: bool = True
) -> Capacity:
    """Return the capacity (see `plan_capacity`), checked against the machine's memory.

    Raises:
        ArgumentError: the memory is too small; the message names the key that takes most.
    """
    memory = total_bytes(device)
    capacity = plan_capacity(settings, model, dtype, device, may_roll=may_roll)
    needs = _needs(settings, model, capacity, dtype, device)
    total = sum(nbytes for _, _, _, nbytes in needs)
    if total > memory:
        key, value, purpose, nbytes = max(needs, key=lambda need: need[-1])
        raise ArgumentError(
            f"{key}={value} takes {nbytes} bytes for {purpose}; all sizes together take {total}, "
            f"and {device} has {memory}"
        )
    return capacity


def _needs(
    settings: EngineConfig, model: ModelShape, capacity: Capacity, dtype: torch.dtype, device: torch.device
) -> list[tuple[str, int, str, int]]:
    """Return the memory by configuration key: key, value, what it is for, bytes."""
    config, prefill_tokens = settings.buckets, settings.prefill_tokens(device.type)
    rows, positions, vocab_size = config.max_batch_size, capacity.max_sequence_length, model.vocab_size
    pages, states, slots = capacity.total_num_pages, config.max_automaton_states, settings.max_adapters
    adapters = adapter_bytes(model, slots, settings.max_adapter_rank, dtype, adapt_experts=settings.adapt_experts)
    pairs = paired_adapter_bytes_of(settings, model, dtype, device)
    checkpoints, rounding = checkpoint_bytes_of(settings, model), rounding_bytes_of(settings, device)
    tables = 4 * positions * model.head_dim + 16 * rows * capacity.pages_per_row

    def sampling_bytes(**capacity: int) -> int:  # slots of one row
        specs = sampling_slots(_NO_SAMPLING._replace(**capacity), vocab_size)
        return sum(spec.dtype.itemsize * math.prod(spec.sizes) for spec in specs)

    least = sampling_bytes()
    row = 12 * vocab_size + 4 * BAD_WORD_LENGTH + _SLOT_BYTES + least
    ring = ring_length(config) * (_RING_BYTES + _TOP_BYTES * min(config.max_logprobs, vocab_size))
    needs = [
        ("total_num_pages", pages, "keys and values", (pages + 1) * capacity.page_bytes + pages * _LEDGER_BYTES),
        ("max_sequence_length", positions, "page tables and rotary angles", tables),
        ("max_batch_size", rows, "counts of tokens, logits and masks", rows * row),
        ("max_batch_size", rows, "recurrent states", state_bytes_of(config, model)),
        ("max_batch_size", rows, "recurrent states of drafts", draft_state_bytes_of(settings, model)),
        ("max_batch_size", rows, "keys and values of windows", capacity.rolling_bytes),
        ("max_automata", config.max_automata, "classes of tokens", 4 * vocab_size * config.max_automata),
        ("max_automaton_states", states, "states of automata", states * state_bytes(vocab_size)),
        ("steps_per_launch", config.steps_per_launch, f"tokens of {rows} rows", rows * ring),
        ("max_prefill_tokens", prefill_tokens, "tokens of prompts", prefill_tokens * _SLOT_BYTES),
        ("state_checkpoints", settings.state_checkpoints, "recurrent states of prefixes", checkpoints),
        ("max_adapters", slots, f"adapters of rank {settings.max_adapter_rank}", adapters),
        ("max_adapters", slots, "adapters of each token's experts or heads", pairs),
        ("enable_sleep_mode", int(settings.enable_sleep_mode), "granules of weights and cache", rounding),
    ]
    for key, purpose in _REQUESTS.items():
        value = getattr(config, key)
        tops = _TOP_BYTES * min(value, vocab_size) if key == "max_logprobs" else 0
        needs.append((key, value, f"{purpose} of {rows} rows", rows * (sampling_bytes(**{key: value}) - least + tops)))
    return needs
