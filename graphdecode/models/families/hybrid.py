"""Decoders in which some layers have a recurrent state instead of keys and values; shared by their families."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from graphdecode.cache import Recurrent
from graphdecode.errors import shown
from graphdecode.kernels.recurrent.selective_scan import ScanWeights
from graphdecode.models.blocks import Mixer, Norm
from graphdecode.models.config import ModelConfig, UnsupportedModelError, choice, count, flag, layer_kinds
from graphdecode.models.families.llama import Llama
from graphdecode.models.recurrent_blocks import JointlyNormedMamba2, Mamba2
from graphdecode.models.weight_map import Part, Run, WeightMap, product
from graphdecode.models.weights import Weights

MAMBA2_DEFAULTS = {  # for configurations with Bamba's field names
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
OF_ATTENTION = ("qkv", "o", "q_norm", "k_norm", "sinks")  # parts of a layer


class Hybrid(Llama):
    """A Llama with other mixers in the layers of `ModelConfig.recurrent`."""

    attention_only: ClassVar[tuple[str, ...]] = OF_ATTENTION  # parts that recurrent layers without keys lack

    @abstractmethod
    def mixer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        """Return the weight map of a recurrent layer's mixer; see `Llama.layer_weights`."""

    @abstractmethod
    def recurrent_mixer(self, config: ModelConfig, weights: Weights, at: str) -> Mixer:
        """Return the mixer of the recurrent layer at prefix `at`."""

    def weights(self, config: ModelConfig) -> WeightMap:
        weight_map = super().weights(config)
        for index, state in enumerate(config.recurrent):
            at, name = f"layers.{index}.", f"model.layers.{index}."
            if state is None:
                continue
            if not state.beside_keys:
                absent = tuple(f"{at}{param_name}{end}" for param_name in self.attention_only for end in ("", ".bias"))
                weight_map = {param_name: part for param_name, part in weight_map.items() if param_name not in absent}
            weight_map |= self.mixer_weights(config, at, name)
        return weight_map

    def mixer(self, config: ModelConfig, weights: Weights, index: int) -> Mixer:
        if config.has_state(index):
            return self.recurrent_mixer(config, weights, f"layers.{index}.")
        return self.attention(config, weights, index)


class Mamba2Hybrid(Hybrid):
    """A hybrid with Mamba2 mixers."""

    def mixer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        return mamba2_weights(config, at, f"{name}mamba.")

    def recurrent_mixer(self, config: ModelConfig, weights: Weights, at: str) -> Mixer:
        return mamba2_mixer(config, weights, at)


def recurrent_layers(
    kinds: Any, layers: int, sizes: Any, recurrent: Sequence[str], attention: Sequence[str] = ("full_attention",)
) -> dict[str, Any]:
    """Return `recurrent` and `mixer` of the configuration, given the kinds of layers and the sizes of a mixer.

    Raises:
        UnsupportedModelError: the number of kinds is wrong, or a kind is unknown.
    """
    kinds = layer_kinds(kinds, layers, (*recurrent, *attention))
    states = tuple(sizes.state if kind in recurrent else None for kind in kinds)
    return {"recurrent": states if any(states) else (), "mixer": sizes}


def renamed(weight_map: WeightMap, layer: str, names: Mapping[str, str]) -> WeightMap:
    """Rename modules in a weight map; tensor names begin with `layer`."""

    def other(part: Part) -> Part:
        module = part.name.removeprefix(layer)
        prefix = next((prefix for prefix in names if module.startswith(f"{prefix}.")), None)
        return part if prefix is None else part._replace(name=layer + names[prefix] + module.removeprefix(prefix))

    return {param_name: tuple(map(other, parts)) for param_name, parts in weight_map.items()}


def conv_weight(weights: Weights, param_name: str) -> Tensor:
    """Return the weight of a convolution, float32 [width, channels]; stored as [channels, 1, width]."""
    return weights.tensor(param_name, torch.float32).squeeze(1).T.contiguous()


class Mamba2Sizes(NamedTuple):
    """Sizes of a Mamba2 mixer."""

    heads: int
    head_dim: int  # channels of a head
    groups: int  # groups of heads that share B and C
    states: int  # channels of a head's state
    width: int  # kernel size of the convolution
    conv_bias: bool
    proj_bias: bool  # of the input projection
    out_bias: bool  # of the output projection
    has_norm: bool = True  # over the heads' outputs, in `groups` groups of channels
    norm_first: bool = False  # the norm comes before the gate
    step_limits: tuple[float, float] = (0.0, float("inf"))
    ranks_of_group: int = 1  # ranks that share a group

    @property
    def channels(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of x, B and C."""
        return self.channels + 2 * self.groups * self.states

    def split(self, count: int) -> "Mamba2Sizes | None":
        """Return the sizes of one of `count` ranks; None if the heads cannot be split."""
        if self.heads % count or (self.groups % count and count % self.groups):
            return None
        groups, ranks = max(self.groups // count, 1), max(count // self.groups, 1)
        return self._replace(heads=self.heads // count, groups=groups, ranks_of_group=ranks)

    @property
    def state(self) -> Recurrent:
        """The recurrent state of a layer."""
        shapes = (self.width - 1, self.conv_channels), (self.heads, self.states, self.head_dim)
        return Recurrent((("conv_state", shapes[0]), ("ssm_state", shapes[1])))


def mamba2_weights(config: ModelConfig, at: str, name: str) -> WeightMap:
    """Return the weight map of a Mamba2 mixer whose tensors' names begin with `name`."""
    sizes, hidden = config.mixer, config.hidden_size
    group = Run(sizes.groups * sizes.states, sizes.groups)
    xbc = (Run(sizes.channels), group, group)
    rows = (Run(sizes.channels), *xbc, Run(sizes.heads))
    vectors = {"a_log": "A_log", "skip": "D", "dt_bias": "dt_bias"}
    weight_map: WeightMap = {
        f"{at}{param_name}": (Part(f"{name}{tensor}", (sizes.heads,), 0),) for param_name, tensor in vectors.items()
    }
    weight_map[f"{at}conv"] = (Part(f"{name}conv1d.weight", (sizes.conv_channels, 1, sizes.width), 0, xbc),)
    if sizes.conv_bias:
        weight_map[f"{at}conv_bias"] = (Part(f"{name}conv1d.bias", (sizes.conv_channels,), 0, xbc),)
    if sizes.has_norm:
        weight_map[f"{at}mixer_norm"] = (Part(f"{name}norm.weight", (sizes.channels,), 0),)
    return weight_map | {
        **product(f"{at}in_proj", {f"{name}in_proj": rows}, hidden, split=0, bias=sizes.proj_bias),
        **product(f"{at}out_proj", {f"{name}out_proj": hidden}, sizes.channels, split=1, bias=sizes.out_bias),
    }


def mamba2_mixer(config: ModelConfig, weights: Weights, at: str) -> Mamba2:
    """Return the Mamba2 mixer at prefix `at`."""
    sizes = config.mixer
    heads = ScanWeights(
        *(weights.tensor(f"{at}{param_name}", torch.float32) for param_name in ("a_log", "skip", "dt_bias"))
    )
    mixer = Mamba2(
        in_proj=weights.linear(f"{at}in_proj"),
        conv=conv_weight(weights, f"{at}conv"),
        conv_bias=weights.tensor(f"{at}conv_bias", torch.float32) if sizes.conv_bias else None,
        heads=heads,
        norm=Norm(weights.tensor(f"{at}mixer_norm", torch.float32), config.rms_norm_eps) if sizes.has_norm else None,
        group=sizes.channels // sizes.groups,
        norm_first=sizes.norm_first,
        step_limits=sizes.step_limits,
        out_proj=weights.linear(f"{at}out_proj"),
    )
    if weights.collectives is None or sizes.ranks_of_group == 1 or mixer.norm is None:
        return mixer
    name, ranks = f"{at}mixer_norm", sizes.ranks_of_group
    return JointlyNormedMamba2(**vars(mixer), collectives=weights.collectives, param_name=name, ranks_of_group=ranks)


def mamba2_sizes(settings: dict[str, Any], **changes: Any) -> Mamba2Sizes:
    """Return the sizes, from Bamba's field names.

    Raises:
        UnsupportedModelError: the heads do not have `mamba_d_ssm`, by default `mamba_expand * hidden_size`, channels,
            or the activation is not SiLU.
    """
    choice(settings, "hidden_act", ("silu", "swish"))  # also of the convolution
    expanded = count(settings, "mamba_expand") * count(settings, "hidden_size")
    heads, channels = count(settings, "mamba_n_heads"), count(settings, "mamba_d_ssm", expanded)
    d_head = settings.get("mamba_d_head", "auto")
    head_dim = channels // heads if d_head == "auto" else count(settings, "mamba_d_head")
    if heads * head_dim != channels:
        raise UnsupportedModelError(
            f"mamba_n_heads {heads} of mamba_d_head {head_dim} must make up {channels}, which is mamba_d_ssm or "
            "mamba_expand * hidden_size"
        )
    stated = settings.get("time_step_limit")
    if stated is not None and not (isinstance(stated, (list, tuple)) and len(stated) == 2):
        raise UnsupportedModelError(f"time_step_limit must be two numbers, got {shown(stated)}")
    limits = [_unbounded(limit) for limit in stated or (0.0, float("inf"))]
    sizes = Mamba2Sizes(
        heads,
        head_dim,
        groups=count(settings, "mamba_n_groups"),
        states=count(settings, "mamba_d_state"),
        width=count(settings, "mamba_d_conv"),
        conv_bias=flag(settings, "mamba_conv_bias", True),
        proj_bias=flag(settings, "mamba_proj_bias", False),
        out_bias=flag(settings, "mamba_proj_bias", False),
        step_limits=(limits[0], limits[1]),
    )
    return sizes._replace(**changes)


def _unbounded(limit: Any) -> float:
    """Return a limit as a float; transformers writes infinity as `{"__float__": "Infinity"}`."""
    value: Any = limit.get("__float__") if isinstance(limit, dict) else limit
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UnsupportedModelError(f"time_step_limit must be two numbers, got {shown(limit)}") from None
