"""Launches of the kernels in CUDA C++, small, to be run under compute-sanitizer.

python -m gpu_checks.sanitized DEVICE
"""

from __future__ import annotations

import sys

import torch

import gpu_checks.absent  # noqa: F401 (first)
from gpu_checks.languages import TILES, tiles_of
from graphdecode.attention import QKNormRope
from graphdecode.kernels.attention.attention_records import AttentionOptions
from graphdecode.kernels.cuda import decode_attention, nvrtc
from graphdecode.kernels.linear.small_linear import skinny_candidates, small_linear
from graphdecode.kernels.linear.tiled_linear import tiled_linear

HEIGHT, WIDTH = 96, 512
_PAGES, _PAGE, _HEADS, _KV_HEADS, _HEAD_DIM = 16, 16, 4, 2, 64


def products(rows: int) -> None:
    """Launch all products of some rows, with and without what is fused with them."""
    x = torch.randn(rows, WIDTH, device="cuda").bfloat16()
    gain = torch.ones(WIDTH, device="cuda")
    weights = [torch.randn(HEIGHT, WIDTH, device="cuda").bfloat16()]
    weights += [tiles_of(kind, HEIGHT, WIDTH, "cuda") for kind in TILES]  # type: ignore[misc]
    for weight in weights:
        for epilogue, gained in (("store", None), ("add", None), ("silu", gain)):
            out = torch.zeros(rows, HEIGHT // 2 if epilogue == "silu" else HEIGHT, device="cuda").bfloat16()
            product = small_linear if isinstance(weight, torch.Tensor) else tiled_linear
            for config in skinny_candidates(x, weight, True):
                product(out, x, weight, None, None, config, gain=gained, eps=1e-5, epilogue=epilogue)  # type: ignore[arg-type]


def attention(rows: int) -> None:
    """Launch attention by clusters, over rows of different lengths."""
    out = torch.zeros(rows, _HEADS, _HEAD_DIM, device="cuda").bfloat16()
    keys, values = (torch.randn(_PAGES, _PAGE, _KV_HEADS, _HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
    qkv = torch.randn(rows, (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM, device="cuda").bfloat16()
    table = torch.arange(4 * rows, dtype=torch.int32, device="cuda").view(rows, 4) % (_PAGES - 1)
    lengths = torch.arange(rows, dtype=torch.int32, device="cuda") * 17
    rope = QKNormRope(torch.randn(4 * _PAGE, 2, _HEAD_DIM // 2, device="cuda"))
    decode_attention.launch_decode_attention(out, keys, values, qkv, table, lengths, rope, AttentionOptions())


def main() -> int:
    """Launch everything."""
    if sys.argv[1] == "cpu" or nvrtc.unavailable_reason() is not None:
        print(f"no kernel in CUDA C++ runs here: {nvrtc.unavailable_reason() or 'no CUDA device'}")
        return 0
    for rows in (1, 3, 8, 20, 64):
        products(rows)
    if decode_attention.has_clusters(torch.device("cuda", torch.cuda.current_device())):
        for rows in (1, 3):
            attention(rows)
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
