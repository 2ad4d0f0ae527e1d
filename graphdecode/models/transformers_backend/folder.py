"""A checkpoint folder whose model transformers runs: its configuration, and loading."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphdecode.errors import ArgumentError, shown
from graphdecode.extensions import HOW_TO_REGISTER
from graphdecode.linear.lora import AdapterSpan
from graphdecode.linear.weight_form import FormOptions, TensorSource
from graphdecode.models.adapters import AdapterSlots
from graphdecode.models.checkpoint import generation_eos_token_ids
from graphdecode.models.family import known_families
from graphdecode.models.fields import UnsupportedModelError, eos_token_ids, errors_name, read_json
from graphdecode.models.transformers_backend.form_linear import replace_linears
from graphdecode.models.transformers_backend.module_decoder import (
    NAME,
    PROBE,
    AdoptedConfig,
    ModuleDecoder,
    forget_padding,
    keep_quantiles,
    register,
)
from graphdecode.models.transformers_backend.probe import architecture_of, error_line, probed_config, without_interface
from graphdecode.models.updates import copy_finite, differs
from graphdecode.models.weight_map import CheckpointError


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
        with errors_name(self._file):
            module = self._module_without_weights(settings)
            self._check_kind(module, settings)
            text = settings.get_text_config(decoder=True)
            config = replace(probed_config(module, text), eos_token_ids=self._eos_token_ids(text))
        generated = generation_eos_token_ids(self._folder)
        return config if generated is None else replace(config, eos_token_ids=generated)

    def check_files(self, source: TensorSource) -> None:
        """Refuse files with fewer values than the model; `load` finds which tensors are missing."""
        num_stored = sum(math.prod(stored.shape) for stored in source.tensors.values())
        if num_stored < self.config.num_parameters:
            raise CheckpointError(
                f"{self._folder} does not fit its config.json; its files hold {num_stored} numbers, and "
                f"{self.config.architecture} has {self.config.num_parameters}"
            )

    def load(
        self,
        source: TensorSource,
        options: FormOptions,
        slots: tuple[int, int, bool],
        *,
        progress: bool,
        replaced: Mapping[str, Tensor],
    ) -> ModuleDecoder:
        """Read the weights, from safetensors only, and replace linear layers by forms.

        Args:
            source: the folder's tensors, to check.
            options: options of the forms.
            slots: adapter slots, their rank, and whether experts shall have some.
            progress: show a bar.
            replaced: tensors by the module's names that take the place of those of the files.

        Raises:
            ArgumentError: experts shall have adapters.
            CheckpointError: tensors are missing, of wrong shapes or unreadable.
        """
        from transformers import AutoModelForCausalLM

        if slots[0] and slots[2]:
            raise ArgumentError(f"adapt_experts is for models of our families, and transformers runs {self._folder}")
        self.check_files(source)
        config = self.config
        adapters = AdapterSlots(*slots, options.dtype, options.device, config) if slots[0] else None
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
            raise CheckpointError(f"{self._folder} cannot be loaded by transformers: {error_line(error)}") from error
        module, loading_info = loaded
        if loading_info["missing_keys"]:
            missing = ", ".join(sorted(loading_info["missing_keys"]))
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
            reason = error_line(error)
            if "auto_map" in read_json(self._file) and not self._options["trust_remote_code"]:
                reason = "it comes with Python code of its own, which is run with trust_remote_code=True alone"
            raise UnsupportedModelError(
                f"{self._file}: transformers cannot read it either: {reason}; a family {HOW_TO_REGISTER}"
            ) from error

    def _module_without_weights(self, settings: Any) -> Any:
        from transformers import AutoModelForCausalLM

        name = architecture_of(settings)
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
            raise UnsupportedModelError(
                without_interface(name) if error.args == (PROBE,) else error_line(error)
            ) from error
        except Exception as error:  # see `load`
            reason = f"{name}: {error_line(error)}"
            if str(error).startswith("Unrecognized configuration class"):  # and a list of all that there are
                reason = f"for {name}: {_other_inputs(settings) or 'only causal decoders are run'}"
            raise UnsupportedModelError(f"transformers has no causal decoder {reason}") from error

    def _check_kind(self, module: Any, settings: Any) -> None:
        """Refuse a module that is no causal decoder over a paged cache."""
        name = architecture_of(settings)
        if {part.is_causal for part in module.modules() if hasattr(part, "is_causal")} == {False}:
            reason = "whose tokens see those behind them: it generates no text, and only causal decoders are run"
            raise UnsupportedModelError(f"{name} is an encoder, {reason}")
        if type(module).__name__ != name:
            stated, actual, families = shown(name, plain=True), type(module).__name__, ", ".join(known_families())
            reason = f"of its kind {actual} is what generates text, and architectures must name that where it is meant"
            reason = _other_inputs(settings) or reason
            raise UnsupportedModelError(
                f"{stated} is not supported: {reason}. Families are there for {families}; a family {HOW_TO_REGISTER}"
            )


def _replace_tensors(module: nn.Module, replaced: Mapping[str, Tensor]) -> None:
    """Copy tensors into a module; a CheckpointError names one that it has not, or that has another shape.

    Raises:
        ArgumentError: two names are one tensor, such as a tied output layer's, and the values given for them differ.
    """
    state = module.state_dict()
    of_memory: dict[tuple[int, torch.Size], str] = {}
    first = {name: of_memory.setdefault((tensor.data_ptr(), tensor.shape), name) for name, tensor in state.items()}
    for name in sorted(replaced, key=lambda name: first.get(name) != name):  # the tensors before their other names
        tensor = replaced[name]
        if name not in state:
            raise CheckpointError(f"{type(module).__name__} has no tensor {name}")
        if tensor.shape != state[name].shape:
            raise CheckpointError(f"{name} is {[*tensor.shape]} and should be {[*state[name].shape]}")
        if first[name] == name or not tensor.numel():
            copy_finite(name, state[name], tensor)
        elif not torch.equal(tensor.to(state[name]), state[name]):
            raise ArgumentError(differs(name, first[name]))


def _other_inputs(settings: Any) -> str:
    """Return a sentence on a model's inputs other than text; "" without any."""
    kinds = {"vision_config": "images", "audio_config": "sound"}
    read = [words for part, words in kinds.items() if part in type(settings).sub_configs]
    return f"it reads {' and '.join(read)}, and models of text alone are run" if read else ""


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
