"""A decoder layer in float64 over whole sequences, written from the formulas alone, and random lives of a batch."""

import math
import random
from collections import OrderedDict

import torch


def rotated(x, base=10000.0, interleaved=False):
    """Rotate [n, h, d] to the positions 0..n-1, pair by pair, as complex numbers."""
    n, _, d = x.shape
    angles = torch.outer(torch.arange(n).double(), base ** (-torch.arange(0, d, 2).double() / d))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]  # [n, 1, d / 2]
    pairs = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = torch.complex(*(p.contiguous() for p in pairs)) * turn
    if interleaved:
        return torch.stack((turned.real, turned.imag), -1).flatten(-2)
    return torch.cat((turned.real, turned.imag), -1)


def attended(q, k, v, window=-1, scale=None):
    """Causal attention of the last tokens [n, h, d] over all [m, g, d], heads repeated."""
    n, heads, dim = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * (1 / math.sqrt(dim) if scale is None else scale)
    distance = torch.arange(len(k) - n, len(k))[:, None] - torch.arange(len(k))
    hidden = (distance < 0) | ((distance > window) if window >= 0 else False)
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -math.inf).softmax(-1), v)


def norm(x, parameters, prefix, kind, eps, centered):
    weight = parameters[f"{prefix}.layer_norm_weight"] + (1 if centered else 0)
    if kind == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return (
        centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight
        + parameters[f"{prefix}.layer_norm_bias"]
    )


def product(x, parameters, name):
    bias = parameters.get(name.replace("weight", "bias"))
    return x @ parameters[name].T + (0 if bias is None else bias)


def activated(inner, activation):
    if activation == "relu":
        return inner.clamp(min=0)
    if activation == "gelu":
        return torch.nn.functional.gelu(inner, approximate="tanh")
    gate, up = inner.chunk(2, -1)
    act = torch.nn.functional.silu if activation == "swiglu" else lambda x: activated(x, "gelu")
    return act(gate) * up


def attention_block(x, parameters, prefix, dim, *, window=-1, interleaved=False):
    """Projections and attention of [n, hidden]: parameters `prefix.query_weight` ..., and `proj`."""
    flat = (product(x, parameters, f"{prefix}.{name}_weight") for name in ("query", "key", "value"))
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in flat)
    q, k = rotated(q, interleaved=interleaved), rotated(k, interleaved=interleaved)
    out = attended(q, k, v, window).flatten(-2)
    return product(out, parameters, prefix.replace("layernorm_qkv", "proj").replace("qkv", "proj") + ".weight")


def layer(x, module, dim, *, kind, activation, eps=1e-5, centered=False, window=-1, interleaved=False):
    """The whole layer over one sequence [n, hidden]."""
    parameters = {name: p.detach().double().cpu() for name, p in module.named_parameters()}
    prefix = "self_attention.layernorm_qkv"
    inner = norm(x, parameters, prefix, kind, eps, centered)
    x = x + attention_block(inner, parameters, prefix, dim, window=window, interleaved=interleaved)
    inner = norm(x, parameters, "layernorm_mlp", kind, eps, centered)
    inner = activated(product(inner, parameters, "layernorm_mlp.fc1_weight"), activation)
    return x + product(inner, parameters, "layernorm_mlp.fc2_weight")


def random_life(seed, steps, max_batch, max_length, widths=(1, 1, 1, 2, 4)):
    """Yield step dicts in which sequences enter, leave and change order."""
    choose = random.Random(seed)
    lengths, next_id = OrderedDict(), 0
    for _ in range(steps):
        ids = [i for i in lengths if lengths[i] + max(widths) <= max_length and choose.random() < 0.9]
        if choose.random() < 0.4:
            choose.shuffle(ids)
        while len(ids) < max_batch and (not ids or choose.random() < 0.3):
            next_id += 3
            ids.insert(choose.randint(0, len(ids)), next_id)
        step = OrderedDict((i, choose.choice(widths)) for i in ids)
        lengths = OrderedDict((i, lengths.get(i, 0) + n) for i, n in step.items())
        yield step


def in_layout(rows, form, width=None):
    """Lay rows [n_i, ...] out in a format; what is not a token is large."""
    if form == "thd":
        packed = torch.cat(rows)
        return torch.cat((packed, torch.full((2, *packed.shape[1:]), 9.0)))  # a trailing pad
    width = width or max(len(row) for row in rows)
    out = torch.full((len(rows), width, *rows[0].shape[1:]), 9.0)
    for position, row in zip(out, rows, strict=True):
        position[: len(row)] = row
    return out.transpose(0, 1).contiguous() if form == "sbhd" else out


def split_rows(out, form, lengths):
    """The rows of a result in a format."""
    if form == "thd":
        return list(out[: sum(lengths)].split(list(lengths)))
    out = out.transpose(0, 1) if form == "sbhd" else out
    return [row[:n] for row, n in zip(out, lengths, strict=False)]
