"""Who owns which page or row of the key-value cache, and how long each sequence is."""

from .errors import CacheFullError, UnknownSequenceError
from .inference_params import InferenceParams
from .manager import KVCacheManager
from .nonpaged import NonPagedKVCacheManager
from .paged import PagedKVCacheManager
from .paged_cache import PagedKVCache
from .pool import PagePool
from .slots import SlotKVCacheManager

__all__ = [
    "CacheFullError",
    "InferenceParams",
    "KVCacheManager",
    "NonPagedKVCacheManager",
    "PagePool",
    "PagedKVCache",
    "PagedKVCacheManager",
    "SlotKVCacheManager",
    "UnknownSequenceError",
]
