"""Who owns which page of the key-value cache: the pool, the ledger of sequences over it, and pages found by prefix."""

from .errors import CacheFullError, UnknownSequenceError
from .layer_cache import (
    CacheScales,
    Keys,
    KeysAndState,
    LayerCache,
    LayerState,
    Recurrent,
    RecurrentState,
    layer_state,
    paged,
    stateful,
    untouched_zeros,
)
from .ledger import Checkpoints, PageLedger
from .paged_cache import PagedKVCache, copy_page, fill_page_row
from .pool import PagePool
from .rolling import RollingPages

__all__ = [
    "CacheFullError",
    "CacheScales",
    "Checkpoints",
    "Keys",
    "KeysAndState",
    "LayerCache",
    "LayerState",
    "PageLedger",
    "PagePool",
    "PagedKVCache",
    "Recurrent",
    "RecurrentState",
    "RollingPages",
    "UnknownSequenceError",
    "copy_page",
    "fill_page_row",
    "layer_state",
    "paged",
    "stateful",
    "untouched_zeros",
]
