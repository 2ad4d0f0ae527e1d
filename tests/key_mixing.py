"""What keys of an int8 cache, and queries over them, are multiplied with: the oracle's own matrix."""

import math

import torch
from torch import Tensor


def mixing(dim: int) -> Tensor:
    """Return what int8 keys and their queries are multiplied with, float64 [dim, dim], in blocks of a power of two."""
    block, count = torch.ones(1, 1, dtype=torch.float64), 1
    while dim % (2 * count) == 0:
        block, count = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), block), 2 * count
    return torch.block_diag(*[block / math.sqrt(count)] * (dim // count))
