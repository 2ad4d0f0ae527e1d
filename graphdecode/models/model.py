"""The interface between the engine and a model, be it our own decoder or a module of another library."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from graphdecode.attention import PagedDecodeAttention, TokenByTokenAttention
from graphdecode.buffers import Batch
from graphdecode.cache import LayerState
from graphdecode.linear.experts import ExpertForm
from graphdecode.linear.weight_form import WeightForm
from graphdecode.models.adapters import AdapterSlots
from graphdecode.models.blocks import each_once
from graphdecode.models.config import ModelShape


class Chunks(NamedTuple):
    """Chunks of prompts: many tokens of some rows, as `Model.prefill` takes them."""

    token_ids: Tensor  # int64 [t], the rows' tokens one after another
    rows: Tensor  # int32 [t], the row of each token
    positions: Tensor  # int32 [t]
    live: Tensor  # int32 [1]; tokens from there on are padding
    cu_seqlens_q: Tensor  # int32 [b + 1], where each row's tokens begin
    cu_seqlens_kv: Tensor  # int32 [b + 1], cumulative lengths, these tokens included
    page_table: Tensor  # int32 [b, pages]
    state_rows: Tensor | None = None  # int32 [b], the rows of their recurrent states; None where no layer has some
    rolling_table: Tensor | None = None  # int32 [b, pages], of layers whose pages roll; None where there are none
    adapters: Tensor | None = None  # int32 [b], the slots of their adapters; None where no row has one


class Model(ABC):
    """A decoder over a paged cache, written so that a step of it can be captured."""

    config: ModelShape
    dtype: torch.dtype  # of weights, activations and cache
    device: torch.device  # where it runs
    # what an fp8 cache divides keys and values of each layer by, as the checkpoint says
    cache_scales: list[tuple[float, float]]
    # whether it finds pages of caches that roll in `rolling_table`; else all layers have those of `page_table`
    takes_rolling_pages: bool = False
    adapters: AdapterSlots | None = None  # of its products; None: it was loaded without room for adapters

    @property
    def num_layers(self) -> int:
        """Layers, each with a cache of its own."""
        return len(self.cache_scales)

    @abstractmethod
    def products(self) -> Iterator[tuple[str, WeightForm | ExpertForm]]:
        """Yield the products of a step, each with its name within a layer."""

    @property
    @abstractmethod
    def constants(self) -> list[Tensor]:
        """Every tensor that a step only reads, each once."""

    @property
    def workspace(self) -> list[Tensor]:
        """Tensors that a step leaves as it found them, and writes in between."""
        forms = (form for _, form in self.products() if isinstance(form, WeightForm))
        return each_once(tensor for form in forms for tensor in form.workspace)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads, whatever the batch: all but the embedding's unused rows."""
        return self.read_bytes(None)

    @abstractmethod
    def read_bytes(self, rows: int | None) -> int:
        """Bytes of weights that one decode step of so many rows reads at most; None: of any."""

    def linear_choices(self, rows: int) -> dict[str, dict[str, Any]]:
        """Return the path of each product in a step of so many rows, by name and shape, with what was measured."""
        found: dict[str, dict[str, Any]] = {}
        for name, form in self.products():
            *experts, out_features, in_features = form.shape
            among = f" of {experts[0]} experts" if experts else ""
            found[f"{name} {out_features}x{in_features}{among}"] = form.choice(rows).as_report()
        return found

    @abstractmethod
    def decode(self, batch: Batch, caches: Sequence[LayerState], attention: PagedDecodeAttention) -> Tensor:
        """Feed each row's token, append its keys and values, and return the logits, float32 [b, vocab].

        Args:
            batch: slots tokens int64 [b], pre_step_seqlens int32 [b], rows int32 [b] (0, 1, ...),
                page_table int32 [b, pages], live_rows int32 [1].
            caches: keys and values of each layer.
            attention: its workspaces are planned here, once for all layers.
        """

    @abstractmethod
    def prefill(
        self, chunks: Chunks, caches: Sequence[LayerState], attention: TokenByTokenAttention | None = None
    ) -> Any:
        """Append the keys and values of many tokens, and return what `logits` takes.

        `attention` gives each token the bits of a decode step; None: the faster way, many queries at once.
        """

    @abstractmethod
    def logits(self, passed: Any, begin: int, end: int) -> Tensor:
        """Return the logits, float32 [end - begin, vocab], of some tokens of one row of the latest prefill.

        `passed` is what `prefill` returned.
        """


@runtime_checkable
class MixingModel(Protocol):
    """A model whose decode steps can take chunks of prompts along; its methods beside those of `Model`."""

    def mix(
        self, batch: Batch, chunks: Chunks, caches: Sequence[LayerState], attention: PagedDecodeAttention
    ) -> Tensor:
        """Run `decode` and `prefill` in one pass, and return the logits of the rows, float32 [b, vocab].

        A row may be the one whose prompt ends with a chunk of the pass: it feeds the token behind it.
        """
