"""Capacity of a configuration and a model: lengths, pages, and whether the machine has the memory."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch

from graphdecode.buckets import query_widths
from graphdecode.cache import RollingPages
from graphdecode.config import BucketConfig, EngineConfig
from graphdecode.engine.steps.decode import state_bytes
from graphdecode.engine.steps.step import MIXED_TOKENS, mixed_shapes, prompt_shapes, ring_length
from graphdecode.errors import ArgumentError
from graphdecode.kernels.cache.kv_format import format_named, format_of
from graphdecode.kernels.sampling.sampling_slots import BAD_WORD_LENGTH, SamplingCapacity, sampling_slots
from graphdecode.memory import free_bytes, total_bytes
from graphdecode.models import ModelShape

# of what graphs take beside the cache: a driver keeps some kilobytes for each kernel of a graph, a layer has some ten,
# and a token's intermediates in the pool that all shapes share are some rows of its width
_NODE_BYTES = 16 * 2**10
_LAYER_NODES = 12
_TOKEN_WIDTHS = 16
_LEDGER_BYTES = 64  # of a page in the host's books: its number, its count, its places in lists
_SLOT_BYTES = 64  # of a row, or of a token of a prompt, besides what depends on the model
_TOP_BYTES = 8  # of a likely token in slots and rings: its id and its log-probability
_RING_BYTES = 16  # of a token in the rings, with its log-probability and rank
_NOTHING = SamplingCapacity(0, 0, 0, 0)
_REQUESTS = {  # what grows with each
    "max_logprobs": "the likeliest tokens",
    "max_stop_token_ids": "tokens that end answers",
    "max_logit_biases": "biases",
    "max_bad_words": "forbidden words",
}


@dataclass(frozen=True)
class Capacity:
    """The sizes that follow from a configuration, a model and the memory that is free."""

    max_sequence_length: int  # tokens of one sequence, prompt and answer
    pages_per_row: int  # pages that such a sequence takes
    total_num_pages: int  # of the pool, without its trash page
    token_bytes: int  # keys and values of one token in all layers
    page_bytes: int  # of one page of the pool, keys and values in all layers whose pages do not roll
    token_limit: int  # tokens that one sequence can have when it owns the whole pool
    rolling: RollingPages | None = None  # of layers that keep a window alone; None: all keep all tokens
    rolling_page_bytes: int = 0  # of one of their pages, in all of these layers

    @property
    def rolling_bytes(self) -> int:
        """Bytes of all rolling pages, the trash page among them."""
        return 0 if self.rolling is None else (self.rolling.trash_page + 1) * self.rolling_page_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes of all keys and values, trash pages among them."""
        return (self.total_num_pages + 1) * self.page_bytes + self.rolling_bytes


def plan_capacity(
    config: BucketConfig,
    model: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    available_bytes: int | None = None,
    widths: Collection[int] = (1,),
    prefill_tokens: int | None = None,
) -> Capacity:
    """Work out the capacity, with `total_num_pages = "auto"` from the memory that is free, less what graphs will take.

    "auto" never takes more pages than all rows at full length need; an ArgumentError says that not even one fits.

    Args:
        config: rows, lengths and pages that are asked for.
        model: its shape.
        dtype: of keys and values.
        device: where they are.
        available_bytes: the memory that is free; None: it is looked up.
        widths: queries of a row that steps are captured for.
        prefill_tokens: of one pass of prompts at most. Given it, pages of layers with a window roll where that takes
            less memory; None: they do not.
    """
    max_sequence_length = min(config.max_sequence_length, model.max_position_embeddings)
    pages_per_row = -(-max_sequence_length // config.page_size)
    paged_layers = model.num_hidden_layers - sum(kept is not None and not kept.beside_keys for kept in model.recurrent)
    entry_bytes = 2 * model.num_key_value_heads * format_of(dtype).entry_bytes(model.head_dim)
    token_bytes = paged_layers * entry_bytes
    page_bytes = token_bytes * config.page_size
    rolling, most = None, config.max_batch_size * pages_per_row
    if prefill_tokens is not None:
        rolling = _rolling_pages(config, model, pages_per_row, prefill_tokens, widths)
    rolling_page_bytes = 0 if rolling is None else sum(rolling.layers) * entry_bytes * config.page_size
    total = config.total_num_pages
    if isinstance(total, str):
        free = free_bytes(device) if available_bytes is None else available_bytes
        if device.type == "cuda" and config.backend != "eager":
            free = max(free - graph_bytes(config, model, widths), 0)
        free = max(free - state_bytes_of(config, model), 0)
        budget = int(free * config.memory_fraction)
        total = min(budget // max(page_bytes, 1) - 1, most)
        if rolling is not None:
            left = budget - (rolling.trash_page + 1) * rolling_page_bytes
            beside = min(left // max(page_bytes - rolling_page_bytes, 1) - 1, most)
            if beside >= total and beside > rolling.trash_page:
                total = beside
            else:
                rolling = None
        if total < 1:
            raise ArgumentError(
                f"no memory is left on {device} for a key-value cache: one page takes {page_bytes} bytes"
            )
    if rolling is None or rolling.trash_page >= total:  # nothing is saved
        rolling, rolling_page_bytes = None, 0
    token_limit, page_bytes = min(max_sequence_length, total * config.page_size), page_bytes - rolling_page_bytes
    sizes = (max_sequence_length, pages_per_row, total, token_bytes, page_bytes, token_limit)
    return Capacity(*sizes, rolling, rolling_page_bytes)


def _rolling_pages(
    config: BucketConfig, model: ModelShape, pages_per_row: int, prefill_tokens: int, widths: Collection[int]
) -> RollingPages | None:
    """Return the rings of layers with a window; None where there are none, or a ring is no shorter than a row."""
    keeps_state = [kept is not None for kept in model.recurrent] or [False] * len(model.windows)
    layers = tuple(window >= 0 and not state for window, state in zip(model.windows, keeps_state, strict=True))
    window = max((window for window, rolls in zip(model.windows, layers, strict=True) if rolls), default=0)
    # all that the first query of a pass sees and all that the pass writes; a mixed step's row writes one token more
    pages = -(-(window + max(prefill_tokens, *widths) + 1) // config.page_size)
    if not any(layers) or pages >= pages_per_row:
        return None
    ahead = 2 * config.steps_per_launch * max(widths)  # of a launch, and of one behind it
    return RollingPages(layers, config.max_batch_size, pages, config.page_size, window, ahead)


def state_bytes_of(config: BucketConfig, model: ModelShape) -> int:
    """Return the bytes of the recurrent states of all rows, those of padding included."""
    return (config.max_batch_size + 1) * sum(kept.nbytes for kept in model.recurrent if kept is not None)


def graph_bytes(config: BucketConfig, model: ModelShape, widths: Collection[int] = (1,)) -> int:
    """Return what the graphs of a GPU are reckoned to take, which are captured once the cache has its memory."""
    queries = config.max_batch_size * max(widths)
    most = max(*MIXED_TOKENS["cuda"], queries)
    beside = [*prompt_shapes("cuda", most), *mixed_shapes("cuda", most, config.ladder)]
    nodes = (len(beside) + len(config.ladder.sizes) * len(widths)) * _LAYER_NODES * model.num_hidden_layers
    width = model.num_attention_heads * model.head_dim
    pool = 4 * (most * width * _TOKEN_WIDTHS + queries * model.vocab_size)
    return nodes * _NODE_BYTES + pool


def captured_widths(settings: EngineConfig) -> tuple[int, ...]:
    """Return the queries of a row that steps are captured for."""
    return (1,) if settings.speculation == "off" else (1, *query_widths(settings.num_tokens))


def resolve_cache_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Return what keys and values are kept in, as `EngineConfig` names it, beside a model of some dtype."""
    return format_named(kv_cache_dtype, dtype).dtype


def longest_pass(settings: EngineConfig, device: torch.device) -> int | None:
    """Return the `prefill_tokens` of `plan_capacity`: None where steps cannot find rolling pages.

    A small model's own keys stand under the numbers of the target's pages, and a step from outside knows one table.
    """
    is_own = settings.speculation != "model" and settings.step_kind is None
    return settings.prefill_tokens(device.type) if is_own else None


def plan_room(
    settings: EngineConfig, model: ModelShape, dtype: torch.dtype, device: torch.device, *, may_roll: bool = True
) -> Capacity:
    """Return the capacity that some settings give a model; see `plan_capacity`. Nothing is allocated.

    `may_roll`: whether the model finds rolling pages, and so does a step that the settings do not name.

    Raises:
        ArgumentError: this machine could not hold it with nothing else in it; names the key that takes most.
    """
    config, memory = settings.buckets, total_bytes(device)
    cache_dtype = resolve_cache_dtype(settings.kv_cache_dtype, dtype)
    longest = longest_pass(settings, device) if may_roll else None
    capacity = plan_capacity(config, model, cache_dtype, device, None, captured_widths(settings), longest)
    needs = _needs(config, model, capacity, settings.prefill_tokens(device.type))
    total = sum(nbytes for _, _, _, nbytes in needs)
    if total > memory:
        key, value, what, nbytes = max(needs, key=lambda need: need[-1])
        raise ArgumentError(
            f"{key}={value} takes {nbytes} bytes for {what}; all sizes together take {total}, and {device} has {memory}"
        )
    return capacity


def _needs(
    config: BucketConfig, model: ModelShape, capacity: Capacity, prefill_tokens: int
) -> list[tuple[str, int, str, int]]:
    """Return what each key of the configuration makes large: the key, its value, what that is, and the bytes."""
    rows, positions, vocab_size = config.max_batch_size, capacity.max_sequence_length, model.vocab_size
    pages, states = capacity.total_num_pages, config.max_automaton_states
    tables = 4 * positions * model.head_dim + 16 * rows * capacity.pages_per_row

    def asked_bytes(**capacity: int) -> int:  # of the slots of a row that may ask for so much
        specs = sampling_slots(_NOTHING._replace(**capacity), vocab_size)
        return sum(spec.dtype.itemsize * math.prod(spec.sizes) for spec in specs)

    least = asked_bytes()
    row = 12 * vocab_size + 4 * BAD_WORD_LENGTH + _SLOT_BYTES + least
    ring = ring_length(config) * (_RING_BYTES + _TOP_BYTES * min(config.max_logprobs, vocab_size))
    needs = [
        ("total_num_pages", pages, "keys and values", (pages + 1) * capacity.page_bytes + pages * _LEDGER_BYTES),
        ("max_sequence_length", positions, "page tables and rotary angles", tables),
        ("max_batch_size", rows, "counts of tokens, logits and masks", rows * row),
        ("max_batch_size", rows, "recurrent states", state_bytes_of(config, model)),
        ("max_batch_size", rows, "keys and values of windows", capacity.rolling_bytes),
        ("max_automata", config.max_automata, "classes of tokens", 4 * vocab_size * config.max_automata),
        ("max_automaton_states", states, "states of automata", states * state_bytes(vocab_size)),
        ("steps_per_launch", config.steps_per_launch, f"tokens of {rows} rows", rows * ring),
        ("max_prefill_tokens", prefill_tokens, "tokens of prompts", prefill_tokens * _SLOT_BYTES),
    ]
    for key, what in _REQUESTS.items():  # how much one request may ask for
        value = getattr(config, key)
        tops = _TOP_BYTES * min(value, vocab_size) if key == "max_logprobs" else 0
        needs.append((key, value, f"{what} of {rows} rows", rows * (asked_bytes(**{key: value}) - least + tops)))
    return needs
