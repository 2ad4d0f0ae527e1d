"""A model's weights, read from a source by their name in the model."""

from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from graphdecode.distributed import Collectives
from graphdecode.errors import ArgumentError, resembling
from graphdecode.linear.composite import MergedLinear, RowParallelLinear
from graphdecode.linear.experts import ExpertForm, ExpertNames, StackLayout, UnquantizedExperts
from graphdecode.linear.forms import load_experts, load_linear, quantized_form, tied_linear
from graphdecode.linear.lora import LoRAEmbedding
from graphdecode.linear.small_linear_timing import FUSED_FORMS, FusedForm
from graphdecode.linear.unquantized import UnquantizedLinear
from graphdecode.linear.weight_form import FormOptions, LinearNames, RowTable, TensorSource, WeightForm, read_fused
from graphdecode.models.adapters import AdapterSlots
from graphdecode.models.blocks import Norm
from graphdecode.models.config import ExpertsConfig
from graphdecode.models.rope import RopeConfig, cos_sin_table
from graphdecode.models.weight_map import Part, WeightMap

_ADAPTED_WHOLE = ("embedding", "lm_head")  # not by rank


def can_adapt(param_name: str) -> bool:
    """Whether a product can have adapters of each rank's part; experts' products can only if asked for."""
    return param_name not in _ADAPTED_WHOLE and not is_of_experts(param_name)


def is_of_experts(param_name: str) -> bool:
    """Whether a name is of weights or biases of single experts."""
    return "experts" in param_name.split(".")[:-1]


class Weights:
    """The weights of a model, from which a family builds its layers.

    Args:
        source: the tensors that the map names.
        weight_map: the model's weight map.
        options: options of the weight forms.
        positions: positions of the rotary table.
        norm_offset: added to all norm weights; 1 if the source stores `weight - 1`.
        collectives: the ranks' collectives, if the source is a shard.
        adapters: adapter slots, with which products are registered.
    """

    def __init__(
        self,
        source: TensorSource,
        weight_map: WeightMap,
        options: FormOptions,
        positions: int,
        norm_offset: float = 0.0,
        collectives: Collectives | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.collectives, self.adapters = collectives, adapters
        self.dtype, self.device = options.dtype, options.device  # of the activations
        self._source = source
        self._map = weight_map
        self._options = options
        self._positions = positions
        self._norm_offset = norm_offset
        self._embedding: WeightForm | None = None  # set if quantized
        self._angles: dict[tuple[RopeConfig | None, int], Tensor] = {}

    def tensor(self, param_name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor in new memory; the default dtype is the model's."""
        return read_fused(self._source, self._names(param_name), dtype or self.dtype, self.device)

    def embedding_rows(self) -> RowTable | None:
        """Return the quantized embedding, if a form supports it; a tied output layer shares it."""
        names = LinearNames(self._names("embedding"))
        if quantized_form(self._source, names, self._options) is None:
            return None
        form = load_linear(self._source, names, self._options)
        if form.row_table is not None:
            self._embedding = form
        return form.row_table

    def embedding_adapters(self, vocab_size: int) -> LoRAEmbedding | None:
        """Return adapter slots of the whole embedding; None without adapters."""
        part = self._map["embedding"][0]
        of_whole = Part(part.name, (vocab_size, part.shape[1]))
        return None if self.adapters is None else self.adapters.of_embedding(of_whole)

    def adapted_head(self, form: WeightForm) -> WeightForm:
        """Return the whole output layer with adapter slots; PEFT adapts a tied one separately."""
        parts = (Part("lm_head.weight", form.shape),)
        return form if self.adapters is None else self.adapters.wrap(form, "lm_head", parts)

    def experts(self, param_name: str, experts: ExpertsConfig, layout: StackLayout, *, is_gated: bool) -> ExpertForm:
        """Return the product of all experts, with its bias if the map has one; see `ExpertNames`.

        `param_name` has the parts of each expert in turn, or one stack.
        """
        names = ExpertNames(self._names(param_name), experts.count, is_gated, layout)
        bias = self.tensor(f"{param_name}.bias").view(experts.count, -1) if f"{param_name}.bias" in self._map else None
        if bias is not None and names.is_stack and names.interleaves:
            bias = torch.cat((bias[:, ::2], bias[:, 1::2]), dim=1)
        form = load_experts(self._source, names, bias, self._options)
        return form if self.adapters is None else self.adapters.wrap_experts(form, param_name, names)

    def by_head(self, weight: Tensor) -> ExpertForm:
        """Return the product of each head with a matrix of its own, [heads, out_features, in_features]."""
        heads, out_features, in_features = weight.shape
        return UnquantizedExperts.of(weight, (heads, out_features, in_features), self._options.batch_invariant)

    def adapted_heads(
        self, param_name: str, to_keys: ExpertForm, to_values: ExpertForm
    ) -> tuple[ExpertForm, ExpertForm]:
        """Return two products by head that are made of one weight, with its adapter slots, if any."""
        if self.adapters is None:
            return to_keys, to_values
        return self.adapters.wrap_heads(to_keys, to_values, param_name, self._map[param_name][0])

    def norm(self, param_name: str, eps: float) -> Norm:
        """Return a norm, in float32."""
        return Norm(self.tensor(param_name, torch.float32).add_(self._norm_offset), eps)

    def optional_norm(self, param_name: str, eps: float) -> Norm | None:
        """Return a norm; None if the map has none of this name."""
        return self.norm(param_name, eps) if param_name in self._map else None

    def linear(
        self,
        param_name: str,
        tied: Tensor | None = None,
        *,
        is_partial: bool = False,
        in_floats: bool = False,
        quantize_separately: bool = False,
    ) -> WeightForm:
        """Return a product in the fastest form for decode steps.

        Args:
            param_name: name in the model.
            tied: the plain embedding, used if the map has no `param_name` and the embedding is not quantized.
            is_partial: the caller sums the ranks' products.
            in_floats: the product is written in float32.
            quantize_separately: each tensor stays quantized that a form keeps so, whatever the others; without a bias.
        """
        fused = FUSED_FORMS.get(param_name.rpartition(".")[2], FusedForm())
        options = replace(self._options, in_floats=in_floats, fused=fused)
        if param_name not in self._map and tied is not None:
            if self._embedding is not None:
                return self._embedding
            return tied_linear(tied, self._source, LinearNames(self._names("embedding")), options)
        bias = f"{param_name}.bias"
        names = LinearNames(self._names(param_name), self._names(bias) if bias in self._map else ())
        split = self._map[param_name][0].split
        if self.collectives is not None and split is None:
            # each rank computes all of it, with the same bits: no measured choices, which may differ
            form: WeightForm = replace(UnquantizedLinear.load(self._source, names, options), choices={})
        elif self.collectives is not None and split == 1:
            form = load_linear(self._source, names, replace(options, row_maxima=self.collectives.greatest))
            if not is_partial:
                form = RowParallelLinear(form.shape, None, form, self.collectives, param_name)
        elif quantize_separately:
            form = MergedLinear.wrap(self._adjacent(names.weights, options))
        else:
            form = load_linear(self._source, names, options)
        if self.adapters is not None and can_adapt(param_name):
            return self.adapters.wrap(form, param_name, self._map[param_name])
        return form

    def cos_sin(self, rope: RopeConfig | None, head_dim: int) -> Tensor:
        """Return `cos_sin_table`, which layers share; None: without positions."""
        key = (rope, head_dim)
        if key not in self._angles:
            self._angles[key] = cos_sin_table(rope, head_dim, self._positions, self.device)
        return self._angles[key]

    def _adjacent(self, weights: tuple[str, ...], options: FormOptions) -> list[WeightForm]:
        """Return products of adjacent tensors; each that a form can keep quantized stays so."""
        forms: list[WeightForm] = []
        for kind, run in groupby(weights, lambda name: quantized_form(self._source, LinearNames((name,)), options)):
            names = tuple(run)
            whole, half = load_linear(self._source, LinearNames(names), options), len(names) // 2
            if kind is None or isinstance(whole, kind) or not half:
                forms.append(whole)
                continue
            separate = self._adjacent(names[:half], options) + self._adjacent(names[half:], options)
            forms += separate if any(isinstance(form, kind) for form in separate) else [whole]
        return forms

    def _names(self, param_name: str) -> tuple[str, ...]:
        if param_name not in self._map:
            raise ArgumentError(f"the weight map has no {param_name!r}{resembling(param_name, self._map)}")
        return tuple(part.name for part in self._map[param_name])
