"""What the corpus of steps runs over."""

import torch

from graphdecode import Slot, StepBuffers

WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
TABLE = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
SPARSE = torch.diag(torch.arange(1.0, 9.0)).to_sparse()
COMPRESSED = SPARSE.to_sparse_csr()
PACKED = torch.randn(4, 8, generator=torch.Generator().manual_seed(2)).to_mkldnn()
QUANTIZED = torch.quantize_per_tensor(torch.linspace(-1, 1, 32).view(4, 8), 0.1, 0, torch.qint8)
CONSTANTS = [WEIGHT, TABLE, SPARSE, COMPRESSED, PACKED, QUANTIZED]


def make_buffers() -> StepBuffers:
    """Return four rows of floats, indices and flags."""
    return StepBuffers(
        [
            Slot("x", ("batch", 8), torch.float32, pad=0.0),
            Slot("y", ("batch", 8), torch.float32, pad=0.0),
            Slot("n", ("batch",), torch.int32, pad=0),
            Slot("ids", ("batch",), torch.int64, pad=1),
            Slot("flag", ("batch",), torch.bool, pad=False),
        ],
        max_batch_size=4,
        device="cpu",
    )
