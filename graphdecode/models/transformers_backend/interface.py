"""Where transformers' modules hand over to us: the attention function that they find in its `AttentionInterface`.

There is no mask function: for an attention that has none registered, transformers makes no mask at all, and ours needs
none, for what a token sees follows from the cache, its position and the window.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from graphdecode.attention import AttentionOptions
from graphdecode.models.config import UnsupportedModelError

NAME = "graphdecode"  # of the function, in transformers' registry
_PLACE = "graphdecode_attention"  # the attribute of an attention module that holds who answers it
_POSITIONS = ("position_ids", "position_embeddings", "cache_position")  # queries and keys are turned by them already


class Attends(Protocol):
    """Who answers the calls of a model's attention modules."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Return the attention of some tokens, [t, heads, head_dim].

        Args:
            layer: its number, from 0.
            q: [t, heads, head_dim], any strides.
            k: [t, kv_heads, head_dim].
            v: [t, kv_heads, head_dim].
            options: of the layer.
        """


def register() -> None:
    """Put the function into transformers' registry; doing it again changes nothing."""
    from transformers import AttentionInterface  # it takes a second, and a native model needs none of it

    AttentionInterface.register(NAME, _attention)


def answer(model: nn.Module, who: Attends) -> None:
    """Let a model's attention modules be answered by `who` from now on."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            setattr(module, _PLACE, who)


def keep_quantiles(model: nn.Module) -> None:
    """Let Gemma 3n's sparse layers keep what transformers makes of a number of the host at every step."""
    module: Any
    for module in model.modules():
        if hasattr(module, "_gaussian_topk") and module.activation_sparsity > 0.0:
            share = torch.tensor(module.activation_sparsity, dtype=torch.float32)
            quantile = torch.distributions.Normal(0.0, 1.0).icdf(share).to(next(module.parameters()).device)
            module.register_buffer("graphdecode_quantile", quantile, persistent=False)
            module._gaussian_topk = partial(_above_quantile, quantile)


def _above_quantile(quantile: Tensor, inputs: Tensor) -> Tensor:
    """Return by how much inputs are above a quantile of theirs, as if they were normally distributed, or 0."""
    spread = inputs.std(-1, keepdim=True, unbiased=False) * quantile.to(inputs.dtype)
    return nn.functional.relu(inputs - (inputs.mean(-1, keepdim=True) + spread))


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks for it: one row of t tokens, which are those of all our rows.

    Args:
        module: the attention module; its `layer_idx` says which layer it is.
        query: [1, heads, t, head_dim].
        key: [1, kv_heads, t, head_dim].
        value: [1, kv_heads, t, head_dim].
        attention_mask: must be None: what a token sees is not said by a mask here.
        scaling: multiplies the logits; None: 1 / sqrt(head_dim).
        sliding_window: how many keys a token sees, its own included; None: all.
        softcap: caps the logits.
        s_aux: [heads], sinks: logits without a value.
        is_causal: whether a token sees those before it alone; None: it does.
        others: what else the module says.

    Returns:
        The attention [1, t, heads, head_dim], and no weights.

    Raises:
        UnsupportedModelError: it asks for another kind of attention.
    """
    tensors = [name for name, given in others.items() if isinstance(given, Tensor) and name not in _POSITIONS]
    if attention_mask is not None or is_causal is False or tensors:
        asked = ", ".join(["a mask of its own"] * (attention_mask is not None) + tensors) or "no causal order"
        raise UnsupportedModelError(f"{type(module).__name__} asks attention for {asked}, which this runtime has not")
    who: Attends | None = getattr(module, _PLACE, None)
    if who is None:
        raise UnsupportedModelError(f"{type(module).__name__} asks for attention, but does not say for which layer")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    window = -1 if sliding_window is None else sliding_window - 1
    options = AttentionOptions(scaling, window, softcap or 0.0, None if s_aux is None else s_aux.float())
    return who.attend(module.layer_idx, q, k, v, options)[None], None
