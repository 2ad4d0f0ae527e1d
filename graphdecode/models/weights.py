"""A model's weights, read from a source place by place."""

from dataclasses import replace

import torch
from torch import Tensor

from graphdecode.distributed import Collectives
from graphdecode.linear.across_ranks import Summed
from graphdecode.linear.experts import ExpertForm, ExpertNames
from graphdecode.linear.forms import keeps, load_experts, load_linear, tied_linear
from graphdecode.linear.plain import Plain
from graphdecode.linear.small_linear_timing import FUSED_FORMS, FusedForm
from graphdecode.linear.weight_form import FormOptions, LinearNames, RowTable, TensorSource, WeightForm, read_fused
from graphdecode.models.adapters import AdapterSlots
from graphdecode.models.blocks import Norm
from graphdecode.models.config import ExpertsConfig
from graphdecode.models.rope import RopeConfig, cos_sin_table
from graphdecode.models.weight_map import WeightMap

_NEVER_ADAPTED = ("lm_head", "router")


class Weights:
    """The weights of a model, from which a family builds its layers.

    Args:
        source: has all tensors that the map names.
        weight_map: of the model.
        options: of the forms that products take.
        positions: to make rotary angles for.
        norm_offset: is added to the weights of all norms: 1 where a source has their distance from 1.
        shared: what the ranks compute together, where the source is the shard of one; None: there is one rank.
        adapters: are given the products that adapters can change; None: there is no room for any.
    """

    def __init__(
        self,
        source: TensorSource,
        weight_map: WeightMap,
        options: FormOptions,
        positions: int,
        norm_offset: float = 0.0,
        shared: Collectives | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.shared, self.adapters = shared, adapters
        self._source = source
        self._map = weight_map
        self._options = options
        self._positions = positions
        self._norm_offset = norm_offset
        self._embedding: WeightForm | None = None  # in blocks
        self._angles: dict[tuple[RopeConfig | None, int], Tensor] = {}

    def tensor(self, place: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return what is at a place, in memory of its own; None: of the model's dtype."""
        dtype = self._options.dtype if dtype is None else dtype
        return read_fused(self._source, self._names(place), None, dtype, self._options.device)

    def embedding_rows(self) -> RowTable | None:
        """Return the quantized embedding, if products keep the source's; a tied output layer shares it."""
        names = LinearNames(self._names("embedding"))
        if not keeps(self._source, names, self._options):
            return None
        form = load_linear(self._source, names, None, self._options)
        if form.row_table is not None:
            self._embedding = form
        return form.row_table

    def experts(self, place: str, experts: ExpertsConfig, *, is_gated: bool, interleaved: bool = False) -> ExpertForm:
        """Return one product of all experts at a place, with its bias where the map has one.

        The parts of a place are those of one expert after another, or one part with all along its first dimension.
        `is_gated`: the first half of the outputs is the gate of the second; `interleaved`: see `ExpertNames`.
        """
        names = ExpertNames(self._names(place), experts.count, is_gated, interleaved)
        bias = self.tensor(f"{place}.bias").view(experts.count, -1) if f"{place}.bias" in self._map else None
        if bias is not None and names.is_stack and is_gated and interleaved:
            bias = torch.cat((bias[:, ::2], bias[:, 1::2]), dim=1)
        return load_experts(self._source, names, bias, self._options)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations."""
        return self._options.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._options.device

    def norm(self, place: str, eps: float) -> Norm:
        """Return the norm at a place, in float32."""
        return Norm(self.tensor(place, torch.float32).add_(self._norm_offset), eps)

    def optional_norm(self, place: str, eps: float) -> Norm | None:
        """Return the norm at a place; None where the map has no such place."""
        return self.norm(place, eps) if place in self._map else None

    def linear(
        self, place: str, tied: Tensor | None = None, *, is_partial: bool = False, in_floats: bool = False
    ) -> WeightForm:
        """Return the product at a place, in the form that a decode step reads fastest.

        Args:
            place: in the model.
            tied: the plain embedding, which serves where the map has no such place, unless it is in blocks.
            is_partial: leave what a rank has of a sum as it is: something later sums it.
            in_floats: the product is to be written in float32.
        """
        fused = FUSED_FORMS.get(place.rpartition(".")[2], FusedForm())
        options = replace(self._options, in_floats=in_floats, fused=fused)
        if place not in self._map and self._embedding is not None:
            return self._embedding
        if place not in self._map and tied is not None:
            return tied_linear(tied, self._source, LinearNames(self._names("embedding")), options)
        names = LinearNames(self._names(place), self._names(f"{place}.bias"))
        split = self._map[place][0].split
        if self.shared is not None and split is None:
            # each rank computes it for itself: measured choices may differ between them, and so would the bits
            return replace(Plain.load(self._source, names, None, options), choices={})
        if self.shared is not None and split == 1:
            options = replace(options, row_maxima=self.shared.greatest)
        form = load_linear(self._source, names, None, options)
        if self.adapters is not None and place.rpartition(".")[2] not in _NEVER_ADAPTED:
            return self.adapters.around(form, place, self._map[place])
        if self.shared is None or split == 0 or is_partial:
            return form
        return Summed(form.shape, None, form, self.shared, place)

    def cos_sin(self, rope: RopeConfig | None, head_dim: int) -> Tensor:
        """Return `cos_sin_table`, which layers share; no rope is that of a layer that knows nothing of positions."""
        key = (rope, head_dim)
        if key not in self._angles:
            self._angles[key] = cos_sin_table(rope, head_dim, self._positions, self._options.device)
        return self._angles[key]

    def _names(self, place: str) -> tuple[str, ...]:
        return tuple(part.name for part in self._map.get(place, ()))
