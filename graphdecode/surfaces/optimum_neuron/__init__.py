"""optimum-neuron's surface: a cache of sequence slots."""

from .slot_cache import SlotKVCacheManager, kv_heads_per_rank

__all__ = ["SlotKVCacheManager", "kv_heads_per_rank"]
