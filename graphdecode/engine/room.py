"""Whether what a configuration asks for can be there at all: looked at before the first byte is allocated."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from graphdecode.config import BucketConfig
from graphdecode.engine.capacity import Capacity
from graphdecode.engine.steps.automaton_places import state_bytes
from graphdecode.engine.steps.rings import step_bytes
from graphdecode.engine.steps.step import ring_length
from graphdecode.errors import ArgumentError
from graphdecode.kernels.sampling.sampling_slots import BAD_WORD_LENGTH, SamplingCapacity, sampling_slots
from graphdecode.models import ModelShape

_LEDGER_BYTES = 64  # of a page in the host's books: its number, its count, its places in lists
_SLOT_BYTES = 64  # of a row, or of a token of a prompt, besides what depends on the model
_TOP_BYTES = 8  # of a likely token in the slots: its id and its log-probability
_REQUESTS = {  # what grows with each
    "max_logprobs": "the likeliest tokens",
    "max_stop_token_ids": "tokens that end answers",
    "max_logit_biases": "biases",
    "max_bad_words": "forbidden words",
}
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class _Need(NamedTuple):
    """What one key of the configuration makes large."""

    key: str
    value: int
    what: str
    nbytes: int


def check_room(
    config: BucketConfig,
    model: ModelShape,
    capacity: Capacity,
    device: torch.device,
    *,
    prefill_tokens: int,
    memory_bytes: int | None = None,
) -> None:
    """Refuse sizes that no memory of this machine could hold, were there nothing else in it.

    Args:
        config: rows, lengths, pages and steps.
        model: layers, heads and vocabulary.
        capacity: what the two mean together.
        device: where the cache goes.
        prefill_tokens: of a prefill at most.
        memory_bytes: of the device; None: what it has, or what this process may use of it.

    Raises:
        ArgumentError: names the key that takes most, its value and the bytes.
    """
    memory = total_bytes(device) if memory_bytes is None else memory_bytes
    needs = _needs(config, model, capacity, prefill_tokens)
    total = sum(need.nbytes for need in needs)
    if total > memory:
        largest = max(needs, key=lambda need: need.nbytes)
        raise ArgumentError(
            f"{largest.key}={largest.value} takes {largest.nbytes} bytes for {largest.what}; all sizes together take "
            f"{total}, and {device} has {memory}"
        )


def _needs(config: BucketConfig, model: ModelShape, capacity: Capacity, prefill_tokens: int) -> list[_Need]:
    rows, positions = config.max_batch_size, capacity.max_sequence_length
    pages = capacity.total_num_pages
    table = 4 * rows * capacity.pages_per_row
    return [
        _Need("total_num_pages", pages, "keys and values", (pages + 1) * capacity.page_bytes + pages * _LEDGER_BYTES),
        _Need(
            "max_sequence_length",
            positions,
            "page tables and rotary angles",
            4 * (positions * model.head_dim) + 4 * table,
        ),
        _Need("max_batch_size", rows, "counts of tokens, logits and masks", rows * _row_bytes(model)),
        *_request_needs(config, rows, model),
        _Need("max_automata", config.max_automata, "classes of tokens", 4 * model.vocab_size * config.max_automata),
        _Need(
            "max_automaton_states",
            config.max_automaton_states,
            "states of automata",
            config.max_automaton_states * state_bytes(model.vocab_size),
        ),
        _Need(
            "steps_per_launch",
            config.steps_per_launch,
            f"tokens of {rows} rows",
            ring_length(config) * rows * step_bytes(min(config.max_logprobs, model.vocab_size)),
        ),
        _Need("max_prefill_tokens", prefill_tokens, "tokens of prompts", prefill_tokens * _SLOT_BYTES),
    ]


def _row_bytes(model: ModelShape) -> int:
    """Return what a row takes that may ask for nothing."""
    return 12 * model.vocab_size + 4 * BAD_WORD_LENGTH + _SLOT_BYTES + _slots_bytes(SamplingCapacity(0, 0, 0, 0), model)


def _request_needs(config: BucketConfig, rows: int, model: ModelShape) -> list[_Need]:
    """Return what the keys take that say how much one request may ask for."""
    nothing = SamplingCapacity(0, 0, 0, 0)
    without = _slots_bytes(nothing, model)
    needs = []
    for key, what in _REQUESTS.items():
        value = getattr(config, key)
        slots = _slots_bytes(nothing._replace(**{key: value}), model) - without
        tops = _TOP_BYTES * min(value, model.vocab_size) if key == "max_logprobs" else 0
        needs.append(_Need(key, value, f"{what} of {rows} rows", rows * (slots + tops)))
    return needs


def _slots_bytes(capacity: SamplingCapacity, model: ModelShape) -> int:
    """Return the bytes of one row's slots."""
    specs = sampling_slots(capacity, model.vocab_size)
    return sum(spec.dtype.itemsize * math.prod(spec.sizes) for spec in specs)


def total_bytes(device: torch.device) -> int:
    """Return the memory of a device, in bytes; of a CPU what this process may use where that is less."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = []
    with suppress(AttributeError, ValueError, OSError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for file in _CGROUP_LIMITS:
        with suppress(ValueError, OSError):  # there is none, or it says "max"
            limits.append(int(Path(file).read_text()))
    return min(limits, default=2**63)
