"""Rotary position embedding with TransformerEngine's names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphdecode.buffers import default_device


class RotaryPositionEmbedding(nn.Module):
    """The angles of rotary position embedding (Su et al., RoFormer, 2021): `position * rotary_base^(-2i / dim)`.

    Args:
        dim: size of a head.
        rotary_percent: the part of it that is rotated.
        seq_len_interpolation_factor: divides the positions; needs `pretrained_max_position_embeddings`.
        pretrained_max_position_embeddings: tokens that a model was trained for; positions of a sequence that is more
            than the factor times as long are scaled into these.
        rotary_base: base of the frequencies.
        interleaved: whether pairs are adjacent (0, 1), or (i, i + dim / 2).
        device: None means CUDA if available, else the CPU.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if rotary_percent < 1.0:
            dim = int(dim * rotary_percent)
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.interleaved = interleaved
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=default_device(device)) / dim

        self.register_buffer("inv_freq", 1.0 / rotary_base**exponents)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles of the positions offset..offset + max_seq_len - 1, fp32 [max_seq_len, 1, 1, dim]."""
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=self.inv_freq.device) + offset
        trained, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if trained is not None and factor is not None:
            positions = positions / (max_seq_len / trained if max_seq_len > trained * factor else factor)
        angles = torch.outer(positions, self.inv_freq)  # [max_seq_len, dim / 2]
        freqs = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        return freqs[:, None, None]


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotate queries or keys to their positions, in fp32; nothing is read on the host, so that it can be captured.

    Args:
        t: [s, b, h, d] (sbhd), [b, s, h, d] (bshd) or [t, h, d] (thd).
        freqs: angles [s2, 1, 1, d2], d2 <= d, as `RotaryPositionEmbedding` makes them; what is past d2 is not rotated.
            Positions past s2, where only padding may be, take the last angles.
        tensor_format: `sbhd`, `bshd` or `thd`.
        start_positions: int [>= b], the position of each row's first token; None: 0.
        interleaved: whether pairs are adjacent.
        cu_seqlens: int32 [b + 1], where each row's tokens begin; thd needs it.
        fused, cp_size, cp_rank: part of the surface; a sequence is not shared among ranks.

    Raises:
        ValueError: the format is unknown, or the shapes do not fit it.
    """
    if cp_size != 1:
        raise ValueError(f"cp_size must be 1: a sequence is not shared among ranks, got {cp_size}")
    if tensor_format not in ("sbhd", "bshd", "thd") or t.dim() != len(tensor_format):
        raise ValueError(f"t must be sbhd, bshd or thd, got {tensor_format!r} with the shape {tuple(t.shape)}")
    if freqs.dim() != 4 or freqs.shape[1:3] != (1, 1) or freqs.shape[-1] > t.shape[-1] or freqs.shape[-1] % 2:
        raise ValueError(f"freqs must be [s, 1, 1, d2] with an even d2 <= {t.shape[-1]}, got {tuple(freqs.shape)}")
    positions = _positions(t, tensor_format, start_positions, cu_seqlens).clamp(max=freqs.shape[0] - 1)
    angles = freqs[:, 0].float()[positions]  # [..., 1, d2]
    rotated, t_pass = t[..., : freqs.shape[-1]].float(), t[..., freqs.shape[-1] :]
    if interleaved:
        rotated_half = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), -1).flatten(-2)
    else:
        low, high = rotated.chunk(2, -1)
        rotated_half = torch.cat((-high, low), -1)
    return torch.cat(((rotated * angles.cos() + rotated_half * angles.sin()).to(t.dtype), t_pass), -1)


def _positions(t: Tensor, tensor_format: str, starts: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return the position of each token, int64: [s, b], [b, s] or [t]."""
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise ValueError("cu_seqlens is needed with tensor_format='thd', got None")
        tokens = torch.arange(t.shape[0], device=t.device)
        rows = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)
        rows = rows.clamp(max=cu_seqlens.shape[0] - 2)
        inside = tokens - cu_seqlens[rows]
        return inside if starts is None else inside + starts[rows]
    batch_dim = tensor_format.index("b")
    steps = torch.arange(t.shape[1 - batch_dim], device=t.device)
    if starts is not None and starts.shape[0] < t.shape[batch_dim]:
        raise ValueError(f"start_positions must have {t.shape[batch_dim]} entries or more, got {starts.shape[0]}")
    offsets = steps.new_zeros(t.shape[batch_dim]) if starts is None else starts[: t.shape[batch_dim]].long()
    return offsets[:, None] + steps if tensor_format == "bshd" else offsets + steps[:, None]
