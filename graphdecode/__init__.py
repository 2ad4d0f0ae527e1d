"""A CUDA-graph-first decode runtime for large language models.

Names are imported when they are first used: `import graphdecode` alone loads neither torch nor anything else.
"""

import os.path
from importlib import import_module, util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; a test holds this and `_MODULES` together
    from graphdecode.attention import append_paged_kv_cache as append_paged_kv_cache
    from graphdecode.attention import append_paged_mla_kv_cache as append_paged_mla_kv_cache
    from graphdecode.attention import get_batch_indices_positions as get_batch_indices_positions
    from graphdecode.attention import get_seq_lens as get_seq_lens
    from graphdecode.attention import merge_state as merge_state
    from graphdecode.attention import merge_state_in_place as merge_state_in_place
    from graphdecode.attention import merge_states as merge_states
    from graphdecode.buckets import BucketLadder as BucketLadder
    from graphdecode.buffers import FrozenError as FrozenError
    from graphdecode.buffers import Slot as Slot
    from graphdecode.buffers import StepBuffers as StepBuffers
    from graphdecode.cache import CacheFullError as CacheFullError
    from graphdecode.config import BucketConfig as BucketConfig
    from graphdecode.config import ConfigError as ConfigError
    from graphdecode.config import EngineConfig as EngineConfig
    from graphdecode.engine import Engine as Engine
    from graphdecode.engine import EngineStats as EngineStats
    from graphdecode.engine import Event as Event
    from graphdecode.engine import Request as Request
    from graphdecode.engine import RequestError as RequestError
    from graphdecode.engine import RequestMetrics as RequestMetrics
    from graphdecode.engine import SamplingParams as SamplingParams
    from graphdecode.engine import StructuredOutputsParams as StructuredOutputsParams
    from graphdecode.errors import AnswerError as AnswerError
    from graphdecode.errors import ArgumentError as ArgumentError
    from graphdecode.errors import ClosedError as ClosedError
    from graphdecode.errors import GraphdecodeError as GraphdecodeError
    from graphdecode.graphs import CaptureError as CaptureError
    from graphdecode.graphs import GraphManager as GraphManager
    from graphdecode.surfaces.flashinfer import *  # noqa: F403
    from graphdecode.surfaces.optimum_neuron import SlotKVCacheManager as SlotKVCacheManager
    from graphdecode.surfaces.transformer_engine import *  # noqa: F403
    from graphdecode.text import LLM as LLM
    from graphdecode.text import AsyncLLM as AsyncLLM
    from graphdecode.text import CompletionOutput as CompletionOutput
    from graphdecode.text import EmbeddingRequestOutput as EmbeddingRequestOutput
    from graphdecode.text import Logprob as Logprob
    from graphdecode.text import LoRARequest as LoRARequest
    from graphdecode.text import PoolingParams as PoolingParams
    from graphdecode.text import RequestOutput as RequestOutput
    from graphdecode.text import ScoringRequestOutput as ScoringRequestOutput

    __version__: str

_NAMES = {  # module -> the public names that it has
    "attention": (
        "append_paged_kv_cache",
        "append_paged_mla_kv_cache",
        "get_batch_indices_positions",
        "get_seq_lens",
        "merge_state",
        "merge_state_in_place",
        "merge_states",
    ),
    "buckets": ("BucketLadder",),
    "buffers": ("FrozenError", "Slot", "StepBuffers"),
    "cache": ("CacheFullError",),
    "config": ("BucketConfig", "ConfigError", "EngineConfig"),
    "engine": (
        "Engine",
        "EngineStats",
        "Event",
        "Request",
        "RequestError",
        "RequestMetrics",
        "SamplingParams",
        "StructuredOutputsParams",
    ),
    "errors": ("AnswerError", "ArgumentError", "ClosedError", "GraphdecodeError"),
    "graphs": ("CaptureError", "GraphManager"),
    "surfaces.flashinfer": (
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
        "BatchMLAPagedAttentionWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "MLAPlanMetadata",
        "MultiLevelCascadeAttentionWrapper",
        "chain_speculative_sampling",
        "fast_decode_plan",
        "min_p_sampling_from_probs",
        "sampling_from_logits",
        "sampling_from_probs",
        "single_decode_with_kv_cache",
        "softmax",
        "top_k_mask_logits",
        "top_k_renorm_probs",
        "top_k_sampling_from_probs",
        "top_k_top_p_sampling_from_logits",
        "top_k_top_p_sampling_from_probs",
        "top_p_renorm_probs",
        "top_p_sampling_from_probs",
        "trtllm_batch_decode_with_kv_cache",
        "trtllm_batch_decode_with_kv_cache_mla",
        "xqa_batch_decode_with_kv_cache",
        "xqa_batch_decode_with_kv_cache_mla",
    ),
    "surfaces.optimum_neuron": ("SlotKVCacheManager",),
    "surfaces.transformer_engine": (
        "DotProductAttention",
        "InferenceParams",
        "KVCacheManager",
        "MultiheadAttention",
        "NonPagedKVCacheManager",
        "PagedKVCacheManager",
        "RotaryPositionEmbedding",
        "TransformerLayer",
        "apply_rotary_pos_emb",
    ),
    "text": (
        "AsyncLLM",
        "CompletionOutput",
        "EmbeddingRequestOutput",
        "LLM",
        "LoRARequest",
        "Logprob",
        "PoolingParams",
        "RequestOutput",
        "ScoringRequestOutput",
    ),
}
_KERNELS = os.path.join(os.path.dirname(__file__), "kernels")
if os.path.isfile(_KERNELS) and util.find_spec("graphdecode.kernels") is None:
    raise ImportError(  # git writes such a file where it may not make links, as on Windows
        f"{_KERNELS} is a file, and should be a symbolic link to ../kernels: run "
        "`pip install -e .`, which needs no link, or `git config core.symlinks true` and `git checkout graphdecode`"
    )

_MODULES = {name: f"graphdecode.{module}" for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULES)

if not TYPE_CHECKING:  # a checker that saw this would let any misspelt name pass

    def __getattr__(name: str) -> Any:
        """Import what is first asked for (PEP 562): a public name, the version, or a module of the package."""
        if name in _MODULES:
            value = getattr(import_module(_MODULES[name]), name)
        elif name == "__version__":
            from importlib import metadata

            try:
                value = metadata.version("graphdecode")
            except metadata.PackageNotFoundError:  # a checkout that was never installed
                value = "0+unknown"
        elif not name.startswith("_") and util.find_spec(f"graphdecode.{name}") is not None:
            return import_module(f"graphdecode.{name}")
        else:
            beyond = import_module("graphdecode.errors").flashinfer_hint(name)
            raise AttributeError(f"module 'graphdecode' has no attribute {name!r}{beyond}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "__version__"})
