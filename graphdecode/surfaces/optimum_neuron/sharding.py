"""How many key/value heads a rank holds, as optimum-neuron shards grouped-query attention."""

from graphdecode.cache import require_positive


def kv_heads_per_rank(num_attention_heads: int, num_key_value_heads: int, tp_degree: int) -> int:
    """Return the key/value heads of one of `tp_degree` ranks.

    Heads that divide among the ranks are dealt out. Fewer heads than ranks are replicated, one a rank, where they
    divide the ranks. In all other cases every query head gets a key/value head of its own, and where there are as many
    of both to begin with, both are padded to a multiple of the ranks.

    Raises:
        ValueError: a number is not an integer >= 1.
    """
    require_positive(
        num_attention_heads=num_attention_heads, num_key_value_heads=num_key_value_heads, tp_degree=tp_degree
    )
    padded_heads = -(-num_attention_heads // tp_degree)
    if num_attention_heads == num_key_value_heads:
        return padded_heads
    if num_key_value_heads % tp_degree == 0:
        return num_key_value_heads // tp_degree
    return 1 if tp_degree % num_key_value_heads == 0 else padded_heads
