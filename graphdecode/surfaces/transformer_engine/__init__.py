"""TransformerEngine's surface: the key-value cache, and modules that attend over it."""

from .cache_managers import KVCacheManager, NonPagedKVCacheManager, PagedKVCacheManager
from .dot_product_attention import DotProductAttention
from .inference_params import InferenceParams
from .layers import MultiheadAttention, TransformerLayer
from .rotary import RotaryPositionEmbedding, apply_rotary_pos_emb

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
