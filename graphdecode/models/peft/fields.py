"""The fields of PEFT's `adapter_config.json`: which are honoured, which change nothing, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from graphdecode.errors import shown
from graphdecode.hub.model_path import refuse_link_outside
from graphdecode.models.fields import UnsupportedModelError, read_json
from graphdecode.models.low_rank import AdapterError

ADAPTER_FILE = "adapter_config.json"
HONOURED: Final = "honoured"
NEUTRAL: Final = "neutral"  # at any value
# values at which a field that no version of PEFT had yet changes nothing
_OFF: tuple[Any, ...] = (None, False, "", [], {})
# names of initial values that leave the base as it is; the others, such as "pissa", take theirs out of its weights
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_CONVERSION = "save it with PEFT's path_initial_model_for_weight_conversion"

# field -> HONOURED, NEUTRAL, or the values at which it changes nothing: it is refused at others
FIELDS: dict[str, str | tuple[Any, ...]] = {
    # every kind of PEFT's
    "peft_type": ("LORA",),
    "peft_version": HONOURED,  # versions differ in the axis of stacked experts that A reads
    "auto_mapping": NEUTRAL,
    "base_model_name_or_path": NEUTRAL,
    "inference_mode": NEUTRAL,
    "revision": NEUTRAL,
    "task_type": NEUTRAL,
    # what B @ A is, and is multiplied by
    "r": HONOURED,
    "rank_pattern": HONOURED,
    "lora_alpha": HONOURED,
    "alpha_pattern": HONOURED,
    "use_rslora": HONOURED,
    "target_parameters": HONOURED,
    "fan_in_fan_out": NEUTRAL,  # how the base is stored; A and B are the same
    # which modules: the tensors in the file say so
    "target_modules": NEUTRAL,
    "exclude_modules": NEUTRAL,
    "layers_to_transform": NEUTRAL,
    "layers_pattern": NEUTRAL,
    "ensure_weight_tying": NEUTRAL,  # both adapters of tied modules are in the file
    # before and during training
    "init_lora_weights": _INITIAL,
    "corda_config": NEUTRAL,  # these four are read if init_lora_weights names them
    "eva_config": NEUTRAL,
    "loftq_config": NEUTRAL,
    "lora_ga_config": NEUTRAL,
    "lora_dropout": NEUTRAL,
    "monteclora_config": NEUTRAL,
    "velora_config": NEUTRAL,
    "runtime_config": NEUTRAL,
    "megatron_core": NEUTRAL,
    # what changes more than products, or them otherwise
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "bias": (None, "none"),
    "kasa_config": (None,),
    "layer_replication": (None, []),
    "lora_bias": (None, False),
    "megatron_config": (None,),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_bdlora": (None, False),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "qalora_group_size": NEUTRAL,  # of use_qalora
    # of PEFT 0.1 and 0.2
    "enable_lora": (None,),
    "merge_weights": NEUTRAL,
    # of ms-swift
    "lora_dtype": NEUTRAL,
    "lorap_emb_lr": NEUTRAL,
    "lorap_lr_ratio": NEUTRAL,
}


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the fields of a folder's `adapter_config.json`.

    Raises:
        AdapterError: there is none, it is damaged, or a field is refused.
    """
    file = folder / ADAPTER_FILE
    if not file.is_file():
        raise AdapterError(f"{folder} holds no {ADAPTER_FILE}")
    refuse_link_outside(folder, ADAPTER_FILE, AdapterError)
    try:
        settings = read_json(file)
    except UnsupportedModelError as error:
        raise AdapterError(str(error)) from error
    for name, value in settings.items():
        refusal = _refusal(name, value)
        if refusal is not None:
            raise AdapterError(f"{file}: {name} is {shown(value)}{refusal}")
    if settings.get("use_rslora") not in (None, True, False):
        raise AdapterError(f"{file}: use_rslora is {shown(settings['use_rslora'])}, and not true or false")
    return settings


def _refusal(name: str, value: Any) -> str | None:
    """Return why a field is refused; None if it is not."""
    use = FIELDS.get(name, _OFF)
    if use in (HONOURED, NEUTRAL) or value in use or (isinstance(value, str) and value.lower() in use):
        return None
    if name not in FIELDS:
        return ", and no field that is known here; without it the adapter is read"
    if name == "peft_type":
        return "; adapters are LORA"
    if name == "init_lora_weights":
        return f", which may have changed the base's weights, and adapters change products alone: {_CONVERSION}"
    return ", and adapters change products alone"
