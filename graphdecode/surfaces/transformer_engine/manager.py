"""The base of cache managers, built-in ones and a user's own."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor


class KVCacheManager:
    """Where the tokens of each layer are kept; `InferenceParams` asks it to.

    A subclass of one's own offers these methods, `cache` and `sequences`; a paged one `page_table` too. It is made with
    those of the built-in manager's keyword arguments that it takes. Arguments of this class are ignored.

    Attributes:
        cache: layer number -> (keys, values).
        sequences: id -> tokens, in row order.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.sequences: OrderedDict[Hashable, int] = OrderedDict()

    def reset(self) -> None:
        """Forget all sequences."""
        self.sequences = OrderedDict()

    def allocate_memory(self, layer_number: int) -> None:
        """Allocate a layer's cache, zero-filled; a layer that exists is left as it is."""
        raise NotImplementedError

    def pre_step(self, step_dict: Mapping[Hashable, int]) -> OrderedDict[Hashable, int]:
        """Prepare a step of these sequences and numbers of new tokens, and return `sequences` as they are after it."""
        raise NotImplementedError

    def step(
        self,
        layer_number: int,
        new_k: Tensor,
        new_v: Tensor,
        cu_new_seqlens: Tensor,
        cu_cached_seqlens: Tensor,
        qkv_format: str,
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values, and return the layer's cache.

        Args:
            layer_number: of the layer.
            new_k: [b, s, h, d_k], [s, b, h, d_k] or [t, h, d_k].
            new_v: the same with d_v.
            cu_new_seqlens: int32 [max_batch + 1], sums of the step lengths.
            cu_cached_seqlens: int32 [max_batch + 1], sums of the lengths after the step.
            qkv_format: `bshd`, `sbhd` or `thd`.

        Returns:
            (keys, values) in the cache's own layout.
        """
        raise NotImplementedError
