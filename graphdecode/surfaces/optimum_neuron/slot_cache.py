"""The cache of sequence slots, `[batch, heads, length, head_dim]` per layer, with optimum-neuron's interface."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import chain
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from graphdecode.buckets import BucketLadder
from graphdecode.buffers import default_device
from graphdecode.cache import untouched_zeros
from graphdecode.cache.errors import require_choice, require_fit, require_positive, require_tensors
from graphdecode.errors import shown
from graphdecode.kernels.surfaces.slot_cache import slot_scatter, slot_shift

_TILE = 128
_INDEX_DTYPES = (torch.int32, torch.int64)


def kv_heads_per_rank(num_attention_heads: int, num_key_value_heads: int, tp_degree: int) -> int:
    """Return the key/value heads of one of `tp_degree` ranks.

    Heads are split among the ranks if their number is a multiple of the ranks', and replicated if it divides the
    ranks'. Else every query head has a key/value head, and their number is padded to a multiple.
    """
    require_positive(
        num_attention_heads=num_attention_heads, num_key_value_heads=num_key_value_heads, tp_degree=tp_degree
    )
    padded_heads = -(-num_attention_heads // tp_degree)
    if num_attention_heads == num_key_value_heads:
        return padded_heads
    if num_key_value_heads % tp_degree == 0:
        return num_key_value_heads // tp_degree
    return 1 if tp_degree % num_key_value_heads == 0 else padded_heads


class SlotKVCacheManager:
    """Keys and values `[max_batch, heads, length, head_dim]` a layer; the caller names slots and positions.

    All indices are read on the device, so that a captured `update_cache` is valid for later ones; slots and positions
    out of range are skipped. `length` is the number of places of a slot, without the garbage place.

    Args:
        max_batch_size: slots.
        max_length: tokens of one sequence, at most.
        padding_side: `right`: token i of a sequence is at place i; `left`: its newest token is at the last place.
        continuous_batching: whether context encoding writes the slots that `seq_ids` names, or all from the first.
        num_cores_per_group: flash decoding: number of shards of a sequence. This cache is one shard, with
            place `position // g` for the positions that `active_mask` says it owns (`position % g`), and one more
            place, the last, that takes all others: the garbage place, which a `seq_len` counts. `max_length` is padded
            to a multiple, with a warning.
        tiled: store `[batch, heads, 128, length / 128, head_dim]`, seen as `[batch, heads, length, head_dim]`.
        device: None means CUDA where there is one, else the CPU.

    Raises:
        ValueError: a size is not a positive integer, or two options exclude each other.
    """

    def __init__(
        self,
        num_layers: int,
        max_batch_size: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        padding_side: str = "right",
        continuous_batching: bool = True,
        num_cores_per_group: int = 1,
        tiled: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        require_positive(
            num_layers=num_layers,
            max_batch_size=max_batch_size,
            num_kv_heads=num_kv_heads,
            max_length=max_length,
            head_dim=head_dim,
            num_cores_per_group=num_cores_per_group,
        )
        require_choice("padding_side", padding_side, ("left", "right"))
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype must be a torch.dtype, got {dtype!r}")
        sharded = num_cores_per_group > 1
        if sharded and (tiled or padding_side == "left"):
            raise ValueError(
                f"num_cores_per_group={num_cores_per_group} excludes tiled=True and padding_side='left', "
                f"got tiled={tiled}, padding_side={padding_side!r}"
            )
        if tiled and max_length % _TILE:
            raise ValueError(f"max_length must be a multiple of {_TILE} with tiled=True, got {max_length}")
        padded = -(-max_length // num_cores_per_group) * num_cores_per_group
        if padded != max_length:
            warnings.warn(
                f"max_length {max_length} is not a multiple of num_cores_per_group {num_cores_per_group}: "
                f"padded to {padded}",
                stacklevel=2,
            )
        self.num_layers, self.max_batch_size, self.num_kv_heads = num_layers, max_batch_size, num_kv_heads
        self.max_length, self.head_dim, self.dtype, self.padding_side = padded, head_dim, dtype, padding_side
        self.num_cores_per_group = num_cores_per_group
        self.is_continuous_batching, self.is_kv_cache_tiled = continuous_batching, tiled
        self.flash_decoding_enabled = sharded
        self.length, self.device = padded // num_cores_per_group, default_device(device)
        self._num_positions = self.length + (1 if sharded else 0)
        inner = (_TILE, self._num_positions // _TILE) if tiled else (self._num_positions,)
        self.kv_shape = (max_batch_size, num_kv_heads, *inner, head_dim)  # shape of each stored tensor
        self._flat = [untouched_zeros(self.kv_shape, dtype, self.device) for _ in range(2 * num_layers)]

    @classmethod
    def from_config(
        cls,
        config: Any,
        neuron_config: Any,
        actual_num_key_value_heads: int | None = None,
        *,
        num_kv_head: int | None = None,
        device: torch.device | str | None = None,
    ) -> SlotKVCacheManager:
        """Return the cache of one rank, from today's arguments or with `num_kv_head` from the published ones.

        Args:
            config: the model's: `num_hidden_layers`, `num_attention_heads`, and `head_dim` or else `hidden_size`.
            neuron_config: `max_batch_size`, `sequence_length`, `torch_dtype`, `tp_degree`, `continuous_batching`, and
                where it has them `padding_side`, `flash_decoding_enabled` and `num_cores_per_group`.
            actual_num_key_value_heads: key/value heads of all ranks, after those that ranks share were replicated.
            num_kv_head: key/value heads of the model; see `kv_heads_per_rank` for those of a rank.
            device: None means CUDA where there is one, else the CPU.

        Raises:
            ValueError: none or both numbers of heads are given, or heads cannot be split among the ranks.
        """
        heads, ranks = config.num_attention_heads, neuron_config.tp_degree
        if (actual_num_key_value_heads is None) == (num_kv_head is None):
            raise ValueError(
                "one of actual_num_key_value_heads and num_kv_head is needed, "
                f"got {shown(actual_num_key_value_heads)} and {shown(num_kv_head)}"
            )
        if num_kv_head is not None:
            heads_of_rank = kv_heads_per_rank(heads, num_kv_head, ranks)
        else:
            assert actual_num_key_value_heads is not None
            require_positive(actual_num_key_value_heads=actual_num_key_value_heads, tp_degree=ranks)
            if actual_num_key_value_heads % ranks:
                raise ValueError(
                    f"actual_num_key_value_heads must be a multiple of tp_degree {ranks}, "
                    f"got {actual_num_key_value_heads}"
                )
            heads_of_rank = actual_num_key_value_heads // ranks
        is_sharded = getattr(neuron_config, "flash_decoding_enabled", False)
        return cls(
            config.num_hidden_layers,
            neuron_config.max_batch_size,
            heads_of_rank,
            neuron_config.sequence_length,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            neuron_config.torch_dtype,
            padding_side=getattr(neuron_config, "padding_side", "right"),
            continuous_batching=neuron_config.continuous_batching,
            num_cores_per_group=neuron_config.num_cores_per_group if is_sharded else 1,
            device=device,
        )

    @property
    def past_key_values(self) -> list[Tensor]:
        """The stored tensors: layer i's keys are at 2i and its values at 2i + 1."""
        return list(self._flat)

    def length_ladder(self, shortest: int = 128) -> BucketLadder:
        """Return the lengths that steps are worth capturing for: the powers of two from `shortest` on, and `length`.

        A step reads all places of its length bucket, so that a short one costs less; attention over pages needs no such
        ladder.
        """
        require_positive(shortest=shortest)
        first = shortest.bit_length() - 1
        # a power of two within a factor of sqrt(2) of `length` would save too little for a graph of its own
        sizes = [2**i for i in range(first, self.length.bit_length()) if 2**i * 2**0.5 <= self.length]
        return BucketLadder(sizes, self.length)

    def layer(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, as they are stored; raises ValueError for an unknown layer."""
        if not 0 <= layer_number < self.num_layers:
            raise ValueError(f"layer_number must be in 0..{self.num_layers - 1}, got {layer_number!r}")
        return self._flat[2 * layer_number], self._flat[2 * layer_number + 1]

    def get_kv_by_layer_id(
        self, key_layer_idx: int, gather_index: Tensor | None = None, slice_index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the keys at a flat index of `past_key_values` and the values after them, as they are stored.

        `key_layer_idx` is twice the layer's number; the others are part of the surface, without effect, there as here.

        Raises:
            ValueError: there are no keys at this index.
        """
        if key_layer_idx % 2 or not 0 <= key_layer_idx < len(self._flat):
            raise ValueError(
                f"key_layer_idx must be twice a layer's number, an even index in 0..{len(self._flat) - 2}, "
                f"got {key_layer_idx!r}"
            )
        return self.layer(key_layer_idx // 2)

    def get_cache(self, seq_len: int, skip_slice: bool = False, **kwargs: object) -> list[list[Tensor]]:
        """Return `[keys, values]` of each layer: views `[batch, heads, seq_len, head_dim]`, nothing is copied.

        The places are the first ones, or with `padding_side="left"` the last ones.

        Args:
            seq_len: places wanted (a length bucket), the garbage place of a shard included; at most all.
            skip_slice: return all places.
            **kwargs: part of the surface, without effect.
        """
        self._check_seq_len(seq_len)
        num_slots = self._num_positions if skip_slice else min(seq_len, self._num_positions)
        start = self._num_positions - num_slots if self.padding_side == "left" else 0
        views = [self._untiled(stored).narrow(2, start, num_slots) for stored in self._flat]
        return [views[i : i + 2] for i in range(0, len(views), 2)]

    def update_cache(
        self,
        is_for_context_encoding: bool,
        seq_ids: Tensor | None,
        position_ids: Tensor | None,
        new_key_values: Sequence[Sequence[Tensor]],
        seq_len: int,
        scatter_index: Tensor | None = None,
        active_mask: Tensor | None = None,
        kvcache_buffer: Sequence[Sequence[Tensor]] | None = None,
        *,
        is_chunked_prefill: bool = False,
    ) -> list[Tensor]:
        """Write new keys and values of all layers, in place.

        Context encoding writes whole prompts of n tokens to places 0..n-1 (or, padded left, to the last n places) of
        the slots in `seq_ids`; without continuous batching, of slots 0, 1, ... Token generation writes at
        `position_ids`; padded left, it drops the oldest n tokens and appends at the right. Sharded, the positions that
        `active_mask` owns go to their places and all others to the garbage place; context encoding without a mask
        takes tokens that are already sharded. A chunk of a prompt is written at its `position_ids`, too.

        Args:
            is_for_context_encoding: prompts, or generated tokens.
            seq_ids: int [rows], the slots, each once; None means 0, 1, ...
            position_ids: int [rows, n]; context encoding and left padding need none, unless sharded by `active_mask`.
            new_key_values: keys and values of each layer, `[rows, heads, n, head_dim]`.
            seq_len: the length bucket of the step, as for `get_cache`; tokens go to the same places in all of them.
            scatter_index: part of the surface, without effect: places follow from `position_ids`, there as here.
            active_mask: [rows, n], nonzero where this shard owns the position.
            kvcache_buffer: `[layer][0 or 1]`, tensors to write into instead of this cache's own.
            is_chunked_prefill: the tokens are a chunk of one prompt: one row, in the slot `seq_ids` [1].

        Returns:
            The written tensors, keys and values alternating, as `[batch, heads, places, head_dim]`.

        Raises:
            ValueError: an argument does not fit; nothing has changed.
        """
        self._check_seq_len(seq_len)
        for name, value in (("scatter_index", scatter_index), ("active_mask", active_mask)):
            if isinstance(value, bool):  # today's original has is_chunked_prefill seventh
                raise ValueError(f"{name} must be a tensor or None, got {value}; is_chunked_prefill has a name")
        rows, tokens = self._check_new(new_key_values, self.length if active_mask is None else self.max_length)
        targets = self._targets(kvcache_buffer)
        positions = position_ids
        if is_chunked_prefill:
            if rows != 1 or seq_ids is None or self.padding_side == "left":
                raise ValueError(
                    f"is_chunked_prefill needs one row, seq_ids [1] and padding_side='right', got {rows} rows, "
                    f"seq_ids {shown(seq_ids)} and padding_side={self.padding_side!r}"
                )
            is_for_context_encoding = False
        if is_for_context_encoding and not self.is_continuous_batching:
            seq_ids = None
        for name, tensor, shape, dtypes in (
            ("seq_ids", seq_ids, (rows,), _INDEX_DTYPES),
            ("position_ids", positions, (rows, tokens), _INDEX_DTYPES),
            ("active_mask", active_mask, (rows, tokens), ()),
        ):
            if tensor is not None:
                require_tensors(self._flat[0].device, **{name: tensor})
                require_fit(name, tensor, shape, *dtypes)
        shifted = not is_for_context_encoding and self.padding_side == "left"
        if self.num_cores_per_group == 1:
            active_mask = None
        elif active_mask is None and not is_for_context_encoding:
            raise ValueError(f"active_mask is needed with num_cores_per_group={self.num_cores_per_group}")
        if is_for_context_encoding and active_mask is None:
            positions = None
        elif positions is None and not shifted:
            raise ValueError("position_ids is needed to place the tokens, got None")

        offset = self.length - tokens if self.padding_side == "left" else 0
        for target, new in zip(targets, chain.from_iterable(new_key_values), strict=True):
            if shifted:
                slot_shift(target, new, seq_ids)
            else:
                slot_scatter(target, new, seq_ids, positions, active_mask, self.num_cores_per_group, offset)
        return targets

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the cache by name."""
        return {f"{('keys', 'values')[i % 2]}_{i // 2}": stored for i, stored in enumerate(self._flat)}

    @staticmethod
    def _check_seq_len(seq_len: int) -> None:
        if not isinstance(seq_len, Integral) or seq_len < 1:
            raise ValueError(f"seq_len must be an integer >= 1, got {shown(seq_len)}")

    def _untiled(self, stored: Tensor) -> Tensor:
        return stored.flatten(2, 3) if stored.dim() == 5 else stored

    def _pairs(self, name: str, pairs: Sequence[Sequence[Tensor]], most: float) -> list[Tensor]:
        are_pairs = _is_listed(pairs) and all(_is_listed(pair) and 2 <= len(pair) <= most for pair in pairs)
        if not are_pairs or len(pairs) != self.num_layers:
            raise ValueError(f"{name} must have keys and values of {self.num_layers} layers")
        flat = list(chain.from_iterable(pair[:2] for pair in pairs))
        for tensor in flat:
            require_tensors(self._flat[0].device, **{name: tensor})
        return flat

    def _check_new(self, new_key_values: Sequence[Sequence[Tensor]], limit: int) -> tuple[int, int]:
        first, *others = self._pairs("new_key_values", new_key_values, 2)
        require_fit("new_key_values", first, ("rows", self.num_kv_heads, "n", self.head_dim), self.dtype)
        for tensor in others:
            require_fit("new_key_values, all alike,", tensor, first.shape, self.dtype)
        rows, tokens = first.shape[0], first.shape[2]
        if not 1 <= rows <= self.max_batch_size:
            raise ValueError(f"new_key_values must have 1..{self.max_batch_size} rows, got {rows}")
        if not 1 <= tokens <= limit:
            raise ValueError(f"new_key_values must have 1..{limit} tokens a row, got {tokens}")
        return rows, tokens

    def _targets(self, kvcache_buffer: Sequence[Sequence[Tensor]] | None) -> list[Tensor]:
        if kvcache_buffer is None:
            return [self._untiled(stored) for stored in self._flat]
        targets = []
        for tensor in self._pairs("kvcache_buffer", kvcache_buffer, math.inf):
            if tensor.dim() == 5 and not tensor.is_contiguous():
                raise ValueError("a tiled kvcache_buffer must be contiguous")
            view = self._untiled(tensor)
            expected_shape = (self.max_batch_size, self.num_kv_heads, self._num_positions, self.head_dim)
            require_fit("kvcache_buffer", view, expected_shape, self.dtype)
            if view.stride(-1) != 1:
                raise ValueError(f"kvcache_buffer must have a dense last dimension, got strides {tensor.stride()}")
            targets.append(view)
        return targets

    def __repr__(self) -> str:
        sharded = f", one of {self.num_cores_per_group} shards" if self.num_cores_per_group > 1 else ""
        size = sum(stored.nbytes for stored in self._flat) / 2**20
        return (
            f"SlotKVCacheManager({self.num_layers} layers of [{self.max_batch_size}, {self.num_kv_heads}, "
            f"{self.length}, {self.head_dim}], {str(self.dtype).removeprefix('torch.')}, "
            f"padding_side={self.padding_side!r}{', tiled' if self.is_kv_cache_tiled else ''}{sharded}, "
            f"{size:.1f} MiB in all, on {self.device})"
        )


def _is_listed(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
