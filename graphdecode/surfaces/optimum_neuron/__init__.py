"""optimum-neuron's surface: a cache of sequence slots, and the ladder of lengths that its steps are captured for."""

from .sharding import kv_heads_per_rank
from .slot_cache import SlotKVCacheManager

__all__ = ["SlotKVCacheManager", "kv_heads_per_rank"]
