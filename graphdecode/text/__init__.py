"""Text in, text out: `LLM`, and `AsyncLLM` for asyncio."""

from graphdecode.engine import EngineStats, RequestMetrics, SamplingParams
from graphdecode.text.arguments import LoRARequest
from graphdecode.text.async_llm import AsyncLLM
from graphdecode.text.chat import RenderedChat, render_chat
from graphdecode.text.conversation import Conversation
from graphdecode.text.llm import LLM, Stream
from graphdecode.text.outputs import CompletionOutput, Logprob, RequestOutput
from graphdecode.text.pooling import EmbeddingRequestOutput, PoolingParams, ScoringRequestOutput
from graphdecode.text.tokenizer import load_tokenizer

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Conversation",
    "EmbeddingRequestOutput",
    "EngineStats",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "RenderedChat",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "Stream",
    "load_tokenizer",
    "render_chat",
]
