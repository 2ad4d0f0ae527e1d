"""All-reduce and all-gather over torch.distributed's default group: NCCL between GPUs, gloo between CPUs.

On a GPU they are captured with the step. Not yet run with several GPUs.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from ..native.registration import Written, operator


def _gathered(part: Tensor, ranks: int) -> Tensor:
    """Return the tensors of all ranks, [ranks, ...]."""
    gathered = part.new_empty((ranks, *part.shape))
    dist.all_gather_into_tensor(gathered.flatten(0, 1), part)
    return gathered


@operator()
def group_all_reduce(x: Written[Tensor], ranks: int) -> None:
    """Replace `x` by its sum over all ranks, with the same bits on each.

    NCCL computes each sum once and sends it to all. gloo's order of addition varies by element; so the ranks' numbers
    are gathered, and each rank adds them in the order of the ranks.

    Args:
        x: [rows, columns], contiguous.
        ranks: number of ranks.
    """
    if x.is_cuda:
        dist.all_reduce(x)
        return
    x.copy_(functools.reduce(torch.add, _gathered(x, ranks).float()))


@operator()
def group_all_gather(out: Written[Tensor], part: Tensor, ranks: int) -> None:
    """Write the columns of all ranks into `out`; rank r has those from `columns * r // ranks` on.

    Args:
        out: [rows, columns], contiguous.
        part: [rows, the caller's columns], contiguous.
        ranks: number of ranks.
    """
    columns = out.shape[1]
    widest = -(-columns // ranks)
    padded = torch.nn.functional.pad(part, (0, widest - part.shape[1]))
    gathered = _gathered(padded, ranks)
    for rank in range(ranks):
        begin, end = columns * rank // ranks, columns * (rank + 1) // ranks
        out[:, begin:end].copy_(gathered[rank, :, : end - begin])
