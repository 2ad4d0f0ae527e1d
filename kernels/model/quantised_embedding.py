"""Token embedding from a table in blocks of few bits, which is the output layer's weight, too, or like one.

The rows that a step needs are undone as they are gathered; a row's codes lie in one column of a panel.
"""

import torch
from torch import Tensor

from ..linear.quantised_linear import QuantisedPanels, undone
from ..native.registration import operator
from ..native.signature import Int32, Int64, Written


@operator(is_compiled=True)
def quantised_embedding(
    out: Written[Tensor], tokens: Int64, weight: QuantisedPanels, live: Int32, vocab_size: int, scale: float = 1.0
) -> None:
    """Write `scale * weight[tokens[i]]` into `out[i]`; dead tokens, and ids that no row has, read row 0. CPU alone.

    Args:
        out: [tokens, hidden], contiguous, floats of 32 or 16 bits; rows are rounded to its dtype before scaling.
        tokens: int64 [tokens].
        weight: as `quantised_panels` returned it, [vocab_size, hidden].
        live: int32 [1], how many of the tokens are live.
        vocab_size: rows of the weight.
        scale: multiplies the rows, in fp32.
    """
    alive = torch.arange(tokens.shape[0]) < live
    known = alive & (tokens >= 0) & (tokens < vocab_size)
    rows = undone(weight)[torch.where(known, tokens, 0)].to(out.dtype)
    out.copy_(rows.float() * scale)
