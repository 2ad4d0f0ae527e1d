"""Who owns which page or row of the key-value cache, and how long each sequence is."""

from .errors import CacheFullError, UnknownSequenceError
from .manager import KVCacheManager
from .paged import PagedKVCacheManager
from .pool import PagePool

__all__ = [
    "CacheFullError",
    "KVCacheManager",
    "PagePool",
    "PagedKVCacheManager",
    "UnknownSequenceError",
]
