"""optimum-neuron's surface: a cache of sequence slots, and the ladder of lengths that its steps are captured for."""

from .slot_cache import SlotKVCacheManager, kv_heads_per_rank

__all__ = ["SlotKVCacheManager", "kv_heads_per_rank"]
