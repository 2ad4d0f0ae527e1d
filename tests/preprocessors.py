"""What prepares requests in a server of the demo model, without a server."""

from dataclasses import replace
from typing import Any

from graphdecode import SamplingParams
from graphdecode.config import ServerConfig
from graphdecode.engine.capacity import Capacity
from graphdecode.engine.request import RequestRules
from graphdecode.kernels.sampling.sampling_slots import SamplingCapacity
from graphdecode.models import resolve_model_path
from graphdecode.server.messages import EngineReady
from graphdecode.server.preprocessing import Preprocessor
from graphdecode.text.tokenizer import load_tokenizer

RULES = RequestRules(258, (257,), Capacity(256, 16, 64, 1, 16, 256), 16, SamplingCapacity(), 512)
READY = EngineReady(RULES, 0, (1,), 0.0)


def demo_tokenizer() -> Any:
    return load_tokenizer(resolve_model_path("demo"))


def demo_preprocessor(
    tokenizer: Any = None, *, tokens: int = 256, trust_request_chat_template: bool = False
) -> Preprocessor:
    """Return one for sequences of at most some tokens."""
    config = ServerConfig(trust_request_chat_template=trust_request_chat_template)
    rules = replace(RULES, capacity=Capacity(tokens, tokens // 16, tokens // 4, 1, 16, tokens))
    tokenizer = demo_tokenizer() if tokenizer is None else tokenizer
    return Preprocessor("demo", tokenizer, config, SamplingParams(), READY._replace(rules=rules), max_open=300)
