"""The configuration of a module that transformers runs, probed by a step of one token without weights."""

import inspect
import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphdecode.attention import AttentionOptions
from graphdecode.cache import Recurrent
from graphdecode.models.config import DTYPES
from graphdecode.models.fields import UnsupportedModelError, count
from graphdecode.models.transformers_backend.form_linear import takes_adapters, weight_of
from graphdecode.models.transformers_backend.masks import Visible, WithoutWeights, probed_masks
from graphdecode.models.transformers_backend.module_decoder import (
    AdoptedConfig,
    AttentionShape,
    forget_padding,
    set_attention,
)
from graphdecode.models.transformers_backend.states import Shape, StateProbe, inputs_of, location_in

# types of layers without other states than keys and values
_STATELESS_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_ATTENDING = _STATELESS_LAYERS | {"attention", "hybrid", "hybrid_sliding", ""}  # the same in models with states
_LAYERS_WITHOUT_STATE = {"mlp", "moe"}


def probed_config(module: Any, text: Any) -> AdoptedConfig:
    """Return a module's configuration, without its end tokens; `text`: transformers' settings of its decoder.

    Raises:
        UnsupportedModelError: the module cannot run over a paged cache.
    """
    is_stateful = module._is_stateful or set(getattr(text, "layer_types", None) or ()) - _STATELESS_LAYERS
    states = StateProbe(module) if is_stateful else None
    if states is None:
        _check_positions(module)
    attended, is_complete = _attention_of(module, states)
    if states is not None:
        _check_states(module, text, attended, states)
    elif is_complete and sorted(attended) != list(range(text.num_hidden_layers)):
        raise UnsupportedModelError(without_interface(architecture_of(module.config)))
    return _config_of(module, text, attended, states)


def _check_positions(module: Any) -> None:
    """Refuse a module without states that does not take the positions of its tokens."""
    forwards = [inspect.signature(part.forward) for part in (module, module.base_model)]
    if any("position_ids" not in forward.parameters for forward in forwards):
        name = architecture_of(module.config)
        raise UnsupportedModelError(f"{name} counts positions itself: transformers' module takes no position_ids")


def _check_states(module: Any, text: Any, attended: Collection[int], states: StateProbe) -> None:
    """Refuse a module with layers that keep a state outside of its cache."""
    kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    odd = {
        index: kind
        for index, kind in enumerate(kinds)
        if index not in states.shapes and kind not in (_ATTENDING if index in attended else _LAYERS_WITHOUT_STATE)
    }
    if odd or not states.shapes:
        # a part that has got a tensor, and no buffer, in the step
        holders = (part for part in module.modules() if any(isinstance(value, Tensor) for value in vars(part).values()))
        holder = type(next(holders, module.base_model))
        file, line = inspect.getsourcefile(holder), inspect.getsourcelines(holder)[1]
        location = f"{Path(file or '').name}:{line}: {holder.__name__}"
        layers = ", ".join(f"{index} ({kind})" if kind else str(index) for index, kind in odd.items()) or "any number"
        raise UnsupportedModelError(f"{_stateful(text)}: {location} does not keep that of layers {layers} in its cache")


def _stateful(text: Any) -> str:
    other = sorted(set(getattr(text, "layer_types", None) or ()) - _STATELESS_LAYERS)
    kinds = f", in layers of {', '.join(other)}" if other else ""
    return f"{architecture_of(text)} keeps another state than keys and values by position{kinds}"


class _Attended(NamedTuple):
    """A layer's attention in the probe."""

    shape: AttentionShape
    visible: Visible


def _attention_of(module: Any, states: StateProbe | None) -> tuple[dict[int, _Attended], bool]:
    """Return each layer's attention in a step of one token without weights, and whether the step was completed.

    It is not if the module reads on the host what depends on weights.

    Raises:
        UnsupportedModelError: a layer attends twice, or by another mask than ours; or the step was not completed, and
            the module has `states` to find, or another mask than causal order.
    """
    name, attended = architecture_of(module.config), dict[int, _Attended]()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        layer = layer if states is None else states.attending(layer)
        if layer in attended:
            raise UnsupportedModelError(f"layer {layer} attends twice in a step, and has one cache")
        visible = Visible(options.window_left, options.is_chunked)
        attended[layer] = _Attended(AttentionShape.of(q, k, v), visible)
        return q.new_empty((*q.shape[:2], v.shape[2]))

    set_attention(module, attend)
    forget_padding(module)
    if module._can_set_experts_implementation():
        module.set_experts_implementation("batched_mm")  # has meta kernels for all dtypes
    token = torch.zeros(1, dtype=torch.int64)
    try:
        with torch.no_grad(), WithoutWeights():
            module(**inputs_of(module, token, token, states))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {error}") from error
    except Exception as error:  # see `load`
        if states is None and probed_masks(module) == {Visible()}:  # then it is that of all layers
            return attended, False
        reason = f"cannot be run here: {location_in(error)}{error_line(error)}"
        raise UnsupportedModelError(
            f"{name} {reason}" if states is None else f"{_stateful(module.config)}, which {reason}"
        ) from error
    return attended, True


def _config_of(
    module: nn.Module, text: Any, attended: Mapping[int, _Attended], states: StateProbe | None
) -> AdoptedConfig:
    """Return the configuration: sizes of `attended` before those that transformers states."""
    fields = vars(text) | {name: getattr(text, name, None) for name in text.attribute_map}
    if states is not None:  # layers without keys say nothing of heads or positions
        fields = {"num_attention_heads": 1, "head_dim": 16, "max_position_embeddings": 2**20} | fields
    heads = count(fields, "num_attention_heads")
    kv_heads = count(fields, "num_key_value_heads", heads)
    head_dim = fields.get("head_dim") or count(fields, "hidden_size") // heads
    if attended:
        heads, kv_heads, head_dim, *_ = next(iter(attended.values())).shape
    dtype = getattr(text, "dtype", None) or torch.float32
    mixers = () if states is None else tuple(sorted(states.mixers))
    weights = {path: weight for path, part in module.named_modules() if (weight := weight_of(part)) is not None}
    adapted = [weight.shape for path, weight in weights.items() if takes_adapters(path, mixers)]
    layers = range(count(fields, "num_hidden_layers"))
    visible = [attended[layer].visible if layer in attended else Visible() for layer in layers]
    config = AdoptedConfig(
        architecture=architecture_of(text) if text.architectures else type(module).__name__,
        vocab_size=count(fields, "vocab_size"),
        num_hidden_layers=len(layers),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=count(fields, "max_position_embeddings"),
        windows=tuple(each.window_left for each in visible),
        chunked=tuple(each.is_chunked for each in visible),
        eos_token_ids=(),  # the folder's files state them
        dtype=dtype if dtype in DTYPES.values() else torch.float32,
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        adapted_features=sum(map(sum, adapted)),
        recurrent=() if states is None else tuple(_recurrent(states.shapes.get(i), i in attended) for i in layers),
        mixers=mixers,
        unreplaced_linears=frozenset() if states is None else frozenset(weights.keys() - states.called),
    )
    for each in attended.values():
        config.check_heads(each.shape)
    _check_windows(config, text, attended)
    return config


def _check_windows(config: AdoptedConfig, text: Any, attended: Collection[int]) -> None:
    """Refuse a module whose own cache drops keys that its mask lets queries see: its tokens depend on chunks."""
    from transformers import DynamicCache

    for layer, cached in enumerate(DynamicCache(config=text).layers):
        size = getattr(cached, "sliding_window", config.max_position_embeddings)
        if layer in attended and size < config.max_position_embeddings and not 0 <= config.windows[layer] < size:
            raise UnsupportedModelError(
                f"{config.architecture}: transformers' cache keeps {size} tokens (sliding_window) of layer {layer}, "
                "and tokens of a prompt see more by the module's mask"
            )


def _recurrent(states: Mapping[str, Shape] | None, attends: bool) -> Recurrent | None:
    if states is None and attends:
        return None
    return Recurrent(tuple((states or {}).items()), beside_keys=attends)


def architecture_of(settings: Any) -> str:
    """Return the name of the architecture that settings state, else that of their class."""
    names = getattr(settings, "architectures", None)
    return names[0] if names else type(settings).__name__


def without_interface(name: str) -> str:
    """Return the message for a module whose attention is not called through transformers' interface."""
    return (
        f"{name} cannot be run over a paged cache: not every layer of transformers' module calls attention through its "
        "AttentionInterface"
    )


def error_line(error: Exception) -> str:
    """Return an error in one line of at most 300 characters."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
