"""FlashInfer's module path of the same name: `from graphdecode.decode import ...`."""

from graphdecode.surfaces import flashinfer
from graphdecode.surfaces.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "single_decode_with_kv_cache",
]
__getattr__ = flashinfer.__getattr__
