"""What GGUF calls an architecture, its fields and its tensors, in the words of a config.json and of safetensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphdecode.models.config import UnsupportedModelError
from graphdecode.models.gguf.container import GgufTensor
from graphdecode.models.gguf.metadata import Metadata
from graphdecode.models.gguf.ropes import ROPE_TENSORS, rope_settings
from graphdecode.models.gguf.tensor_view import TensorView
from graphdecode.models.gguf.vocabulary import stop_token_ids

_EDGES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORM = {"ffn_norm": "post_attention_layernorm"}
_ROTATED = ("attn_q", "attn_k")

Settings = dict[str, Any]
More = Callable[[Metadata], Settings]


@dataclass(frozen=True)
class Architecture:
    """One architecture of GGUF.

    Attributes:
        name: as the names of classes in transformers begin, such as "Llama".
        layer: GGUF's names of a layer's tensors -> those of transformers; `{expert}` stands for each of a stack.
        neighbours: the two halves of a rotary pair are neighbours among the rows of q and k.
        norm_shift: what is added to the norms' stored gains.
        more: returns what a config.json has beside what all have.
    """

    name: str
    layer: Mapping[str, str]
    neighbours: bool = False
    norm_shift: float = 0.0
    more: More = field(default=lambda metadata: {})

    def settings(self, fields: Mapping[str, Any], stored: Mapping[str, GgufTensor]) -> Settings:
        """Return the fields of the config.json that such a model has.

        Args:
            fields: the metadata of the file.
            stored: its tensors.

        Raises:
            UnsupportedModelError: a field is missing or is of no use.
        """
        metadata = Metadata(fields)
        layers = metadata.number("block_count")
        held = {int(found[1]) for name in stored if (found := re.match(r"blk\.(\d+)\.", name))}
        if layers > len(held):  # before anything is made for so many
            raise UnsupportedModelError(f"{metadata.architecture}.block_count is {layers}, and there are {len(held)}")
        heads = metadata.number("attention.head_count")
        hidden = metadata.number("embedding_length")
        return {
            "architectures": [f"{self.name}ForCausalLM"],
            "vocab_size": _vocab_size(stored),
            "hidden_size": hidden,
            "intermediate_size": metadata.number("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": metadata.number("attention.head_count_kv", heads),
            "head_dim": metadata.number("attention.key_length", hidden // heads if heads else 0),
            "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": metadata.number("context_length"),
            "tie_word_embeddings": "output.weight" not in stored,
            "attention_bias": "blk.0.attn_q.bias" in stored,
            "mlp_bias": "blk.0.ffn_up.bias" in stored,
            "eos_token_id": stop_token_ids(fields),
            "dtype": _dtype(stored),
            **rope_settings(metadata, stored),
            **self.more(metadata),
        }

    def views(self, fields: Mapping[str, Any], stored: Mapping[str, GgufTensor]) -> Iterator[tuple[str, TensorView]]:
        """Yield the tensors as transformers has them, with its names; one that it has no name for has its own."""
        metadata = Metadata(fields)
        for name, tensor in stored.items():
            place, _, kind = name.rpartition(".")
            number = re.fullmatch(r"blk\.(\d+)\.(.+)", place)
            own = self.layer.get(number[2]) if number else _EDGES.get(place)
            if own is None:
                if name not in ROPE_TENSORS:
                    yield name, TensorView(tensor, tensor.shape)
                continue
            whole = f"model.layers.{number[1]}.{own}.{kind}" if number else f"{own}.{kind}"
            if "{expert}" in own:
                experts, rows, *_ = tensor.shape
                for expert in range(experts):
                    yield whole.format(expert=expert), TensorView(tensor, tensor.shape[1:], first_row=expert * rows)
                continue
            rotated = self.neighbours and number is not None and number[2] in _ROTATED
            yield (
                whole,
                TensorView(
                    tensor,
                    tensor.shape,
                    head_dim=_head_rows(metadata, tensor, number[2]) if rotated and number else 0,
                    shift=self.norm_shift if place.endswith("norm") else 0.0,
                ),
            )


def _head_rows(metadata: Metadata, tensor: GgufTensor, name: str) -> int:
    heads = metadata.number("attention.head_count")
    if name == "attn_k":
        heads = metadata.number("attention.head_count_kv", heads)
    return tensor.shape[0] // heads


def _vocab_size(stored: Mapping[str, GgufTensor]) -> int:
    if "token_embd.weight" not in stored:
        raise UnsupportedModelError("the tensor token_embd.weight is missing")
    return stored["token_embd.weight"].shape[0]


def _dtype(stored: Mapping[str, GgufTensor]) -> str:
    """Return what to compute in where nobody says: float32 for a file of nothing else, else what holds any range."""
    kinds = {tensor.block.name for tensor in stored.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")


_DENSE = _ATTENTION | _PRE_NORM | _MLP
_ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("Llama", _DENSE, neighbours=True),
    "qwen2": Architecture("Qwen2", _DENSE),
    "qwen3": Architecture("Qwen3", _DENSE | _QK_NORMS),
}


def architecture_of(name: object) -> Architecture:
    """Return what GGUF calls by a name.

    Raises:
        UnsupportedModelError: it is not known; the message lists those that are.
    """
    found = _ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(_ARCHITECTURES)
        raise UnsupportedModelError(f"general.architecture {name!r:.80} is not supported; supported are {known}")
    return found
