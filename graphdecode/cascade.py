"""FlashInfer's module path of the same name: `from graphdecode.cascade import ...`."""

from graphdecode.attention import merge_state, merge_state_in_place, merge_states
from graphdecode.surfaces.flashinfer import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
)

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]
