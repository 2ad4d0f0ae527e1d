"""TransformerEngine's surface: the key-value cache as `InferenceParams` has it."""

from .inference_params import InferenceParams
from .manager import KVCacheManager
from .nonpaged import NonPagedKVCacheManager
from .paged import PagedKVCacheManager

__all__ = ["InferenceParams", "KVCacheManager", "NonPagedKVCacheManager", "PagedKVCacheManager"]
