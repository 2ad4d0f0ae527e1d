"""The gated delta rule, token after token (Yang et al., 2024, "Gated Delta Networks", equation 10).

With a head's state `S` [key channels, value channels], normalized `q` and `k` and a token's decay `a` and strength `b`:
`S = a * S`, `S = S + k (b * (v - S^T k))^T`, `out = S^T q`. The decay is `exp(-exp(A_log) * softplus(a + dt_bias))`,
the strength `sigmoid(b)`, and `q` is scaled by `1 / sqrt(key channels)`. All of it is float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor
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

_EPS = 1e-6  # added to the squared length of a query or key
_VALUE_BLOCK = 16  # with 32 a float32 state of 128 key channels spills on sm_100


class DeltaGates(NamedTuple):
    """Inputs of the tokens' decays and strengths."""

    ab: Wide  # [t, 2 * value heads]: `a` of each head, then `b`; rows may be strided
    a_log: Float32  # float32 [value heads]
    dt_bias: Float32  # float32 [value heads]


# One program computes the tokens of one row, one value head and a block of its channels; programs of later tokens
# return. It reads the state once, and for each token the head's q and k, a block of v, and its gates.
@triton.jit
def _gated_delta_kernel(
    out, qkv, state, gates, tokens, key_heads, value_heads, qkv_stride, ab_stride, strength, eps,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    STORE_EACH: tl.constexpr,
):  # fmt: skip
    first, live, row, is_first = program_token(tokens)
    if not is_first:
        return
    head = tl.program_id(1)
    key_head = head // (value_heads // key_heads)
    keys, values = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    has_key, has_value = keys < KEY_DIM, values < VALUE_DIM
    pointers, inside, s = head_state(state, tokens, first, row, head, value_heads, keys, values, KEY_DIM, VALUE_DIM)
    rate = -tl.exp(tl.load(gates.a_log + head))
    dt_bias = tl.load(gates.dt_bias + head)
    length = run_length(tokens.rows, first, live)
    for i in range(length):
        token = (first + i).to(tl.int64)
        at = qkv + token * qkv_stride
        q = tl.load(at + key_head * KEY_DIM + keys, mask=has_key, other=0.0).to(tl.float32)
        k = tl.load(at + (key_heads + key_head) * KEY_DIM + keys, mask=has_key, other=0.0).to(tl.float32)
        v_at = at + 2 * key_heads * KEY_DIM + head * VALUE_DIM
        v = tl.load(v_at + values, mask=has_value, other=0.0).to(tl.float32)
        a = tl.load(gates.ab + token * ab_stride + head).to(tl.float32) + dt_bias
        b = tl.load(gates.ab + token * ab_stride + value_heads + head).to(tl.float32)
        decay = tl.exp(rate * tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0)))))
        q = q * (1.0 / tl.sqrt(tl.sum(q * q) + eps)) * (1.0 / KEY_DIM**0.5)
        k = k * (1.0 / tl.sqrt(tl.sum(k * k) + eps))
        s = s * decay
        predicted = tl.sum(s * k[:, None], axis=0)
        s += k[:, None] * ((v - predicted) * strength / (1.0 + tl.exp(-b)))[None, :]
        result = tl.sum(s * q[:, None], axis=0)
        out_at = out + (token * value_heads + head) * VALUE_DIM
        tl.store(out_at + values, result.to(out.dtype.element_ty), mask=has_value)
        if STORE_EACH:
            state_row = tl.load(tokens.output_state_rows + token)
            tl.store(state_at(state, state_row, head, value_heads, keys, values, KEY_DIM, VALUE_DIM), s, mask=inside)
    if not STORE_EACH:
        tl.store(pointers, s, mask=inside)


def gated_delta_triton(out, qkv, state, gates, tokens, strength) -> None:
    """Launch the kernel; see `gated_delta`."""
    _, heads, key_dim, value_dim = state.shape
    block = min(triton.next_power_of_2(value_dim), _VALUE_BLOCK)
    key_heads = (qkv.shape[1] - heads * value_dim) // (2 * key_dim)
    _gated_delta_kernel[(out.shape[0], heads, triton.cdiv(value_dim, block))](
        out, qkv, state, gates, without_none(tokens), key_heads, heads, qkv.stride(0), gates.ab.stride(0),
        strength, _EPS, KEY_DIM=key_dim, VALUE_DIM=value_dim, BLOCK_K=triton.next_power_of_2(key_dim), BLOCK_V=block,
        STORE_EACH=tokens.output_state_rows is not None, num_warps=4,
    )  # fmt: skip


def _is_served(out, qkv, state, gates) -> bool:
    return qkv.stride(1) == 1 == gates.ab.stride(1) and is_contiguous(out, state)


@operator(triton_version=gated_delta_triton, is_compiled=_is_served)
def gated_delta(
    out: Written[Wide],
    qkv: Wide,
    state: Written[Float32],
    gates: DeltaGates,
    tokens: StateTokens,
    strength: float = 1.0,
) -> None:
    """Write what the heads read from their states into `out`, and advance the states by each token.

    Args:
        out: [t, value heads * value channels], contiguous.
        qkv: [t, 2 * key heads * key channels + value heads * value channels]: queries, keys, values; rows may be
            strided. Value heads per key head are adjacent.
        state: float32 [states + 1, value heads, key channels, value channels].
        gates: of each token.
        tokens: their rows and states.
        strength: multiplies `sigmoid(b)`.
    """
    _, heads, key_dim, value_dim = state.shape
    key_size = (qkv.shape[1] - heads * value_dim) // 2
    repeat = heads * key_dim // key_size
    for begin, end, row, is_new in tokens.runs():
        q, k, v = qkv[begin:end].float().split((key_size, key_size, heads * value_dim), dim=1)
        q, k = (_unit(each.view(-1, key_size // key_dim, key_dim)).repeat_interleave(repeat, 1) for each in (q, k))
        v, (a, b) = v.view(-1, heads, value_dim), gates.ab[begin:end].float().chunk(2, dim=1)
        decay = torch.exp(-gates.a_log.exp() * softplus(a + gates.dt_bias))
        beta = b.sigmoid() * strength
        s = torch.zeros_like(state[row]) if is_new else state[row].clone()
        for i in range(end - begin):
            s *= decay[i, :, None, None]
            predicted = torch.einsum("hkv,hk->hv", s, k[i])
            s += torch.einsum("hk,hv->hkv", k[i], (v[i] - predicted) * beta[i, :, None])
            out[begin + i] = torch.einsum("hkv,hk->hv", s, q[i] * key_dim**-0.5).flatten()
            if tokens.output_state_rows is not None:
                state[tokens.output_state_rows[begin + i]] = s
        if tokens.output_state_rows is None:
            state[row] = s


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
