"""TransformerEngine's surface: the key-value cache, and modules that attend over it."""

from .dot_product_attention import DotProductAttention
from .inference_params import InferenceParams
from .multihead_attention import MultiheadAttention
from .nonpaged import NonPagedKVCacheManager
from .paged import PagedKVCacheManager
from .rotary import RotaryPositionEmbedding, apply_rotary_pos_emb
from .staged_manager import KVCacheManager
from .transformer_layer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "KVCacheManager",
    "MultiheadAttention",
    "NonPagedKVCacheManager",
    "PagedKVCacheManager",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
]
