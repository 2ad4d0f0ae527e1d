"""Text models inside the checkpoints of models that see or hear: prompts of text run through them alone."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from graphdecode.models.families import ARCHITECTURES, TEXT_TYPES, WHOLES

SIZES = {  # transformers' defaults, which a text_config leaves out
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
    },
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}
_OF_WHOLE = ("tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype")  # fields that the whole may state, too
_TEXT = re.compile(r"(?:model\.language_model|language_model\.model)\.(?P<module>.+)")
_HEAD = re.compile(r"(?:language_model\.)?(?P<module>lm_head\..+)")
_OTHERS = re.compile(r"(?:model\.)?(?:visual|vision_\w+|audio_\w+|embed_vision|embed_audio|multi_modal_projector)\..+")


def text_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model, given those of config.json; the same fields if it is a text model."""
    names = settings.get("architectures")
    whole = names[0] if isinstance(names, list) and names else None
    if not isinstance(whole, str) or whole not in WHOLES:
        return settings
    text = settings.get("text_config")
    stated = text if isinstance(text, dict) else settings  # older files have all fields at the top
    kind = stated.get("model_type")
    family = WHOLES[whole] or (TEXT_TYPES.get(kind) if isinstance(kind, str) else None)
    if family is None:
        return settings
    of_whole = {name: settings[name] for name in _OF_WHOLE if settings.get(name) is not None}
    sizes = SIZES.get(kind, {}) if isinstance(kind, str) else {}
    merged = {**settings, **sizes, **stated, **of_whole, "architectures": [ARCHITECTURES[family]]}
    scaling = merged.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type", scaling.get("rope_type")) == "mrope":
        merged["rope_scaling"] = None  # positions of text are equal in all sections
    return merged


def text_names(names: Iterable[str]) -> Mapping[str, str]:
    """Return the tensors of a text model as they are stored -> their names in a text model's own checkpoint.

    Those of other parts are left out; a text model's own names stay as they are.
    """
    names = list(names)
    if not any(_TEXT.fullmatch(name) for name in names):
        return {name: name for name in names if not _OTHERS.fullmatch(name)}
    renamed = {name: f"model.{match['module']}" for name in names if (match := _TEXT.fullmatch(name))}
    return renamed | {name: match["module"] for name in names if (match := _HEAD.fullmatch(name))}
