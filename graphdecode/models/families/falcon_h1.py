"""Falcon-H1 (TII, 2025): attention and Mamba2 in parallel in every layer, and multipliers on many products."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from graphdecode.cache import KeysAndState, LayerState
from graphdecode.errors import shown
from graphdecode.linear.composite import ScaledLinear
from graphdecode.linear.weight_form import WeightForm
from graphdecode.models.blocks import Addend, Attention, BlockOutput, FeedForward, GatedMlp, Identity, Layer, Norm
from graphdecode.models.config import ModelConfig, UnsupportedModelError, flag, number
from graphdecode.models.families.hybrid import MAMBA2_DEFAULTS, Mamba2Sizes, mamba2_mixer, mamba2_sizes
from graphdecode.models.families.llama import Llama
from graphdecode.models.families.mamba2 import Bamba
from graphdecode.models.fields import is_positive
from graphdecode.models.forward_context import ForwardContext
from graphdecode.models.recurrent_blocks import Mamba2
from graphdecode.models.weights import Weights

_SUM = Identity()  # adds without a norm


class Multipliers(NamedTuple):
    """Multipliers of a layer's products, named as in config.json."""

    attention_in: float
    attention_out: float
    ssm_in: float
    ssm_out: float
    ssm: tuple[float, ...]  # for the gate, x, B, C and steps
    mlp: tuple[float, ...]  # for the gate and the output


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(ModelConfig):
    """The configuration of Falcon-H1."""

    multipliers: Multipliers


@dataclass(frozen=True)
class ParallelLayer(Layer):
    """`x + a * attention(norm(x)) + b * mamba(norm(x))`, then norm and a scaled MLP."""

    input_norm: Norm
    attention: Attention
    mamba: Mamba2
    mlp_norm: Norm
    mlp: FeedForward

    def __call__(self, x: Addend, residual: Tensor, context: ForwardContext, cache: LayerState) -> BlockOutput:
        assert isinstance(cache, KeysAndState)
        hidden, residual = self.input_norm(x, residual, context, into=self.mamba.in_proj)
        read = self.mamba.read(hidden, context, cache.states)  # before the sum, which takes the norm's memory
        x, residual = self.attention(hidden, residual, context, cache.pages)
        _, residual = _SUM(x, residual, context)
        x, residual = self.mamba.output_linear(self.mamba.out_proj, read, residual, context)
        hidden, residual = self.mlp_norm(x, residual, context, into=self.mlp.input_linear)
        return self.mlp(hidden, residual, context)

    def append(self, x: Addend, residual: Tensor, context: ForwardContext, cache: LayerState) -> None:
        assert isinstance(cache, KeysAndState)
        hidden, residual = self.input_norm(x, residual, context, into=self.mamba.in_proj)
        self.mamba.append(hidden, residual, context, cache.states)
        self.attention.append(hidden, residual, context, cache.pages)


class FalconH1(Bamba):
    """Falcon-H1."""

    architecture = "FalconH1ForCausalLM"
    has_partial_rotary = False
    defaults: ClassVar[dict[str, Any]] = MAMBA2_DEFAULTS | {
        "max_position_embeddings": 8192,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "mamba_d_ssm": 1024,
    }

    def config(self, settings: dict[str, Any]) -> FalconH1Config:
        multipliers = Multipliers(
            attention_in=number(settings, "attention_in_multiplier", 1.0),
            attention_out=number(settings, "attention_out_multiplier", 1.0),
            ssm_in=number(settings, "ssm_in_multiplier", 1.0),
            ssm_out=number(settings, "ssm_out_multiplier", 1.0),
            ssm=_multipliers(settings, "ssm_multipliers", 5),
            mlp=_multipliers(settings, "mlp_multipliers", 2),
        )
        return FalconH1Config(**vars(super().config(settings)), multipliers=multipliers)

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        sizes = mamba2_sizes(
            settings,
            out_bias=flag(settings, "projectors_bias", False),
            has_norm=flag(settings, "mamba_rms_norm", False),
            norm_first=flag(settings, "mamba_norm_before_gate", True),
        )
        return Llama.options(self, settings, fields) | {
            "recurrent": (replace(sizes.state, beside_keys=True),) * fields["num_hidden_layers"],
            "mixer": sizes,
            # rotation is linear: a multiplier of keys multiplies the logits
            "sm_scale": number(settings, "key_multiplier", 1.0) / fields["head_dim"] ** 0.5,
            "embedding_scale": number(settings, "embedding_multiplier", 1.0),
            "logits_scale": number(settings, "lm_head_multiplier", 1.0),
        }

    def layer(self, config: ModelConfig, weights: Weights, index: int) -> Layer:
        assert isinstance(config, FalconH1Config)
        at, eps, multipliers = f"layers.{index}.", config.rms_norm_eps, config.multipliers
        attention, mamba = self.attention(config, weights, index), mamba2_mixer(config, weights, at)
        sizes: Mamba2Sizes = config.mixer
        of_groups, ff = sizes.groups * sizes.states, config.intermediate_size
        sections = (sizes.channels, sizes.channels, of_groups, of_groups, sizes.heads)
        qkv = _scaled(weights, f"{at}qkv", attention.qkv, config.qkv_bias, multipliers.attention_in)
        in_proj = _scaled(
            weights, f"{at}in_proj", mamba.in_proj, sizes.proj_bias, multipliers.ssm_in, sections, multipliers.ssm
        )
        gate_up = weights.linear(f"{at}gate_up")
        gate_up = _scaled(weights, f"{at}gate_up", gate_up, False, 1.0, (ff, ff), (multipliers.mlp[0], 1.0))
        return ParallelLayer(
            input_norm=weights.norm(f"{at}before_attention", eps),
            attention=replace(attention, qkv=qkv, output_scale=multipliers.attention_out),
            mamba=replace(mamba, in_proj=in_proj, output_scale=multipliers.ssm_out),
            mlp_norm=weights.norm(f"{at}before_mlp", eps),
            mlp=GatedMlp(gate_up, weights.linear(f"{at}down"), config.activation, output_scale=multipliers.mlp[1]),
        )


def _scaled(
    weights: Weights,
    param_name: str,
    form: WeightForm,
    has_bias: bool,
    of_input: float,
    sections: tuple[int, ...] = (),
    multipliers: tuple[float, ...] = (),
) -> WeightForm:
    """Scale the input of a product, not its bias, and then sections of its output."""
    if of_input == 1.0 and all(multiplier == 1.0 for multiplier in multipliers):
        return form
    scale = torch.ones(form.out_features, device=weights.device)
    if sections:
        scale = torch.cat([part * each for part, each in zip(scale.split(sections), multipliers, strict=True)])
    shift = None
    if has_bias and of_input != 1.0:
        shift = weights.tensor(f"{param_name}.bias", torch.float32) * scale * (1.0 - of_input)
    return ScaledLinear(form.shape, None, form, scale * of_input, shift)


def _multipliers(settings: dict[str, Any], name: str, size: int) -> tuple[float, ...]:
    values = settings.get(name)
    if values is None:
        return (1.0,) * size
    if not isinstance(values, list) or len(values) != size or not all(map(is_positive, values)):
        raise UnsupportedModelError(f"{name} must be {size} numbers > 0, got {shown(values)}")
    return tuple(map(float, values))
