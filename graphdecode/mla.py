"""FlashInfer's module path of the same name: `from graphdecode.mla import ...`."""

from typing import Any

from graphdecode.errors import flashinfer_hint
from graphdecode.surfaces.flashinfer import (
    BatchMLAPagedAttentionWrapper,
    MLAPlanMetadata,
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "MLAPlanMetadata",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{flashinfer_hint(name)}")
