"""Causal depthwise convolution over the tokens of a sequence.

`y[t] = activation(bias + sum_j weight[j] * x[t - width + 1 + j])`. The last `width - 1` inputs of a sequence are its
state. Used by Mamba2, gated delta nets and LFM2, whose gated form convolves `b * x` and returns `c * y`; `b`, `c` and
`x` are adjacent.
"""

import torch

from ..native.optional_triton import tl, triton
from ..native.registration import Float32, Wide, Written, operator
from .state_tokens import StateTokens, is_contiguous, run_length, without_none

MAX_CONV_WIDTH = 8
_MAX_BLOCK = 256


@triton.jit
def _input_at(
    x, token, begin, channels, count, inside, x_stride, state, past, WIDTH: tl.constexpr, GATED: tl.constexpr
):
    """Return the input of a token of a run; before the run, from the state."""
    if token >= begin:
        at = x + token.to(tl.int64) * x_stride + channels
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            value *= tl.load(at + 2 * count, mask=inside, other=0.0).to(tl.float32)
    elif past > 0:
        value = tl.load(state + (token - begin + WIDTH - 1) * count + channels, mask=inside, other=0.0)
    else:
        value = tl.zeros(channels.shape, tl.float32)
    return value


@triton.jit
def _convolve(
    out, x, weight, bias, token, begin, channels, count, inside, x_stride, state, past,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Write the output of one token."""
    total = tl.zeros(channels.shape, tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=inside, other=0.0)
    for j in tl.static_range(WIDTH):
        at = token - WIDTH + 1 + j
        value = _input_at(x, at, begin, channels, count, inside, x_stride, state, past, WIDTH, GATED)
        total += value * tl.load(weight + j * count + channels, mask=inside, other=0.0)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    if GATED:
        total *= tl.load(x + token.to(tl.int64) * x_stride + count + channels, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * count + channels, total.to(out.dtype.element_ty), mask=inside)


# One program computes one token of a block of channels: it reads WIDTH inputs per channel and the weights, and writes
# one output. The program of a row's first token also computes the tokens that read the state, and writes the new state.
@triton.jit
def _causal_conv_kernel(
    out, x, state, weight, bias, tokens, channel_count, x_stride,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr, STORE_EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    live = tl.load(tokens.live)
    if token >= live:
        return
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < channel_count
    row = tl.load(tokens.rows + token)
    back = tl.arange(0, 8)
    before = token - 1 - back
    same = tl.load(tokens.rows + before, mask=(before >= 0) & (back < WIDTH - 1), other=-1) == row
    depth = tl.sum(same.to(tl.int32))  # tokens of the row before this one, within the width
    if depth >= WIDTH - 1:
        base = state  # not read
        _convolve(
            out, x, weight, bias, token, 0, channels, channel_count, inside, x_stride, base, depth,
            WIDTH, HAS_BIAS, SILU, GATED,
        )  # fmt: skip
    elif depth == 0:
        base = state + tl.load(tokens.state_rows + row).to(tl.int64) * (WIDTH - 1) * channel_count
        past = tl.load(tokens.positions + token)
        length = run_length(tokens.rows, token, live)
        for i in range(tl.minimum(length, WIDTH - 1)):
            _convolve(
                out, x, weight, bias, token + i, token, channels, channel_count, inside, x_stride, base, past,
                WIDTH, HAS_BIAS, SILU, GATED,
            )  # fmt: skip
        for i in range(0 if STORE_EACH else length - 1, length):
            to = base
            if STORE_EACH:
                to = state + tl.load(tokens.output_state_rows + token + i).to(tl.int64) * (WIDTH - 1) * channel_count
            for j in tl.static_range(WIDTH - 1):  # entry j gets entry j + 1: read before it is written
                at = token + i - WIDTH + 2 + j
                value = _input_at(x, at, token, channels, channel_count, inside, x_stride, base, past, WIDTH, GATED)
                tl.store(to + j * channel_count + channels, value, mask=inside)


def causal_conv_triton(out, x, state, weight, bias, silu, tokens) -> None:
    """Launch the kernel; see `causal_conv`."""
    count, channels = out.shape
    block = min(triton.next_power_of_2(channels), _MAX_BLOCK)
    _causal_conv_kernel[(count, triton.cdiv(channels, block))](
        out, x, state, weight, bias, without_none(tokens), channels, x.stride(0),
        WIDTH=weight.shape[0], HAS_BIAS=bias is not None, SILU=silu, GATED=x.shape[1] != channels,
        STORE_EACH=tokens.output_state_rows is not None,
        BLOCK=block, num_warps=4,
    )  # fmt: skip


def _is_served(out, x, state, weight) -> bool:
    return x.stride(1) == 1 and is_contiguous(out, state, weight) and weight.shape[0] <= MAX_CONV_WIDTH


@operator(triton_version=causal_conv_triton, is_compiled=_is_served, constants={"MAX_CONV_WIDTH": MAX_CONV_WIDTH})
def causal_conv(
    out: Written[Wide],
    x: Wide,
    state: Written[Float32],
    weight: Float32,
    bias: Float32 | None,
    silu: bool,
    tokens: StateTokens,
) -> None:
    """Write the convolution of `x` into `out`, and the last inputs of each row into its state.

    Args:
        out: [t, channels], contiguous.
        x: [t, channels], or gated [t, 3 * channels]: `b`, `c`, `x`; rows may be strided.
        state: float32 [states + 1, width - 1, channels], the oldest input first.
        weight: float32 [width, channels], for the oldest input first; width 2 to 8.
        bias: float32 [channels], or None.
        silu: whether to apply SiLU.
        tokens: their rows and states.
    """
    channels, width = out.shape[1], weight.shape[0]
    for begin, end, row, is_new in tokens.runs():
        inputs = x[begin:end].float()
        if x.shape[1] != channels:
            b, c, x_part = inputs.split(channels, dim=1)
            inputs = b * x_part
        history = torch.zeros_like(state[row]) if is_new else state[row]
        padded = torch.cat((history, inputs))  # [width - 1 + n, channels]
        total = torch.zeros_like(inputs) if bias is None else bias.expand_as(inputs).clone()
        for j in range(width):
            total += padded[j : j + end - begin] * weight[j]
        total = torch.nn.functional.silu(total) if silu else total
        out[begin:end] = total if x.shape[1] == channels else total * c
        if tokens.output_state_rows is None:
            state[row] = padded[end - begin :]
        else:
            state[tokens.output_state_rows[begin:end].long()] = padded.unfold(0, width - 1, 1)[1:].movedim(2, 1)
