"""How long each row is for the attention of one decode step, worked out once for all layers.

A live row attends to the token that it feeds and all before it: `pre_step_seqlens + 1` keys. A padding row has none.
"""

import torch
from torch import Tensor

from .registration import operator


def plan_decode_torch(kv_lens: Tensor, pre_step_seqlens: Tensor, live_rows: Tensor) -> None:
    """Write the lengths with torch operators; see `plan_decode`."""
    rows = torch.arange(kv_lens.shape[0], dtype=torch.int32, device=kv_lens.device)
    kv_lens.copy_(torch.where(rows < live_rows, pre_step_seqlens + 1, 0))


_plan_decode = operator(
    "plan_decode(Tensor(a!) kv_lens, Tensor pre_step_seqlens, Tensor live_rows) -> ()",
    torch_version=plan_decode_torch,
)


def plan_decode(kv_lens: Tensor, pre_step_seqlens: Tensor, live_rows: Tensor) -> None:
    """Write how many keys each row attends to.

    Args:
        kv_lens: int32 [b]; 0 for padding rows.
        pre_step_seqlens: int32 [b], the position of the token that each row feeds.
        live_rows: int32 [1].
    """
    _plan_decode(kv_lens, pre_step_seqlens, live_rows)
