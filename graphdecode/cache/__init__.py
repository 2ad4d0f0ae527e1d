"""Who owns which page or row, and how long each sequence is."""

from .errors import CacheFullError
from .paged import PagedKVCacheManager

__all__ = ["CacheFullError", "PagedKVCacheManager"]
