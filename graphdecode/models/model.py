"""The interface of a model to the engine."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from graphdecode.attention import PagedDecodeAttention, TokenByTokenAttention
from graphdecode.buffers import SlotField, StepSlots
from graphdecode.cache import LayerState
from graphdecode.linear.experts import ExpertForm
from graphdecode.linear.weight_form import WeightForm
from graphdecode.models.adapters import AdapterSlots
from graphdecode.models.blocks import unique_tensors
from graphdecode.models.config import ModelShape

# staging blocks
ROWS = "rows"
PAGES = "pages"  # the page table
ROLLING = "rolling"  # the page table of layers with rolling pages, which changes only with the rows


@dataclass(kw_only=True)
class DecodeInputs(StepSlots):
    """Inputs of the model in a decode step, b rows; or as many queries, if drafts of a row are verified."""

    tokens: Annotated[Tensor, SlotField(("batch",), torch.int64, pad=1, staged=ROWS)]  # int64 [b], to feed
    pre_step_seqlens: Annotated[Tensor, SlotField(("batch",), torch.int32, staged=ROWS)]  # int32 [b], their positions
    rows: Annotated[Tensor, SlotField(("batch",), torch.int32, staged=ROWS)]  # int32 [b]: 0, 1, ...
    page_table: Annotated[Tensor, SlotField(("batch", "pages"), torch.int32, "null_page", PAGES)]  # int32 [b, pages]
    # int32 [b], rows of the recurrent states
    state_rows: Annotated[Tensor | None, SlotField(("batch",), torch.int32, "null_state_row", ROWS)] = None
    # int32 [b, pages], for layers with rolling pages
    rolling_table: Annotated[
        Tensor | None, SlotField(("batch", "pages"), torch.int32, "null_rolling_page", ROLLING)
    ] = None
    # int32 [b], adapter slots; None: no row has one
    adapters: Annotated[Tensor | None, SlotField(("batch",), torch.int32, "no_adapter", ROWS)] = None
    # set when drafts are verified, each in its own row; see `StateTokens`
    scan_rows: Tensor | None = None  # int32 [b], index into `state_rows`; None: `rows`
    output_state_rows: Tensor | None = None  # int32 [b], state row for the state after each query


class Chunks(NamedTuple):
    """Chunks of prompts, for `Model.prefill`."""

    token_ids: Tensor  # int64 [t], the rows' tokens concatenated
    rows: Tensor  # int32 [t], the row of each token
    positions: Tensor  # int32 [t]
    live: Tensor  # int32 [1], number of tokens; the rest is padding
    cu_seqlens_q: Tensor  # int32 [b + 1], offsets of the rows' tokens
    cu_seqlens_kv: Tensor  # int32 [b + 1], cumulative lengths including these tokens
    page_table: Tensor  # int32 [b, pages]
    state_rows: Tensor | None = None  # int32 [b], rows of the recurrent states
    rolling_table: Tensor | None = None  # int32 [b, pages], for layers with rolling pages
    adapters: Tensor | None = None  # int32 [b], adapter slots; None: no row has one


class Model(ABC):
    """A decoder over a paged cache; its step can be captured."""

    config: ModelShape
    dtype: torch.dtype  # of weights and activations
    device: torch.device
    cache_scales: list[tuple[float, float]]  # key and value scales of each layer, for an fp8 cache
    adapters: AdapterSlots | None = None  # None: it was loaded without adapter slots
    supports_mix: bool = False  # whether it supports mixed steps
    most_prompt_tokens: int = 2**31 - 1  # of a prefill pass
    takes_rolling_pages: bool = False  # whether it reads `rolling_table` for layers with rolling pages
    hidden_size: int | None = None  # channels of `hidden_states`; None: they cannot be had

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.cache_scales)

    @abstractmethod
    def products(self) -> Iterator[tuple[str, WeightForm | ExpertForm]]:
        """Yield name and form of each product of a step."""

    @property
    @abstractmethod
    def constants(self) -> list[Tensor]:
        """All tensors that a step only reads, without duplicates."""

    @property
    def workspace(self) -> list[Tensor]:
        """Tensors that a step writes temporarily, and restores."""
        forms = (form for _, form in self.products() if isinstance(form, WeightForm))
        return unique_tensors(tensor for form in forms for tensor in form.workspace)

    @property
    def weight_bytes(self) -> int:
        """Most bytes of weights that a decode step reads, without the embedding."""
        return self.read_bytes(None)

    @abstractmethod
    def read_bytes(self, rows: int | None) -> int:
        """Return the most bytes of weights that a decode step of `rows` rows reads; None: any number of rows."""

    def linear_choices(self, rows: int) -> dict[str, dict[str, Any]]:
        """Return path and measurements of each product in a step of `rows` rows, by name and shape."""
        choices: dict[str, dict[str, Any]] = {}
        for name, form in self.products():
            *experts, out_features, in_features = form.shape
            among = f" of {experts[0]} experts" if experts else ""
            choices[f"{name} {out_features}x{in_features}{among}"] = form.choice(rows).as_report()
        return choices

    @abstractmethod
    def decode(self, batch: DecodeInputs, caches: Sequence[LayerState], attention: PagedDecodeAttention) -> Tensor:
        """Feed each row's token, append its keys and values, and return the logits, float32 [b, vocab].

        Args:
            batch: the rows.
            caches: keys and values of each layer.
            attention: planned here, once for all layers.
        """

    @abstractmethod
    def prefill(
        self,
        chunks: Chunks,
        caches: Sequence[LayerState],
        attention: TokenByTokenAttention | None = None,
        *,
        with_logits: bool = True,
    ) -> Any:
        """Append the keys and values of chunks, and return `passed` for `logits`.

        `attention` gives each token the bits of a decode step; None: many queries at once, which is faster.
        `with_logits=False`: `logits` is not called, so that the last layer need not be computed to its end.
        """

    @abstractmethod
    def logits(self, passed: Any, begin: int, end: int) -> Tensor:
        """Return the logits, float32 [end - begin, vocab], of a span of the last prefill's tokens, all of one row."""

    def hidden_states(self, passed: Any) -> Tensor:
        """Return the last prefill's hidden states behind the final norm, [t, hidden], instead of calling `logits`.

        Only if `hidden_size` is not None.
        """
        raise NotImplementedError

    def output_rows(self, token_ids: Sequence[int]) -> Tensor:
        """Return rows of the output layer, float32 [n, hidden]; see `hidden_states`, whose product are the logits."""
        raise NotImplementedError

    def mix(
        self, batch: DecodeInputs, chunks: Chunks, caches: Sequence[LayerState], attention: PagedDecodeAttention
    ) -> Tensor:
        """Run `decode` and `prefill` in one pass, and return the logits of the rows, float32 [b, vocab].

        A row's prompt may end with a chunk of the same pass: the row feeds the next token. Only if `supports_mix`.
        """
        raise NotImplementedError
