"""Weights to blocks of GGUF.

The package `gguf` makes Q8_0. Made here are Q4_K and Q6_K, which it lacks, and Q5_0, for which it does not search
scales. Scales are searched as in ggml: those of the least error of several are taken, and codes are rounded with the
stored scales. Layouts are those of ggml's `ggml-common.h`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_VALUES_AT_ONCE = 1 << 21  # to quantize, which needs some tens of MB of temporary memory
_SUPER_BLOCK = 256
_MOVES = (-0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75)  # added to the largest code, for candidate scales
_LEAST = 1e-15


def quantized_blocks(weight: Tensor, block_type: str) -> Tensor:
    """Return a weight [rows, columns], whole blocks, as uint8 [rows, bytes of a row]: Q8_0, Q5_0, Q4_K or Q6_K."""
    step = max(1, _VALUES_AT_ONCE // weight.shape[1])
    return torch.cat([_KINDS[block_type](some.float()) for some in weight.split(step)])


def _q8_0(weight: Tensor) -> Tensor:
    import gguf.quants  # models of other formats do not need it

    return torch.from_numpy(gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0))


def _bytes(halves: Tensor) -> Tensor:
    """Return numbers [blocks] in half precision as bytes [blocks, 2]."""
    return halves.contiguous().view(torch.uint8).view(-1, 2)


def _q4_k(weight: Tensor) -> Tensor:
    """Return blocks of 256 in 8 groups, each with a scale and a least value of six bits: 4.5 bits a value."""
    groups = weight.reshape(-1, 8, 32)
    scales, mins = _scales_and_mins(groups, 15)
    most = scales.amax(1), mins.amax(1)
    by = tuple((each / 63).half() for each in most)
    in_six_bits = [
        (63 * each / largest.clamp(min=_LEAST)[:, None]).round().clamp(0, 63)
        for each, largest in zip((scales, mins), most, strict=True)
    ]
    scale, least = (part * factor.float()[:, None] for part, factor in zip(in_six_bits, by, strict=True))
    codes = ((groups + least[..., None]) / scale.clamp(min=_LEAST)[..., None]).round().clamp(0, 15).to(torch.uint8)
    low, high = codes.view(-1, 4, 2, 32).unbind(2)
    sixes = [part.to(torch.uint8) for part in in_six_bits]
    first = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in sixes]
    rest = sixes[0][:, 4:] & 15 | (sixes[1][:, 4:] & 15) << 4
    blocks = torch.cat((_bytes(by[0]), _bytes(by[1]), *first, rest, (low | high << 4).flatten(1)), dim=1)
    return blocks.view(len(weight), -1)


def _scales_and_mins(groups: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return scales and negated minima, both >= 0, for codes from 0 to `most`, by least squares over rounded codes.

    Errors are weighted by the magnitude of a value and of its group; see ggml's `make_qkx2_quants`.
    """
    least, largest = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True)
    width = (largest - least).clamp(min=_LEAST)
    weights = groups.square().mean(-1, keepdim=True).sqrt() + groups.abs()
    sum_w, sum_x = weights.sum(-1, keepdim=True), (weights * groups).sum(-1, keepdim=True)
    best_scale, best_min = width / most, least
    best_error = torch.full_like(width, torch.inf)
    for move in _MOVES:
        codes = ((groups - least) * ((most + move) / width)).round_().clamp_(0, most)
        weighted = weights * codes
        sum_l, sum_l2 = weighted.sum(-1, keepdim=True), (weighted * codes).sum(-1, keepdim=True)
        sum_xl = (weighted * groups).sum(-1, keepdim=True)
        determinant = sum_w * sum_l2 - sum_l.square()
        safe = determinant.clamp(min=_LEAST)
        scale = (sum_w * sum_xl - sum_x * sum_l) / safe
        found_min = (sum_l2 * sum_x - sum_l * sum_xl) / safe
        above = found_min > 0
        scale = torch.where(above, sum_xl / sum_l2.clamp(min=_LEAST), scale)
        found_min = found_min.clamp(max=0)
        error = (weights * (scale * codes + found_min - groups).square_()).sum(-1, keepdim=True)
        better = (error < best_error) & (determinant > 0)
        best_scale, best_min = torch.where(better, scale, best_scale), torch.where(better, found_min, best_min)
        best_error = torch.where(better, error, best_error)
    return best_scale[..., 0].clamp(min=0), -best_min[..., 0]


def _q5_0(weight: Tensor) -> Tensor:
    """Return blocks of 32 with a scale: 5.5 bits a value."""
    groups = weight.reshape(-1, 1, 32)
    scale = _signed_scales(groups, 16).half()
    codes = (groups[:, 0] / torch.where(scale == 0, torch.inf, scale.float())).round().clamp(-16, 15).add(16)
    codes = codes.to(torch.uint8)
    fifth = (codes.view(-1, 4, 8) >> 4 << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    low, high = (codes & 15).view(-1, 2, 16).unbind(1)
    return torch.cat((_bytes(scale[:, 0]), fifth, low | high << 4), dim=1).view(len(weight), -1)


def _q6_k(weight: Tensor) -> Tensor:
    """Return blocks of 256 in 16 groups, each with a scale of eight bits: 6.6 bits a value."""
    groups = weight.reshape(-1, 16, 16)
    scales = _signed_scales(groups, 32)
    most = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    by = (most / -128).half()
    in_bytes = (scales * (-128 / torch.where(most == 0, torch.inf, most))).round().clamp(-128, 127)
    scale = (in_bytes * by.float())[..., None]
    codes = (groups / torch.where(scale == 0, torch.inf, scale)).round().clamp(-32, 31).add(32).to(torch.uint8)
    quarters = codes.view(-1, 2, 4, 32)  # of a half block
    low, high = quarters & 15, quarters >> 4
    low = torch.cat((low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4), dim=-1)
    high = (high << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]).sum(2, dtype=torch.uint8)
    scales_stored = in_bytes.to(torch.int8).view(torch.uint8)
    blocks = torch.cat((low.flatten(1), high.flatten(1), scales_stored, _bytes(by[:, 0])), dim=1)
    return blocks.view(len(weight), -1)


def _signed_scales(groups: Tensor, most: int) -> Tensor:
    """Return scales for codes from -most to most - 1; errors are weighted by the value's square (`make_qx_quants`)."""
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    safe = torch.where(largest == 0, torch.inf, largest)
    best, best_gain = torch.zeros_like(largest), torch.zeros_like(largest)
    weights = groups.square()
    for move in _MOVES:
        codes = (groups * (-(most + move) / safe)).round_().clamp_(-most, most - 1)
        weighted = weights * codes
        sum_xl, sum_l2 = (weighted * groups).sum(-1, keepdim=True), (weighted * codes).sum(-1, keepdim=True)
        scale = sum_xl / sum_l2.clamp(min=_LEAST)
        better = scale * sum_xl > best_gain
        best, best_gain = torch.where(better, scale, best), torch.where(better, scale * sum_xl, best_gain)
    return best[..., 0]


_KINDS: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_0": _q5_0, "Q6_K": _q6_k}
