"""Qwen3.5 (text) and Qwen3-Next (Qwen Team, 2025): gated delta nets, and gated attention in every fourth layer."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from graphdecode.cache import Recurrent
from graphdecode.models.blocks import Mixer, Norm
from graphdecode.models.config import ModelConfig, choice, count
from graphdecode.models.families.hybrid import Hybrid, conv_weight, recurrent_layers
from graphdecode.models.families.llama import head_run
from graphdecode.models.families.sparse import Sparse
from graphdecode.models.recurrent_blocks import DeltaNet, GatedAttention
from graphdecode.models.weight_map import Part, Run, WeightMap, product
from graphdecode.models.weights import Weights


class DeltaSizes(NamedTuple):
    """Sizes of a gated delta net."""

    key_heads: int
    key_dim: int  # channels of a key head
    heads: int  # value heads
    value_dim: int  # channels of a value head
    width: int  # kernel size of the convolution
    strength: float = 1.0  # largest strength of the delta rule

    @property
    def key_size(self) -> int:
        """Channels of all keys."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Channels of all values."""
        return self.heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of queries, keys and values."""
        return 2 * self.key_size + self.value_size

    def split(self, count: int) -> "DeltaSizes | None":
        """Return the sizes of one of `count` shards; None if the heads cannot be split."""
        if self.key_heads % count or self.heads % count:
            return None
        return self._replace(key_heads=self.key_heads // count, heads=self.heads // count)

    @property
    def qkv(self) -> tuple[Run, ...]:
        """The channels of queries, keys and values, which are split separately."""
        return Run(self.key_size), Run(self.key_size), Run(self.value_size)

    @property
    def state(self) -> Recurrent:
        """The recurrent state of a layer."""
        shapes = (self.width - 1, self.conv_channels), (self.heads, self.key_dim, self.value_dim)
        return Recurrent((("conv_state", shapes[0]), ("delta_state", shapes[1])))


class Qwen35(Hybrid):
    """Qwen3.5's decoder, dense."""

    architecture = "Qwen3_5ForCausalLM"
    norm_offset = 1.0
    has_head_norms = True
    has_partial_rotary = True
    defaults: ClassVar[dict[str, Any]] = {
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
    }

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        choice(settings, "hidden_act", ("silu", "swish"))  # also of the convolution
        layers, every = fields["num_hidden_layers"], count(settings, "full_attention_interval", 4)
        kinds = settings.get("layer_types") or [
            "full_attention" if (index + 1) % every == 0 else "linear_attention" for index in range(layers)
        ]
        names = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "conv_kernel_dim")
        sizes = DeltaSizes(*(count(settings, f"linear_{name}") for name in names))
        return super().options(settings, fields) | recurrent_layers(kinds, layers, sizes, ("linear_attention",))

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        """Return the weight map of one layer; queries include their gates."""
        q, kv = config.num_attention_heads * config.head_dim, (head_run(config),)
        rows: dict[str, Any] = {"q_proj": 2 * q, "k_proj": kv, "v_proj": kv}
        names = {f"{name}self_attn.{module}": size for module, size in rows.items()}
        qkv = product(f"{at}qkv", names, config.hidden_size, split=0, bias=config.qkv_bias)
        return super().layer_weights(config, at, name) | qkv

    def attention(self, config: ModelConfig, weights: Weights, index: int) -> GatedAttention:
        ungated = super().attention(config, weights, index)
        heads, dim, device = config.num_attention_heads, config.head_dim, weights.device
        columns = torch.arange(ungated.qkv.out_features, device=device)
        queries, gates = columns[: 2 * heads * dim].view(heads, 2, dim).unbind(1)
        order = torch.cat((queries.flatten(), columns[2 * heads * dim :]))
        return GatedAttention(**vars(ungated), qkv_order=order, gate_order=gates.flatten())

    def mixer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        sizes, prefix, hidden = config.mixer, f"{name}linear_attn.", config.hidden_size
        return {
            f"{at}conv": (Part(f"{prefix}conv1d.weight", (sizes.conv_channels, 1, sizes.width), 0, sizes.qkv),),
            f"{at}a_log": (Part(f"{prefix}A_log", (sizes.heads,), 0),),
            f"{at}dt_bias": (Part(f"{prefix}dt_bias", (sizes.heads,), 0),),
            f"{at}mixer_norm": (Part(f"{prefix}norm.weight", (sizes.value_dim,)),),
            **product(f"{at}in_proj", self.projections(sizes, prefix), hidden, split=0),
            **product(f"{at}out_proj", {f"{prefix}out_proj": hidden}, sizes.value_size, split=1),
        }

    def projections(self, sizes: DeltaSizes, prefix: str) -> dict[str, int | tuple[Run, ...]]:
        """Return the tensors of the first product, and the rows of each; see `product`."""
        heads = sizes.heads
        rows: dict[str, int | tuple[Run, ...]] = {"qkv": sizes.qkv, "z": sizes.value_size, "a": heads, "b": heads}
        return {f"{prefix}in_proj_{part}": size for part, size in rows.items()}

    def order(self, sizes: DeltaSizes, device: torch.device) -> Tensor | None:
        """Return the order of the first product's columns; see `DeltaNet`."""
        return None

    def recurrent_mixer(self, config: ModelConfig, weights: Weights, at: str) -> Mixer:
        order = self.order(config.mixer, weights.device)
        return delta_net(config.mixer, weights, at, config.rms_norm_eps, order)


def delta_net(sizes: DeltaSizes, weights: Weights, at: str, eps: float, order: Tensor | None = None) -> DeltaNet:
    """Return the delta net at prefix `at`; `order`: see `DeltaNet`."""
    return DeltaNet(
        in_proj=weights.linear(f"{at}in_proj", quantize_separately=True),
        order=order,
        conv=conv_weight(weights, f"{at}conv"),
        a_log=weights.tensor(f"{at}a_log", torch.float32),
        dt_bias=weights.tensor(f"{at}dt_bias", torch.float32),
        norm=Norm(weights.tensor(f"{at}mixer_norm", torch.float32), eps),
        out_proj=weights.linear(f"{at}out_proj"),
        strength=sizes.strength,
    )


class Qwen3Next(Sparse, Qwen35):
    """Qwen3-Next, with experts; products of delta nets are interleaved by key heads."""

    architecture = "Qwen3NextForCausalLM"
    defaults: ClassVar[dict[str, Any]] = Qwen35.defaults | {
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "shared_expert_intermediate_size": 512,
    }

    def projections(self, sizes: DeltaSizes, prefix: str) -> dict[str, int | tuple[Run, ...]]:
        return {f"{prefix}in_proj_qkvz": sizes.conv_channels + sizes.value_size, f"{prefix}in_proj_ba": 2 * sizes.heads}

    def order(self, sizes: DeltaSizes, device: torch.device) -> Tensor:
        each, whole = sizes.heads // sizes.key_heads, sizes.conv_channels + sizes.value_size
        columns = torch.arange(whole + 2 * sizes.heads, device=device)
        widths = (sizes.key_dim, sizes.key_dim, each * sizes.value_dim, each * sizes.value_dim)
        qkvz = columns[:whole].view(sizes.key_heads, -1).split(widths, 1)
        b, a = columns[whole:].view(sizes.key_heads, -1).split(each, 1)
        return torch.cat([part.flatten() for part in (*qkvz, a, b)])
