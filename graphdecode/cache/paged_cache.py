"""The paged cache: the states of all layers, and the pages of each sequence."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from .errors import CacheFullError, UnknownSequenceError, require_positive
from .layer_cache import Keys, LayerCache, LayerState, Recurrent, Zeros, layer_state, paged, stateful, untouched_zeros
from .ledger import Checkpoints, PageLedger
from .rolling import RollingPages
from .state_rows import StateRows


class PagedKVCache:
    """Keys and values of all layers in pages, and the pages of each sequence.

    It stages nothing for the device, and has no lengths: callers pass how many tokens of a sequence are computed.
    Methods that raise have changed nothing; those that take a sequence raise UnknownSequenceError for an unknown one.

    Args:
        total_num_pages: pages that sequences can own, >= 1; the null page is one more.
        max_pages_per_row: pages of one sequence at most; the width of a page table's row.
        num_kv_heads, head_dim: of keys and values, unless `layer_keys` says otherwise.
        prefix_caching: whether `add` finds the pages of prefixes that were published.
        scales: one of keys and one of values per layer, for fp8; None: 1.0.
        recurrent: recurrent state of each layer, if any; empty: no layer has one.
        state_rows: sequences that can have recurrent states or rings at a time, if layers have any.
        layer_keys: those of each layer, if layers differ; one that shares another's has no tensors.
        rolling: rings of pages of layers with a window, for `state_rows` sequences; None: no layer has rings. With
            rings, a sequence can only be truncated to tokens that it has computed, and a cached prefix is used only as
            far as a ring has its window.
        checkpoints: of recurrent states, if prefixes are cached beside them: a prefix is used up to a checkpoint alone.
        draft_states: recurrent states that a step keeps while it verifies drafts.
        zeros: makes each of the tensors.

    Attributes:
        layers: states of each layer: zeros of [total_num_pages + 1, page_size, num_kv_heads, head_dim], where the
            first size is that of all rings and a null page if it has rings; or recurrent states.
        ledger: the pages of each sequence.
        pool: counts pages: `free`, `used`, `shared` and `evictable`.
        null_page: the page for padding, `total_num_pages`; unused entries of a page table have it.
        checkpoint_tokens: tokens from one checkpoint of a sequence to the next; None: there are none.
        draft_state_row: the first of the rows of `draft_states`.
        relay: called with each copy of a state, for other ranks; None: there are none.

    Raises:
        ValueError: a size is not a positive integer.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        total_num_pages: int,
        page_size: int,
        max_pages_per_row: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        prefix_caching: bool = False,
        scales: Sequence[tuple[float, float]] | None = None,
        recurrent: Sequence[Recurrent | None] = (),
        state_rows: int = 0,
        layer_keys: Sequence[Keys] = (),
        rolling: RollingPages | None = None,
        checkpoints: Checkpoints | None = None,
        draft_states: int = 0,
        zeros: Zeros = untouched_zeros,
    ) -> None:
        require_positive(
            num_layers=num_layers,
            total_num_pages=total_num_pages,
            page_size=page_size,
            max_pages_per_row=max_pages_per_row,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        self.page_size = page_size
        self.total_num_pages = total_num_pages
        self.null_page = total_num_pages
        self.max_pages_per_row = max_pages_per_row
        self.prefix_caching = prefix_caching
        self.checkpoint_tokens = None if checkpoints is None else checkpoints.interval * page_size
        num_checkpoints = 0 if checkpoints is None else checkpoints.capacity
        self.draft_state_row = state_rows + 1 + num_checkpoints
        self.ledger = PageLedger(total_num_pages, page_size, prefix_caching=prefix_caching, checkpoints=checkpoints)
        self.pool = self.ledger.pool
        shape = (total_num_pages + 1, page_size, num_kv_heads, head_dim)
        self.dtype, self._page_shape, self._device = dtype, shape, torch.device(device)
        rolls = [False] * num_layers if rolling is None else rolling.layers
        self.layers: list[LayerState] = [
            layer_state(
                state if keys.shared_with is None else Recurrent(()),
                partial(
                    LayerCache.zeros,
                    (pages + 1, page_size, keys.heads, keys.head_dim),
                    dtype,
                    device,
                    key_scale=key_scale,
                    value_scale=value_scale,
                    is_rolling=is_rolling,
                    zeros=zeros,
                    latent_rank=keys.latent_rank,
                ),
                state_rows,
                self._device,
                num_checkpoints + draft_states,
                zeros,
            )
            for (key_scale, value_scale), state, keys, is_rolling in zip(
                scales or [(1.0, 1.0)] * num_layers,
                recurrent or [None] * num_layers,
                layer_keys or [Keys(num_kv_heads, head_dim)] * num_layers,
                rolls,
                strict=True,
            )
            for pages in [rolling.null_page if rolling is not None and is_rolling else total_num_pages]
        ]
        self.rolling = rolling
        self.relay: Callable[[int, int], None] | None = None
        self.null_state_row = state_rows
        self._state_rows = StateRows(state_rows, rolling)
        self._hidden: set[Hashable] = set()  # sequences whose rings are not to be cached

    @property
    def available_pages(self) -> int:
        """Free pages, and those of cached prefixes that no sequence uses."""
        return self.ledger.available

    def add(self, sequence_id: Hashable, token_ids: Sequence[int] | None, root: bytes = b"") -> int:
        """Add a sequence, and return how many of its tokens are cached already: at most all but one.

        With prefix caching these are the full pages of its longest cached prefix, and `restore_state` has to follow;
        `token_ids` None: no prefix. Sequences of different roots share none: a root stands for whatever else keys and
        values depend on.

        Raises:
            CacheFullError: all rows of recurrent states, or of rings, are in use.
            ValueError: the sequence exists.
        """
        if sequence_id in self.ledger.pages:
            raise ValueError(f"sequence {sequence_id!r} is in the cache already")
        if self.has_states and not self._state_rows.free:
            raise CacheFullError(f"all {self.null_state_row} rows of states are in use")
        cached = self.ledger.open(sequence_id, token_ids, root)
        if self.has_states:
            with_states = self._state_rows.take(sequence_id, self.ledger.digests_of(sequence_id)) * self.page_size
            if self.rolling is not None and with_states < cached:
                self.ledger.truncate(sequence_id, with_states)
                return with_states
        return cached

    def restore_state(self, sequence_id: Hashable) -> None:
        """Copy the checkpoint of the prefix that `add` has found, if any, into the sequence's row of states."""
        digests, prefixes = self.ledger.digests_of(sequence_id), self.ledger.prefixes
        if self.checkpoint_tokens is not None and digests and prefixes is not None:
            self._copy_state(prefixes.checkpoint_of(digests[-1]), sequence_id, is_restored=True)

    def save_state(self, sequence_id: Hashable, length: int, token_ids: Sequence[int], *, superseded: int = 0) -> None:
        """Publish a sequence's first `length` tokens, and keep a copy of its state if they end at a checkpoint.

        No further token may have changed the state. If no checkpoint is free, that of the sequence's first `superseded`
        tokens goes first. See `publish`.
        """
        self.publish(sequence_id, length, token_ids)
        prefixes = self.ledger.prefixes
        if self.checkpoint_tokens is None or prefixes is None or length % self.checkpoint_tokens or not length:
            return
        digests = self.ledger.digests_of(sequence_id)
        evict_first = digests[superseded // self.page_size - 1] if superseded else None
        checkpoint = prefixes.new_checkpoint(digests[length // self.page_size - 1], evict_first)
        if checkpoint is not None:
            self._copy_state(checkpoint, sequence_id, is_restored=False)

    def _copy_state(self, checkpoint: int, sequence_id: Hashable, *, is_restored: bool) -> None:
        checkpoint_row, row = self.null_state_row + 1 + checkpoint, self.state_row_of(sequence_id)
        self.copy_state(*((checkpoint_row, row) if is_restored else (row, checkpoint_row)))

    def copy_state(self, source: int, destination: int) -> None:
        """Copy a row of recurrent states, on all ranks."""
        if self.relay is not None:
            self.relay(source, destination)
        copy_page(stateful(self.layers), (source, destination))

    @property
    def has_states(self) -> bool:
        """Whether there are recurrent states or rings of pages."""
        return self.null_state_row > 0

    @property
    def shares_with_running(self) -> bool:
        """Whether a prefix can be shared with the running sequence that wrote it."""
        return self.prefix_caching and self.rolling is None

    def state_row_of(self, sequence_id: Hashable) -> int:
        """Return the row of a sequence's recurrent states and ring, which never changes; else the padding row."""
        return self._state_rows.row_of(sequence_id)

    def reserve(self, sequence_id: Hashable, length: int) -> bool:
        """Allocate a sequence's missing pages for `length` tokens, and return whether there were any.

        Raises:
            CacheFullError: there are not enough pages.
            ValueError: `length` is not in 0..max_pages_per_row * page_size.
        """
        self._pages(sequence_id)
        self._check_length(sequence_id, length, self.max_pages_per_row)
        return self.ledger.grow(sequence_id, length)

    def publish(self, sequence_id: Hashable, length: int, token_ids: Sequence[int]) -> None:
        """Index the full pages of a sequence's first `length` tokens as a prefix, if there is prefix caching.

        Args:
            length: tokens whose keys and values have been computed.
            token_ids: at least the first `length` tokens.

        Raises:
            ValueError: `length` goes past the sequence's pages, or there are fewer token ids.
        """
        self._check_length(sequence_id, length, len(self._pages(sequence_id)))
        if len(token_ids) < length:
            raise ValueError(f"token_ids must hold the first {length} tokens, got {len(token_ids)}")
        self.ledger.publish(sequence_id, length, token_ids)

    def truncate(self, sequence_id: Hashable, length: int) -> None:
        """Free a sequence's pages past `length` tokens.

        A last page that becomes partial is copied if it is shared, else removed from the index: it will be written to.

        Raises:
            CacheFullError: the new last page is shared, and there is no page for a copy of it.
            ValueError: `length` goes past the sequence's pages.
        """
        self._check_length(sequence_id, length, len(self._pages(sequence_id)))
        whole = [pages for pages in paged(self.layers) if not pages.is_rolling]
        copy_page(whole, self.ledger.truncate(sequence_id, length))

    def free(self, sequence_id: Hashable) -> None:
        """Remove a sequence. Pages of published prefixes stay in the index until they are evicted."""
        self._pages(sequence_id)
        if self.has_states:
            is_hidden = sequence_id in self._hidden
            self._hidden.discard(sequence_id)
            self._state_rows.release(sequence_id, () if is_hidden else self.ledger.digests_of(sequence_id))
        self.ledger.close(sequence_id)

    def hide(self, sequence_id: Hashable) -> None:
        """Remove a sequence's pages from the index, shared ones too: their contents may be wrong."""
        self._pages(sequence_id)
        self.ledger.hide(sequence_id)
        if self.has_states:
            self._hidden.add(sequence_id)

    def pages_of(self, sequence_id: Hashable) -> tuple[int, ...]:
        """Return the pages of a sequence, in order."""
        return tuple(self._pages(sequence_id))

    def reset(self) -> None:
        """Forget all sequences and prefixes; the tensors stay as they are."""
        self.ledger.clear()
        self._state_rows = StateRows(self.null_state_row, self.rolling)
        self._hidden.clear()

    def _pages(self, sequence_id: Hashable) -> list[int]:
        pages = self.ledger.pages.get(sequence_id)
        if pages is None:
            raise UnknownSequenceError(f"no sequence {sequence_id!r} is in the cache")
        return pages

    def _check_length(self, sequence_id: Hashable, length: int, pages: int) -> None:
        limit = pages * self.page_size
        if not 0 <= length <= limit:
            raise ValueError(
                f"length of {sequence_id!r} must be in 0..{limit} ({pages} pages of {self.page_size} tokens), "
                f"got {length!r}"
            )

    def __repr__(self) -> str:
        shape = self._page_shape
        size = sum(layer.nbytes for layer in self.layers) / 2**20
        prefixes = ", prefix caching" if self.prefix_caching else ""
        if self.rolling is not None:
            prefixes += f", rings of {self.rolling.pages} pages in {sum(self.rolling.layers)} layers"
        return (
            f"PagedKVCache({len(self.ledger.pages)} sequences, {self.pool}, {len(self.layers)} layers of "
            f"{list(shape)} {str(self.dtype).removeprefix('torch.')}, {size:.1f} MiB in all, on {self._device}"
            f"{prefixes})"
        )


def copy_page(layers: Iterable[Iterable[Tensor]], move: tuple[int, int] | None) -> None:
    """Copy a page, or a state, of each layer's tensors, (source, destination), if there is one to copy."""
    if move is not None:
        source, destination = move
        for tensor in (tensor for layer in layers for tensor in layer):
            tensor[destination].copy_(tensor[source])


def fill_page_row(row: np.ndarray, pages: Sequence[int], null_page: int) -> None:
    """Write a sequence's pages into its row of a page table, int32 [pages of a row], followed by the null page."""
    row[: len(pages)] = pages
    row[len(pages) :] = null_page
