"""A checkpoint folder whose model transformers runs: its configuration, and loading."""

import contextlib
import inspect
import math
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphdecode.attention import AttentionOptions
from graphdecode.cache import Recurrent
from graphdecode.errors import ArgumentError, shown
from graphdecode.extensions import BRING_YOUR_OWN
from graphdecode.linear.adapted import Adapted, AdapterSpan
from graphdecode.linear.forms import linear_of
from graphdecode.linear.weight_form import FormOptions, TensorSource, WeightForm
from graphdecode.models.adapters import AdapterSlots
from graphdecode.models.checkpoint import generation_eos_token_ids
from graphdecode.models.config import DTYPES
from graphdecode.models.family import known_families
from graphdecode.models.fields import UnsupportedModelError, count, eos_token_ids, read_json
from graphdecode.models.transformers_backend.masks import Visible, WithoutWeights, masks_made
from graphdecode.models.transformers_backend.module_decoder import (
    NAME,
    PROBE,
    AdoptedConfig,
    AttentionShape,
    ModuleDecoder,
    forget_padding,
    keep_quantiles,
    register,
    set_attention,
)
from graphdecode.models.transformers_backend.states import Shape, StateProbe, inputs_of, place_in
from graphdecode.models.updates import copy_finite, differs
from graphdecode.models.weight_map import CheckpointError, Part

# types of layers without other states than keys and values
_PLAIN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_ATTENDING = _PLAIN_LAYERS | {"attention", "hybrid", "hybrid_sliding", ""}  # the same in models with states
_LAYERS_WITHOUT_STATE = {"mlp", "moe"}


class FormLinear(nn.Module):
    """A linear layer of one of our weight forms; `spans` are the tokens of a pass that may have adapters.

    `weight` is on the meta device: modules read its dtype.
    """

    def __init__(self, form: WeightForm, spans: list[AdapterSpan], dtype: torch.dtype, *, in_floats: bool) -> None:
        super().__init__()
        self.form, self.spans, self.weight = form, spans, torch.empty(form.shape, dtype=dtype, device="meta")
        self.in_floats = in_floats
        self.in_features = form.in_features
        self.out_features = form.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Return the product for `x` [..., in_features], [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        dtype = torch.float32 if self.in_floats else rows.dtype
        out = rows.new_empty((rows.shape[0], self.out_features), dtype=dtype)
        if not (self.spans and isinstance(self.form, Adapted)):
            self.form.apply(out, rows)
        elif len(rows) != len(self.spans[0].rows):
            raise UnsupportedModelError(
                f"the module gives a product of {[*self.form.shape]} {len(rows)} rows for {len(self.spans[0].rows)} "
                "tokens, and adapters go by tokens: load it with max_adapters=0"
            )
        else:
            inner = rows.new_empty((len(rows), self.form.inner_size), dtype=torch.float32)
            self.form.adapt(out, rows, inner, self.spans)
        return out.view(*x.shape[:-1], self.out_features)


def weight_of(module: nn.Module) -> Tensor | None:
    """Return the weight [out_features, in_features] of a plain linear layer; None of any other module."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's, with a transposed weight

    if type(module) is nn.Linear:
        return module.weight.detach()
    return module.weight.detach().t() if type(module) is Conv1D else None


def takes_adapters(path: str, mixers: Collection[str]) -> bool:
    """Whether the product at a path can have adapters; experts and `mixers` see only some of the tokens."""
    return "experts" not in path.split(".") and not path.startswith(tuple(f"{mixer}." for mixer in mixers))


def replace_linears(
    model: Any, config: AdoptedConfig, options: FormOptions, adapters: AdapterSlots | None, spans: list[AdapterSpan]
) -> list[tuple[str, WeightForm]]:
    """Replace all plain linear layers by forms, and return each with its name, such as `q_proj`.

    `adapters`: slots to register products with, by path. `spans`: see `FormLinear`.
    """
    head = model.get_output_embeddings()
    paths = [path for path, module in model.named_modules() if weight_of(module) is not None]
    paths = [path for path in paths if path not in config.plain_linears]
    forms = []
    for path in paths:  # by path: a list of modules would hold all weights until the end
        above, _, name = path.rpartition(".")
        module: Any = model.get_submodule(path)
        weight: Any = weight_of(module)
        bias = None if module.bias is None else module.bias.detach()
        form = linear_of(weight.contiguous(), bias, replace(options, in_floats=module is head))
        if adapters is not None and takes_adapters(path, config.mixers):
            form = adapters.wrap(form, path, (Part(f"{path}.weight", form.shape),))
        forms.append((name, form))
        setattr(model.get_submodule(above), name, FormLinear(form, spans, weight.dtype, in_floats=module is head))
    return forms


class AdoptedFolder:
    """A model that transformers runs and has no family here."""

    def __init__(self, folder: Path, *, trust_remote_code: bool) -> None:
        self._folder = folder
        self._file = folder / "config.json"
        self._options = {"trust_remote_code": trust_remote_code, "local_files_only": True}

    @cached_property
    def config(self) -> AdoptedConfig:
        """The configuration of the model, from its module without any weights.

        Raises:
            UnsupportedModelError: transformers has no such causal decoder, or one that cannot run over a paged cache.
        """
        settings = self._settings()
        try:
            module = self._module_without_weights(settings)
            self._check_kind(module, settings)
            text = settings.get_text_config(decoder=True)
            keeps_states = module._is_stateful or set(getattr(text, "layer_types", None) or ()) - _PLAIN_LAYERS
            states = StateProbe(module) if keeps_states else None
            if states is None:
                _check_positions(module)
            attended, is_complete = _attention_of(module, states)
            if states is not None:
                _check_states(module, text, attended, states)
            elif is_complete and sorted(attended) != list(range(text.num_hidden_layers)):
                raise UnsupportedModelError(_no_interface(_architecture(module.config)))
            config = replace(_config_of(module, text, attended, states), eos_token_ids=self._eos_token_ids(text))
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{self._file}: {error}") from error
        generated = generation_eos_token_ids(self._folder)
        return config if generated is None else replace(config, eos_token_ids=generated)

    def check_files(self, source: TensorSource) -> None:
        """Refuse files with fewer values than the model; `load` finds which tensors are missing."""
        held = sum(math.prod(stored.shape) for stored in source.tensors.values())
        if held < self.config.num_parameters:
            raise CheckpointError(
                f"{self._folder} does not fit its config.json; its files hold {held} numbers, and "
                f"{self.config.architecture} has {self.config.num_parameters}"
            )

    def load(
        self, options: FormOptions, adapters: AdapterSlots | None, *, progress: bool, replaced: Mapping[str, Tensor]
    ) -> ModuleDecoder:
        """Read the weights, from safetensors only, and replace linear layers by forms with room for `adapters`.

        `replaced` are tensors by the module's names that take the place of those of the files.

        Raises:
            CheckpointError: tensors are missing, of wrong shapes or unreadable.
        """
        from transformers import AutoModelForCausalLM

        config = self.config
        register()
        try:
            with _progress(progress):
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    self._folder,
                    dtype=options.dtype,
                    attn_implementation=NAME,
                    use_safetensors=True,
                    output_loading_info=True,
                    **self._options,
                )
        except Exception as error:  # whatever transformers, or a model's own code, raises
            raise CheckpointError(f"{self._folder} cannot be loaded by transformers: {_line(error)}") from error
        module, found = loaded
        if found["missing_keys"]:
            missing = ", ".join(sorted(found["missing_keys"]))
            raise CheckpointError(f"{self._folder} does not fit its config.json; missing: {missing}")
        module = module.to(options.device).eval().requires_grad_(False)
        _replace_tensors(module, replaced)
        keep_quantiles(module)
        forget_padding(module)
        spans: list[AdapterSpan] = []
        forms = replace_linears(module, config, options, adapters, spans)
        return ModuleDecoder(config, module, forms, adapters, spans)

    def _eos_token_ids(self, text: Any) -> tuple[int, ...]:
        """Return those that config.json states; a default of transformers' class is no token of this vocabulary."""
        stated = read_json(self._file)
        parts = (stated, stated.get("text_config"))
        is_stated = any(isinstance(part, dict) and "eos_token_id" in part for part in parts)
        return eos_token_ids({"eos_token_id": text.eos_token_id}) if is_stated else ()

    def _settings(self) -> Any:
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self._folder, **self._options)
        except Exception as error:  # see `load`
            why = _line(error)
            if "auto_map" in read_json(self._file) and not self._options["trust_remote_code"]:
                why = "it comes with Python code of its own, which is run with trust_remote_code=True alone"
            raise UnsupportedModelError(
                f"{self._file}: transformers cannot read it either: {why}; a family {BRING_YOUR_OWN}"
            ) from error

    def _module_without_weights(self, settings: Any) -> Any:
        from transformers import AutoModelForCausalLM

        name = _architecture(settings)
        if getattr(settings, "quantization_config", None):
            raise UnsupportedModelError(f"{name} has a quantization_config; transformers runs plain weights here alone")
        if settings.is_encoder_decoder:
            raise UnsupportedModelError(f"{name} is an encoder and a decoder; only causal decoders are run")
        register()
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(
                    settings, attn_implementation=PROBE, trust_remote_code=self._options["trust_remote_code"]
                ).eval()
        except KeyError as error:
            raise UnsupportedModelError(_no_interface(name) if error.args == (PROBE,) else _line(error)) from error
        except Exception as error:  # see `load`
            why = f"{name}: {_line(error)}"
            if str(error).startswith("Unrecognized configuration class"):  # and a list of all that there are
                why = f"for {name}: {_other_inputs(settings) or 'only causal decoders are run'}"
            raise UnsupportedModelError(f"transformers has no causal decoder {why}") from error

    def _check_kind(self, module: Any, settings: Any) -> None:
        """Refuse a module that is no causal decoder over a paged cache."""
        name = _architecture(settings)
        if {part.is_causal for part in module.modules() if hasattr(part, "is_causal")} == {False}:
            why = "whose tokens see those behind them: it generates no text, and only causal decoders are run"
            raise UnsupportedModelError(f"{name} is an encoder, {why}")
        if type(module).__name__ != name:
            asked, made, families = shown(name, plain=True), type(module).__name__, ", ".join(known_families())
            why = f"of its kind {made} is what generates text, and architectures must name that where it is meant"
            why = _other_inputs(settings) or why
            raise UnsupportedModelError(
                f"{asked} is not supported: {why}. Families are there for {families}; a family {BRING_YOUR_OWN}"
            )


def _check_positions(module: Any) -> None:
    """Refuse a module without states that does not take the positions of its tokens."""
    forwards = [inspect.signature(part.forward) for part in (module, module.base_model)]
    if any("position_ids" not in forward.parameters for forward in forwards):
        name = _architecture(module.config)
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
        where = f"{Path(file or '').name}:{line}: {holder.__name__}"
        layers = ", ".join(f"{index} ({kind})" if kind else str(index) for index, kind in odd.items()) or "any number"
        raise UnsupportedModelError(f"{_stateful(text)}: {where} does not keep that of layers {layers} in its cache")


def _stateful(text: Any) -> str:
    other = sorted(set(getattr(text, "layer_types", None) or ()) - _PLAIN_LAYERS)
    kinds = f", in layers of {', '.join(other)}" if other else ""
    return f"{_architecture(text)} keeps another state than keys and values by position{kinds}"


def _replace_tensors(module: nn.Module, replaced: Mapping[str, Tensor]) -> None:
    """Copy tensors into a module; a CheckpointError names one that it has not, or that has another shape.

    Raises:
        ArgumentError: two names are one tensor, such as a tied output layer's, and the values given for them differ.
    """
    held = module.state_dict()
    of_memory: dict[tuple[int, torch.Size], str] = {}
    first = {name: of_memory.setdefault((tensor.data_ptr(), tensor.shape), name) for name, tensor in held.items()}
    for name in sorted(replaced, key=lambda name: first.get(name) != name):  # the tensors before their other names
        tensor = replaced[name]
        if name not in held:
            raise CheckpointError(f"{type(module).__name__} has no tensor {name}")
        if tensor.shape != held[name].shape:
            raise CheckpointError(f"{name} is {[*tensor.shape]} and should be {[*held[name].shape]}")
        if first[name] == name or not tensor.numel():
            copy_finite(name, held[name], tensor)
        elif not torch.equal(tensor.to(held[name]), held[name]):
            raise ArgumentError(differs(name, first[name]))


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
    name, found = _architecture(module.config), dict[int, _Attended]()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        layer = layer if states is None else states.attending(layer)
        if layer in found:
            raise UnsupportedModelError(f"layer {layer} attends twice in a step, and has one cache")
        visible = Visible(options.window_left, options.is_chunked)
        found[layer] = _Attended(AttentionShape.of(q, k, v), visible)
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
        if states is None and masks_made(module) == {Visible()}:  # then it is that of all layers
            return found, False
        why = f"cannot be run here: {place_in(error)}{_line(error)}"
        raise UnsupportedModelError(
            f"{name} {why}" if states is None else f"{_stateful(module.config)}, which {why}"
        ) from error
    return found, True


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
        architecture=_architecture(text) if text.architectures else type(module).__name__,
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
        plain_linears=frozenset() if states is None else frozenset(weights.keys() - states.called),
    )
    for each in attended.values():
        config.check_heads(each.shape)
    _check_windows(config, text, attended)
    return config


def _check_windows(config: AdoptedConfig, text: Any, attended: Collection[int]) -> None:
    """Refuse a module whose own cache drops keys that its mask lets queries see: its tokens depend on chunks."""
    from transformers import DynamicCache

    for layer, kept in enumerate(DynamicCache(config=text).layers):
        size = getattr(kept, "sliding_window", config.max_position_embeddings)
        if layer in attended and size < config.max_position_embeddings and not 0 <= config.windows[layer] < size:
            raise UnsupportedModelError(
                f"{config.architecture}: transformers' cache keeps {size} tokens (sliding_window) of layer {layer}, "
                "and tokens of a prompt see more by the module's mask"
            )


def _recurrent(states: Mapping[str, Shape] | None, attends: bool) -> Recurrent | None:
    if states is None and attends:
        return None
    return Recurrent(tuple((states or {}).items()), beside_keys=attends)


def _architecture(settings: Any) -> str:
    names = getattr(settings, "architectures", None)
    return names[0] if names else type(settings).__name__


def _other_inputs(settings: Any) -> str:
    """Return a sentence on a model's inputs other than text; "" without any."""
    kinds = {"vision_config": "images", "audio_config": "sound"}
    read = [words for part, words in kinds.items() if part in type(settings).sub_configs]
    return f"it reads {' and '.join(read)}, and models of text alone are run" if read else ""


def _no_interface(name: str) -> str:
    return (
        f"{name} cannot be run over a paged cache: not every layer of transformers' module calls attention through its "
        "AttentionInterface"
    )


def _line(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")


@contextlib.contextmanager
def _progress(shown: bool) -> Iterator[None]:
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    if not shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()
