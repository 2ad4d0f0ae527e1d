"""Mixtures of experts: fields, tensor names and layers, shared by their families."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from graphdecode.linear.experts import Gate
from graphdecode.linear.weight_form import Stored
from graphdecode.models.blocks import Experts, FeedForward, GatedMlp, SparseMlp
from graphdecode.models.config import ExpertsConfig, ModelConfig, UnsupportedModelError, count, flag
from graphdecode.models.families.llama import Llama
from graphdecode.models.fields import layer_numbers
from graphdecode.models.weight_map import Part, Run, WeightMap, product
from graphdecode.models.weights import Weights

_MOST_EXPERTS = 2**17  # in all layers: several times the largest models; each has its own tensors


class Sparse(Llama):
    """A Llama with experts instead of MLPs in all or some layers."""

    mlp: ClassVar[str] = "mlp."  # prefix of the experts' and the router's tensors within a layer
    stacked_mlp: ClassVar[str] = "mlp."  # the same where experts are stacked, as by transformers 5
    stacks: ClassVar[tuple[str, str]] = ("experts.gate_up_proj", "experts.down_proj")  # below it
    # modules of an expert's first product, gate first
    gate_up: ClassVar[tuple[str, str]] = ("gate_proj", "up_proj")
    down: ClassVar[str] = "down_proj"  # module of its second product
    router: ClassVar[str] = "gate"  # module of the router
    shared_expert: ClassVar[str] = "shared_expert"  # module of the expert that all tokens take
    gates_shared_expert: ClassVar[bool] = True  # whether a row of the router scales its output
    has_biases: ClassVar[bool] = False  # whether router and experts have biases
    block: ClassVar[type[SparseMlp]] = SparseMlp

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        experts = self.experts(settings, fields)
        if experts is None:
            return super().options(settings, fields)
        if experts.top_k > experts.count:
            raise UnsupportedModelError(f"num_experts_per_tok {experts.top_k} is more than the {experts.count} experts")
        all_experts = experts.count * sum(experts.layers)
        if all_experts > _MOST_EXPERTS:
            raise UnsupportedModelError(f"at most {_MOST_EXPERTS} experts are run, these layers have {all_experts}")
        return super().options(settings, fields) | {"experts": experts}

    def experts(self, settings: dict[str, Any], fields: dict[str, Any]) -> ExpertsConfig | None:
        """Return the configuration of the experts, if any; see `options`."""
        layers = fields["num_hidden_layers"]
        dense, every = layer_numbers(settings, "mlp_only_layers") or [], count(settings, "decoder_sparse_step")
        shared = settings.get("shared_expert_intermediate_size")
        return ExpertsConfig(
            count=count(settings, "num_local_experts", settings.get("num_experts")),
            top_k=count(settings, "num_experts_per_tok"),
            intermediate_size=count(settings, "moe_intermediate_size"),
            renormalize=flag(settings, "norm_topk_prob", False),
            shared_intermediate_size=0 if shared is None else count(settings, "shared_expert_intermediate_size"),
            layers=tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(layers)),
        )

    def weights(self, config: ModelConfig) -> WeightMap:
        return self.sparse_weights(config, is_stacked=False)

    def weights_in(self, config: ModelConfig, tensors: Mapping[str, Stored]) -> WeightMap:
        """Return the weight map for a source, whose experts may be stacked."""
        return self.sparse_weights(config, is_stacked=any(name.endswith(".experts.down_proj") for name in tensors))

    def feed_forward(self, config: ModelConfig, weights: Weights, index: int) -> FeedForward:
        experts, at = config.experts, f"layers.{index}."
        if experts is None or not experts.layers[index]:
            return super().feed_forward(config, weights, index)
        shared = None
        if experts.shared_intermediate_size:
            gate_up, down = weights.linear(f"{at}gate_up"), weights.linear(f"{at}down", is_partial=True)
            shared = GatedMlp(gate_up, down, config.activation)
        sparse = self.sparse_mlp(config, weights, at, shared)
        return replace(sparse, collectives=weights.collectives, param_name=f"{at}experts")

    def sparse_mlp(self, config: ModelConfig, weights: Weights, at: str, shared: GatedMlp | None) -> SparseMlp:
        """Return router and experts of the layer whose names begin with `at`, beside the shared expert, if any."""
        router, block = weights.linear(f"{at}router"), self.expert_block(config, weights, at)
        return self.block(router, block, shared, experts_of(config).renormalize)

    def expert_block(self, config: ModelConfig, weights: Weights, at: str) -> Experts:
        """Return the experts of the layer at prefix `at`."""
        experts, layout = experts_of(config), self.stack_layout
        clamped = Gate("swiglu_clamped", experts.alpha, experts.limit)
        return Experts(
            gate_up=weights.experts(f"{at}experts.gate_up", experts, layout, is_gated=True),
            down=weights.experts(f"{at}experts.down", experts, layout, is_gated=False),
            count=experts.count,
            top_k=experts.top_k,
            width=experts.intermediate_size,
            gate=clamped if experts.limit > 0.0 else Gate(config.activation),
        )

    def expert_weights(self, config: ModelConfig, at: str, name: str, *, is_stacked: bool) -> WeightMap:
        """Return the weight map of one layer's router and experts."""
        experts, hidden = experts_of(config), config.hidden_size
        width, shared = experts.intermediate_size, experts.shared_intermediate_size
        mlp = f"{name}{self.stacked_mlp if is_stacked else self.mlp}"
        router = {f"{mlp}{self.router}": experts.count}
        weight_map: WeightMap = {}
        if shared:
            if self.gates_shared_expert:
                router[f"{mlp}shared_expert_gate"] = 1
            gate_up = {f"{mlp}{self.shared_expert}.{part}": shared for part in self.gate_up}
            weight_map |= product(f"{at}gate_up", gate_up, hidden, split=0)
            weight_map |= product(f"{at}down", {f"{mlp}{self.shared_expert}.{self.down}": hidden}, shared, split=1)
        weight_map |= product(f"{at}router", router, hidden, split=None, bias=self.has_biases)
        if is_stacked:
            return weight_map | self.stacked_weights(experts, hidden, f"{at}experts.", mlp)
        each = [f"{mlp}experts.{expert}." for expert in range(experts.count)]
        gate_up = {f"{expert}{part}": width for expert in each for part in self.gate_up}
        down = {f"{expert}{self.down}": hidden for expert in each}
        weight_map |= product(f"{at}experts.gate_up", gate_up, hidden, split=0, bias=self.has_biases)
        return weight_map | product(f"{at}experts.down", down, width, split=1, bias=self.has_biases)

    def stacked_weights(self, experts: ExpertsConfig, hidden: int, at: str, mlp: str) -> WeightMap:
        """Return the weight map of one layer's stacks of experts, for their layout see `StackLayout`."""
        weight_map: WeightMap = {}
        width, halves = experts.intermediate_size, (Run(experts.intermediate_size),) * 2
        gate_up, down = (2 * width, hidden), (hidden, width)
        for name, stack, shape, split in zip(("gate_up", "down"), self.stacks, (gate_up, down), (0, 1), strict=True):
            runs = halves if split == 0 and not self.stack_layout.interleaved else ()
            stored, axis = (shape[::-1], 1 - split) if self.stack_layout.transposed else (shape, split)
            weight_map[f"{at}{name}"] = (Part(f"{mlp}{stack}", (experts.count, *stored), axis + 1, runs),)
            if self.has_biases:
                bias = Part(f"{mlp}{stack}_bias", (experts.count, shape[0]), None if split else 1, runs, split == 1)
                weight_map[f"{at}{name}.bias"] = (bias,)
        return weight_map

    def sparse_weights(self, config: ModelConfig, *, is_stacked: bool) -> WeightMap:
        """Return the weight map, with stacked experts or separate ones."""
        weight_map = super().weights(config)
        for index, is_sparse in enumerate(config.experts.layers if config.experts is not None else ()):
            if is_sparse:
                at = f"layers.{index}."
                for dense in (f"{at}gate_up", f"{at}down"):
                    weight_map.pop(dense)
                    weight_map.pop(f"{dense}.bias", None)
                weight_map |= self.expert_weights(config, at, f"model.layers.{index}.", is_stacked=is_stacked)
        return weight_map


def experts_everywhere(settings: dict[str, Any], fields: dict[str, Any]) -> ExpertsConfig:
    """Return the configuration of experts in all layers, each of the model's intermediate size."""
    return ExpertsConfig(
        count=count(settings, "num_local_experts"),
        top_k=count(settings, "num_experts_per_tok"),
        intermediate_size=fields["intermediate_size"],
        renormalize=True,
        layers=(True,) * fields["num_hidden_layers"],
    )


def experts_of(config: ModelConfig) -> ExpertsConfig:
    """Return the configuration of the experts of a model that has them."""
    if config.experts is None:
        raise UnsupportedModelError(f"{config.architecture} has no experts")
    return config.experts
