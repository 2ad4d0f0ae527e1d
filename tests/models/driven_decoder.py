"""A decoder driven by hand: its buffers, a cache whose pages lie in any order, and nothing of the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from graphdecode import GraphManager, StepBuffers
from graphdecode.attention import PagedDecodeAttention
from graphdecode.buffers import SlotField
from graphdecode.cache import Keys, KeysAndState, LayerCache, LayerState, Recurrent, RecurrentState, layer_state
from graphdecode.graphs import check
from graphdecode.models import Chunks, DecodeInputs, Decoder

PAGE_SIZE = 8


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@dataclass(kw_only=True)
class DrivenBatch(DecodeInputs):
    """What the model reads, and its logits."""

    logits: Annotated[Tensor, SlotField(("batch", "vocab"), torch.float32)]  # float32 [b, vocab]


class DrivenDecoder:
    """Rows of tokens, each with pages of its own; whatever no token was written to holds NaN."""

    def __init__(self, model: Decoder, rows: int, max_length: int = 160, seed: int = 0) -> None:
        self.model = model
        config, device = model.config, model.device
        pages_per_row = -(-max_length // PAGE_SIZE)
        self.null_page = rows * pages_per_row
        self.caches: list[LayerState] = []
        for state, keys in zip(config.recurrent or [None] * model.num_layers, config.cached_keys, strict=True):
            state = Recurrent(()) if keys is None and state is None else state
            sizes_of_keys = keys or Keys(1, 1)  # in place of none, which are not made
            shape = (self.null_page + 1, PAGE_SIZE, sizes_of_keys.heads, sizes_of_keys.head_dim)
            pages = partial(LayerCache.zeros, shape, model.dtype, device, latent_rank=sizes_of_keys.latent_rank)
            self.caches.append(layer_state(state, pages, rows, device))
            for tensor in self.caches[-1]:
                tensor.fill_(math.nan)
        self.attention = PagedDecodeAttention(
            max_batch_size=rows,
            num_qo_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            head_dim_v=config.value_dim,
            page_size=PAGE_SIZE,
            max_pages_per_row=pages_per_row,
            dtype=model.dtype,
            device=device,
        )
        sizes = {
            "pages": pages_per_row,
            "null_page": self.null_page,
            "null_state_row": rows,
            "vocab": config.vocab_size,
        }
        sizes |= {"null_rolling_page": None, "no_adapter": None}
        self.buffers = StepBuffers(DrivenBatch, max_batch_size=rows, device=device, sizes=sizes)
        for layer, cache in enumerate(self.caches):
            for name, tensor in cache.tensors.items():
                self.buffers.adopt(f"{name}_{layer}", tensor)
        for index, tensor in enumerate(self.attention.workspace):
            self.buffers.adopt(f"workspace_{index}", tensor)
        order = torch.randperm(self.null_page, generator=torch.Generator().manual_seed(seed))
        self._page_table = order.to(torch.int32).view(rows, pages_per_row).to(device)

    def step(self, batch: DrivenBatch) -> None:
        """What would be captured: the decode step, its logits copied into their slot."""
        batch.logits.copy_(self.model.decode(batch, self.caches, self.attention))

    def states(self) -> list[Tensor]:
        """Return the recurrent states of all rows as they stand."""
        return [tensor.clone() for tensor in self._states()]

    def restore(self, states: list[Tensor]) -> None:
        """Go back to these states: a step may then be run once more."""
        for tensor, before in zip(self._states(), states, strict=True):
            tensor.copy_(before)

    def _states(self) -> list[Tensor]:
        parts = (cache.states if isinstance(cache, KeysAndState) else cache for cache in self.caches)
        return [tensor for part in parts if isinstance(part, RecurrentState) for tensor in part]

    def chunks(self, texts: dict[int, list[int]], starts: dict[int, int], padding: int = 0) -> Chunks:
        """Return the tokens of some rows, each behind the `starts` tokens that it has already, and hostile padding."""
        device = self.model.device

        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        def cumulative(lengths: list[int]) -> Tensor:
            return int32([sum(lengths[:end]) for end in range(len(lengths) + 1)])

        lengths = {row: len(text) for row, text in texts.items()}
        hostile = [2**31 - 1] * padding
        return Chunks(
            torch.tensor([token for text in texts.values() for token in text] + hostile, device=device),
            int32([index for index, row in enumerate(texts) for _ in range(lengths[row])] + hostile),
            int32([starts[row] + i for row in texts for i in range(lengths[row])] + hostile),
            int32([sum(lengths.values())]),
            cumulative(list(lengths.values())),
            cumulative([starts[row] + length for row, length in lengths.items()]),
            self._page_table[list(texts)],
            int32(list(texts)),
        )

    def prefill(self, texts: list[list[int]], starts: list[int]) -> None:
        """Append the tokens of some rows, the first ones, behind the `starts` tokens that each has already."""
        self.model.prefill(self.chunks(dict(enumerate(texts)), dict(enumerate(starts))), self.caches)

    def stage(self, tokens: list[int], positions: list[int]) -> None:
        """Make the first rows live, each about to be fed a token at a position."""
        count = len(tokens)
        self.buffers.set_live_rows(count)
        self.buffers.tokens[:count] = torch.tensor(tokens)
        self.buffers.pre_step_seqlens[:count] = torch.tensor(positions, dtype=torch.int32)
        self.buffers.rows[:count] = self.buffers.state_rows[:count] = torch.arange(count, dtype=torch.int32)
        self.buffers.page_table[:count] = self._page_table[:count]

    def snapshot(self, count: int) -> list[Tensor]:
        """Return the logits of live rows, and all pages and states but the null page and row."""
        caches = [cache[:-1].clone() for layer in self.caches for cache in layer]
        return [self.buffers.logits[:count].clone(), *caches]

    def assert_captured(self, buckets: Sequence[int], lengths: Sequence[int]) -> None:
        """Check laws 2, 4 and 5: a step can be captured, replay is eager, padding is inert; for each number of rows.

        `lengths`: tokens of each row so far.
        """
        states = self.states()
        assert check(self.step, self.buffers, constants=self.model.constants) == []
        graphs = GraphManager(self.step, self.buffers, buckets, constants=self.model.constants)
        graphs.capture(progress=False)
        for count in range(1, len(lengths) + 1):
            snapshots = []
            for poisoned, run in ((False, graphs.run_eager), (False, graphs.replay), (True, graphs.replay)):
                self.restore(states)
                self.buffers.logits.fill_(math.nan)
                self.stage([40 + row for row in range(count)], list(lengths[:count]))
                if poisoned:
                    self.buffers.poison(count)
                run(count)
                snapshots.append(self.snapshot(count))
            assert snapshots[0][0].isfinite().all()
            for other in snapshots[1:]:
                assert_same_bits(other, snapshots[0])
            for state, before in zip(self.states(), states, strict=True):
                assert torch.equal(state[count:-1], before[count:-1]), "rows that are not live keep their states"
        graphs.close()

    def decode(self, tokens: list[int], positions: list[int]) -> Tensor:
        """Feed each row a token and return the logits [rows, vocab]."""
        self.stage(tokens, positions)
        self.step(self.buffers.narrow(len(tokens)))
        return self.buffers.logits[: len(tokens)].clone()
