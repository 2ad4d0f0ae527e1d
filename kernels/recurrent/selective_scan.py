"""The selective state update of Mamba2, token after token (Dao and Gu, 2024, "Transformers are SSMs", section 6).

With a head's state `S` [state channels, head channels] and a token's step `dt = softplus(dt + dt_bias)`, within limits:
`S = exp(-exp(A_log) * dt) * S + B (dt * x)^T`, `out = S^T C + D * x`. All of it is float32.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import softplus

from ..native.optional_triton import tl, triton
from ..native.registration import Float32, Wide, Written, operator
from .state_tokens import (
    StateTokens,
    head_state,
    is_contiguous,
    program_token,
    run_length,
    state_at,
    without_none,
)

_CHANNEL_BLOCK = 32


class ScanWeights(NamedTuple):
    """Decay, skip and step bias of a layer's heads."""

    a_log: Float32  # float32 [heads]
    skip: Float32  # float32 [heads], `D`
    dt_bias: Float32  # float32 [heads]


# One program computes the tokens of one row, one head and a block of its channels; programs of later tokens return. It
# reads the state once, and for each token a block of x, the group's B and C, and the head's step.
@triton.jit
def _selective_scan_kernel(
    out, xbc, state, dt, weights, tokens, groups, xbc_stride, dt_stride, least, most,
    STATE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    STORE_EACH: tl.constexpr,
):  # fmt: skip
    first, live, row, is_first = program_token(tokens)
    if not is_first:
        return
    head, heads = tl.program_id(1), tl.num_programs(1)
    group = head // (heads // groups)
    states, channels = tl.arange(0, BLOCK_N), tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    has_state, has_channel = states < STATE_DIM, channels < HEAD_DIM
    pointers, inside, s = head_state(state, tokens, first, row, head, heads, states, channels, STATE_DIM, HEAD_DIM)
    rate = -tl.exp(tl.load(weights.a_log + head))
    dt_bias, skip = tl.load(weights.dt_bias + head), tl.load(weights.skip + head)
    length = run_length(tokens.rows, first, live)
    for i in range(length):
        token = (first + i).to(tl.int64)
        at = xbc + token * xbc_stride
        x = tl.load(at + head * HEAD_DIM + channels, mask=has_channel, other=0.0).to(tl.float32)
        b_at = at + heads * HEAD_DIM + group * STATE_DIM
        b = tl.load(b_at + states, mask=has_state, other=0.0).to(tl.float32)
        c = tl.load(b_at + groups * STATE_DIM + states, mask=has_state, other=0.0).to(tl.float32)
        step = tl.load(dt + token * dt_stride + head).to(tl.float32) + dt_bias
        step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
        step = tl.minimum(tl.maximum(step, least), most)
        s = s * tl.exp(rate * step) + b[:, None] * (x * step)[None, :]
        result = tl.sum(s * c[:, None], axis=0) + skip * x
        out_at = out + (token * heads + head) * HEAD_DIM
        tl.store(out_at + channels, result.to(out.dtype.element_ty), mask=has_channel)
        if STORE_EACH:
            state_row = tl.load(tokens.output_state_rows + token)
            tl.store(state_at(state, state_row, head, heads, states, channels, STATE_DIM, HEAD_DIM), s, mask=inside)
    if not STORE_EACH:
        tl.store(pointers, s, mask=inside)


def selective_scan_triton(out, xbc, state, dt, weights, tokens, least, most) -> None:
    """Launch the kernel; see `selective_scan`."""
    _, heads, state_dim, head_dim = state.shape
    block = min(triton.next_power_of_2(head_dim), _CHANNEL_BLOCK)
    groups = (xbc.shape[1] - heads * head_dim) // (2 * state_dim)
    _selective_scan_kernel[(out.shape[0], heads, triton.cdiv(head_dim, block))](
        out, xbc, state, dt, weights, without_none(tokens), groups, xbc.stride(0), dt.stride(0), least, most,
        STATE_DIM=state_dim, HEAD_DIM=head_dim, BLOCK_N=triton.next_power_of_2(state_dim), BLOCK_P=block,
        STORE_EACH=tokens.output_state_rows is not None, num_warps=4,
    )  # fmt: skip


def _is_served(out, xbc, state, dt) -> bool:
    return xbc.stride(1) == 1 == dt.stride(1) and is_contiguous(out, state)


@operator(triton_version=selective_scan_triton, is_compiled=_is_served)
def selective_scan(
    out: Written[Wide],
    xbc: Wide,
    state: Written[Float32],
    dt: Wide,
    weights: ScanWeights,
    tokens: StateTokens,
    least: float = 0.0,
    most: float = float("inf"),
) -> None:
    """Write what the heads read from their states into `out`, and advance the states by each token.

    Args:
        out: [t, heads * head channels], contiguous.
        xbc: [t, heads * head channels + 2 * groups * state channels]: `x`, `B`, `C`; rows may be strided. Heads
            of a group are adjacent.
        state: float32 [states + 1, heads, state channels, head channels].
        dt: [t, heads], the heads' steps; rows may be strided.
        weights: of the heads.
        tokens: their rows and states.
        least: lower limit of a step.
        most: upper limit of a step.
    """
    _, heads, state_dim, head_dim = state.shape
    group_size = (xbc.shape[1] - heads * head_dim) // 2
    for begin, end, row, is_new in tokens.runs():
        x, b, c = xbc[begin:end].float().split((heads * head_dim, group_size, group_size), dim=1)
        x = x.view(-1, heads, head_dim)
        b, c = (each.view(-1, group_size // state_dim, state_dim) for each in (b, c))
        b, c = (each.repeat_interleave(heads // each.shape[1], 1) for each in (b, c))
        step = softplus(dt[begin:end].float() + weights.dt_bias).clamp(least, most)
        decay = torch.exp(-weights.a_log.exp() * step)
        s = torch.zeros_like(state[row]) if is_new else state[row].clone()
        for i in range(end - begin):
            s *= decay[i, :, None, None]
            s += torch.einsum("hn,hp->hnp", b[i], x[i] * step[i, :, None])
            out[begin + i] = (torch.einsum("hnp,hn->hp", s, c[i]) + weights.skip[:, None] * x[i]).flatten()
            if tokens.output_state_rows is not None:
                state[tokens.output_state_rows[begin + i]] = s
        if tokens.output_state_rows is None:
            state[row] = s
