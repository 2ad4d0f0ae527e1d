"""What a model that transformers runs looks like, as the engine has to know it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from graphdecode.models.config import UnsupportedModelError


@dataclass(frozen=True, kw_only=True)
class AdoptedConfig:
    """Sizes of a model that transformers runs; see `ModelShape`.

    Attributes:
        num_parameters: numbers in all its tensors, each counted once.
    """

    architecture: str
    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    few_bits: bool = field(default=False, init=False)
    num_parameters: int

    @property
    def windows(self) -> tuple[int, ...]:
        """No more than that layers may see all keys: what else they see their module says while it runs."""
        return (-1,)

    def check_heads(self, heads: int, kv_heads: int, q_dim: int, k_dim: int, v_dim: int) -> None:
        """Refuse a layer whose attention the cache has no place for.

        Args:
            heads: of its queries.
            kv_heads: of its keys and values.
            q_dim: channels of a query's head.
            k_dim: of a key's.
            v_dim: of a value's; fewer than a key's are padded.

        Raises:
            UnsupportedModelError: they do not fit.
        """
        dim, own = self.head_dim, (self.num_attention_heads, self.num_key_value_heads)
        if (heads, kv_heads) != own or (q_dim, k_dim) != (dim, dim) or v_dim > dim:
            raise UnsupportedModelError(
                f"a layer of {self.architecture} has {heads} query and {kv_heads} key heads, of {q_dim}, {k_dim} "
                f"(keys) and {v_dim} (values) channels; the cache has {own[0]} and {own[1]} heads of {dim} channels"
            )
