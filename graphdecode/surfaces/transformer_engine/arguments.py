"""Arguments of TransformerEngine's modules that are accepted at their neutral values, and refused at others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Neutral(NamedTuple):
    """The values that an argument may have, and why no others."""

    values: tuple[object, ...]
    reason: str


_SHARDS = "a module is not split over several devices"
_CONTEXT = "a sequence is not split over several devices"
_BACKWARD = "there is no backward pass"
_CROSS = "there is no cross attention: a decoder's cache has its own tokens alone"
_FP8 = "attention has no FP8 recipe; a cache may have floats of 8 bits"
_SCORES = "it builds a graph of cuDNN's, and kernels here are compiled ahead"

# argument -> its neutral values, of each module and method that has it
NEUTRAL = {
    "tp_size": Neutral((1,), _SHARDS),
    "tp_group": Neutral((None,), _SHARDS),
    "ub_tp_comm_overlap": Neutral((False,), _SHARDS),
    "cp_group": Neutral((None,), _CONTEXT),
    "attention_type": Neutral(("self",), _CROSS),
    "layer_type": Neutral(("encoder",), _CROSS),
    "encoder_output": Neutral((None,), _CROSS),
    "enc_dec_attn_mask": Neutral((None,), _CROSS),
    "drop_path_rate": Neutral((0.0,), "layers are dropped in training alone"),
    "fuse_wgrad_accumulation": Neutral((False,), _BACKWARD),
    "score_mod_bprop": Neutral((None,), _BACKWARD),
    "score_mod_bprop_tensors": Neutral((None,), _BACKWARD),
    "return_max_logit": Neutral((False,), "the largest logit serves an optimizer"),
    "fp8_output": Neutral((False,), _FP8),
    "score_mod": Neutral((None,), _SCORES),
    "score_mod_tensors": Neutral((None,), _SCORES),
    "thd_attention_policies": Neutral((None,), "all sequences of a step have one mask"),
}


def require_neutral(arguments: Mapping[str, object]) -> None:
    """Raise ValueError for the first argument whose value is not supported."""
    for name, value in arguments.items():
        neutral = NEUTRAL.get(name)
        if neutral is not None and not any(value is each or value == each for each in neutral.values):
            allowed = " or ".join(repr(each) for each in neutral.values)
            raise ValueError(f"{name} must be {allowed}: {neutral.reason}, got {value!r}")
