"""OpenAI's HTTP surface over an engine in a process of its own."""

from graphdecode.child import ConnectedChild, start_connected
from graphdecode.server.address import bind as bind

_FEW_ARENAS = {"MALLOC_ARENA_MAX": "2"}  # else each thread that compiles grammars keeps its peak memory


def start_engine_process() -> ConnectedChild:
    """Start an engine's process, which imports torch and waits for an `EngineSetup`, or for the socket to close."""
    return start_connected("graphdecode.server.engine_process", _FEW_ARENAS)
