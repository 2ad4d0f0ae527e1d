"""Which shapes of steps and passes have graphs, beside those of each bucket of rows."""

from __future__ import annotations

from graphdecode.buckets import BucketLadder, StepShape
from graphdecode.models import Model

# tokens of a pass that has a graph; a CPU's graph keeps what is between its operators, and more tokens are worth less
_PROMPT_TOKENS = {"cuda": (16, 32, 64, 128, 256, 512), "cpu": (8, 16, 32, 64)}
# of a mixed step, those of rows and of chunks together, and rows of it: among so many tokens some of padding weigh
# little. A CPU multiplies 16 or 32 rows at once, a GPU waits for weights up to some hundred
MIXED_TOKENS = {"cuda": (64, 128, 256, 512), "cpu": (16, 32, 64)}
_MIXED_ROWS = {"cuda": (8, 64), "cpu": (1, 8, 32)}
CACHED_BYTES = 8 * 2**20  # of weights that a CPU has in the caches of its cores: to read them once more takes no time


def pays(model: Model) -> bool:
    """Whether a model has weights that take time to be read once more, so that steps had better take prompts along."""
    return model.device.type != "cpu" or model.weight_bytes > CACHED_BYTES


def pass_sizes(device_type: str, max_tokens: int) -> tuple[int, ...]:
    """Return the tokens of prompts' passes that have graphs, and those of the largest pass."""
    return (*(tokens for tokens in _PROMPT_TOKENS[device_type] if tokens < max_tokens), max_tokens)


def prompt_shapes(device_type: str, max_tokens: int) -> list[StepShape]:
    """Return the passes of prompts by themselves; a larger one takes longer to run than to launch."""
    most = min(_PROMPT_TOKENS[device_type][-1], max_tokens)
    return [StepShape(0, 1, tokens) for tokens in pass_sizes(device_type, max_tokens) if tokens <= most]


def mixed_shapes(device_type: str, max_tokens: int, ladder: BucketLadder) -> list[StepShape]:
    """Return the steps that take chunks of prompts along, for some of a ladder's buckets."""
    most = ladder.max_batch_size
    buckets = {ladder.bucket_for(min(rows, most)) for rows in (*_MIXED_ROWS[device_type], most)}
    return [
        StepShape(bucket, 1, min(tokens - bucket, max_tokens))
        for tokens in MIXED_TOKENS[device_type]
        for bucket in buckets
        if 2 * bucket <= tokens
    ]
