"""Arguments of TransformerEngine's modules at values other than neutral, against float64; and what is refused."""

import math
from collections import OrderedDict

import pytest
import torch
from layer_oracle import in_layout, norm, product, rotated, split_rows

from graphdecode import GraphManager, InferenceParams, Slot, StepBuffers
from graphdecode.surfaces.transformer_engine import (
    DotProductAttention,
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
)

HIDDEN, HEADS, GROUPS, DIM, ROWS, LENGTH = 24, 4, 2, 8, 3, 24
SLOPES = (0.3, 0.1, 0.7, 0.05)


def visible_keys(q_len, kv_len, mask, window=(-1, -1), bottom_right=None):
    """The keys that each query sees, and its position, from the published table of masks."""
    corner = "bottom_right" in mask or ("causal" not in mask and bottom_right is not False)
    at = torch.arange(q_len)[:, None] + (kv_len - q_len if corner else 0)
    keys = torch.arange(kv_len)
    visible = torch.ones(q_len, kv_len, dtype=torch.bool)
    if "causal" in mask:
        visible &= keys <= at
    if window[0] >= 0:
        visible &= (keys >= at - window[0]) & (keys <= at + max(window[1], 0))
    return visible, at


def attention(q, k, v, visible, at, sinks=None, cap=0.0, slopes=None):
    """Attention [n, h, d] over [m, g, d] in float64."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    logits = cap * torch.tanh(logits / cap) if cap else logits
    if slopes is not None:
        logits = logits - torch.tensor(slopes).double().view(-1, 1, 1) * (at - torch.arange(len(k))).abs()
    weights = logits.exp() * visible
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().view(-1, 1, 1).exp()
    return torch.einsum("hqk,khd->qhd", torch.where(total > 0, weights / total, 0.0), v).flatten(-2)


def cache(paged, form, device="cpu"):
    pages = {"total_num_pages": 24, "page_size": 4} if paged else {}
    return InferenceParams(
        ROWS, LENGTH, GROUPS, DIM, torch.float32, is_paged=paged, qkv_format=form, device=device, **pages
    )


def new_tokens(lengths, seed=0, heads=(HEADS, GROUPS, GROUPS)):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(n, h, DIM, generator=generator) for n in lengths] for h in heads]


OPTIONS = {  # of the module, of the call, of the oracle
    "off-by-one": ({"softmax_type": "off-by-one"}, {}, {"sinks": torch.zeros(HEADS)}),
    "learnable": ({"softmax_type": "learnable"}, {}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
    "softcap": ({"softcap": 0.8}, {}, {"cap": 0.8}),
    "softcap of the call": ({"softcap": 3.0}, {"softcap": 0.8}, {"cap": 0.8}),
    "alibi_slopes": (
        {},
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.tensor(SLOPES)},
        {"slopes": SLOPES},
    ),
    "published slopes": ({}, {"core_attention_bias_type": "alibi"}, {"slopes": (0.25, 0.0625, 0.015625, 0.00390625)}),
    "alibi with sinks": (
        {"softmax_type": "off-by-one", "softcap": 0.8},
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.tensor(SLOPES)},
        {"slopes": SLOPES, "sinks": torch.zeros(HEADS), "cap": 0.8},
    ),
}
MASKS = {
    "padding_causal": {},
    "padding": {},
    "padding with a window": {"window_size": (3, 1)},
    "padding at the top left": {"window_size": (3, 1), "bottom_right_diagonal": False},
    "padding_causal with a window": {"window_size": (2, 5)},
}


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_attention_over_a_cache_has_each_argument(paged, form, name, mask, device):
    of_module, of_call, expected = OPTIONS[name]
    of_call, kind = of_call | MASKS[mask] | {"attn_mask_type": mask.split()[0]}, mask.split()[0]
    if "alibi_slopes" in of_call:
        of_call["alibi_slopes"] = of_call["alibi_slopes"].to(device)
    module = DotProductAttention(HEADS, DIM, GROUPS, qkv_format=form, layer_number=1, **of_module).to(device)
    if module.softmax_offset is not None:
        module.softmax_offset.copy_(expected["sinks"])
    params = cache(paged, form, device)
    params.allocate_memory(1)
    for tensors in params.cache_manager.cache.values():
        for tensor in tensors:
            tensor.fill_(math.nan)  # what is not a token has no effect
    history = [[torch.empty(0, h, DIM) for _ in range(2)] for h in (GROUPS, GROUPS)]
    for seed, lengths in enumerate(((5, 2), (1, 3), (1, 1))):
        params.pre_step(OrderedDict(zip("ab", lengths, strict=True)))
        new = new_tokens(lengths, seed)
        history = [
            [torch.cat(pair) for pair in zip(old, now, strict=True)] for old, now in zip(history, new[1:], strict=True)
        ]
        out = module(*(in_layout(rows, form).to(device) for rows in new), inference_params=params, **of_call)
        for row, result in enumerate(split_rows(out, form, lengths)):
            aligned = kind.replace("causal", "causal_bottom_right")
            visible, at = visible_keys(
                lengths[row], len(history[0][row]), aligned, of_call.get("window_size", (-1, -1)),
                of_call.get("bottom_right_diagonal"),
            )  # fmt: skip
            right = attention(new[0][row], history[0][row], history[1][row], visible, at, **expected)
            torch.testing.assert_close(result.double().cpu(), right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
def test_alibi_slopes_may_differ_by_row(form):
    module = DotProductAttention(HEADS, DIM, GROUPS, qkv_format=form, attn_mask_type="padding_causal")
    params, slopes = cache(False, form), torch.tensor([SLOPES, SLOPES[::-1]])
    params.allocate_memory(1)
    params.pre_step(OrderedDict(a=3, b=2))  # of the three rows that the cache has
    new, options = new_tokens((3, 2)), {"core_attention_bias_type": "alibi", "alibi_slopes": slopes}
    out = module(*(in_layout(rows, form) for rows in new), inference_params=params, **options)
    for row, result in enumerate(split_rows(out, form, (3, 2))):
        part = slopes[row].tolist()
        right = attention(*(rows[row] for rows in new), *visible_keys((3, 2)[row], (3, 2)[row], "causal"), slopes=part)
        torch.testing.assert_close(result.double(), right, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"alibi_slopes .*\[4\]"):
        module(
            *(in_layout(rows, form) for rows in new),
            inference_params=params,
            **options | {"alibi_slopes": slopes[:, 1:]},
        )


@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize(
    ("kind", "window"),
    [("padding", None), ("padding_causal", None), ("padding_causal", (1, 0)), ("padding", (1, 2)),
     ("padding_causal_bottom_right", None)],
)  # fmt: skip
def test_keys_without_a_cache_may_have_other_lengths_than_queries(form, kind, window):
    lengths, of_keys = (3, 1, 4), (5, 4, 6)
    (q,), (k, v) = new_tokens(lengths, 1, (HEADS,)), new_tokens(of_keys, 2, (GROUPS, GROUPS))
    sums = [torch.tensor([0, *n]).cumsum(0).int() for n in (lengths, of_keys)]
    module = DotProductAttention(HEADS, DIM, GROUPS, qkv_format=form, attn_mask_type=kind)
    out = module(
        *(in_layout(rows, form) for rows in (q, k, v)),
        None,
        None,
        *sums,
        window_size=window,
        max_seqlen_q=4,
        max_seqlen_kv=6,
    )
    for row, result in enumerate(split_rows(out, form, lengths)):
        visible, at = visible_keys(lengths[row], of_keys[row], kind, window or (-1, -1))
        right = attention(q[row], k[row], v[row], visible, at)
        torch.testing.assert_close(result.double(), right, atol=1e-5, rtol=1e-5)


def test_packed_rows_may_have_padding_between_them():
    lengths = (3, 1, 2)
    new, width = new_tokens(lengths, 3), 4
    packed = [
        torch.cat([torch.cat((row, torch.full((width - len(row), *row.shape[1:]), 9.0))) for row in rows])
        for rows in new
    ]
    sums, padded = torch.tensor([0, *lengths]).cumsum(0).int(), torch.arange(4).int() * width
    module = DotProductAttention(HEADS, DIM, GROUPS, qkv_format="thd", attn_mask_type="padding_causal")
    out = module(
        *packed,
        cu_seqlens_q=sums,
        cu_seqlens_kv=sums,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        pad_between_seqs=True,
    )
    for row, n in enumerate(lengths):
        right = attention(*(rows[row] for rows in new), *visible_keys(n, n, "causal"))
        torch.testing.assert_close(out[row * width : row * width + n].double(), right, atol=1e-5, rtol=1e-5)
        assert not out[row * width + n : (row + 1) * width].any()
    tight = [torch.cat(rows) for rows in new]
    out = module(*tight, cu_seqlens_q=sums, cu_seqlens_q_padded=padded, pad_between_seqs=False)
    torch.testing.assert_close(out[3:4].double(), attention(*(rows[1] for rows in new), *visible_keys(1, 1, "causal")))


@pytest.mark.parametrize("is_padded", [None, True, False])
def test_packed_rows_with_padding_are_rotated_from_each_rows_start(is_padded):
    lengths, width = (3, 1, 2), 4
    module = randomized(MultiheadAttention(HIDDEN, HEADS, DIM, qkv_format="thd", device="cpu"), 6)
    angles, x = RotaryPositionEmbedding(DIM, device="cpu")(width), torch.randn(12, HIDDEN)
    sums, padded = torch.tensor([0, *lengths]).cumsum(0).int(), torch.arange(4).int() * width
    begins = sums if is_padded is False else padded
    options = {"attn_mask_type": "padding_causal", "rotary_pos_emb": angles, "cu_seqlens_q_padded": padded}
    out = module(x, cu_seqlens_q=sums, pad_between_seqs=is_padded, **options)
    for begin, n in zip(begins.tolist(), lengths, strict=False):
        alone = module(x[begin : begin + n], cu_seqlens_q=torch.tensor([0, n]).int(), rotary_pos_emb=angles)
        torch.testing.assert_close(out[begin : begin + n], alone, atol=1e-5, rtol=1e-5)


def test_lengths_come_from_a_mask_of_padding_and_three_tensors_from_one():
    lengths = (5, 2)
    new = new_tokens(lengths, 4, (HEADS,) * 3)
    rows = [in_layout(part, "bshd") for part in new]
    padding = torch.arange(5) >= torch.tensor(lengths)[:, None]
    module = DotProductAttention(HEADS, DIM, qkv_format="bshd", attn_mask_type="causal_padding")
    out = module(*rows, padding[:, None, None])
    for row, n in enumerate(lengths):
        right = attention(*(part[row] for part in new), *visible_keys(n, n, "causal"))
        torch.testing.assert_close(out[row, :n].double(), right, atol=1e-5, rtol=1e-5)
    assert not out[1, 2:].any()
    for dim in (-3, -2):
        assert torch.equal(
            module(qkv_layer=torch.stack(rows, dim), attention_mask=padding[:, None, None], qkv_interleave_dim=dim), out
        )
        packed = torch.stack(rows[1:], dim)
        assert torch.equal(
            module(rows[0], attention_mask=padding[:, None, None], kv_layer=packed, qkv_interleave_dim=dim), out
        )


def randomized(module, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return module


QKV = "self_attention.layernorm_qkv"


def split(parameters, fused, interleaved):
    """The parameters as those of three projections."""
    if not fused:
        return parameters
    for kind in ("weight", "bias"):
        whole = parameters[f"{QKV}.{kind}"]
        if interleaved:
            groups = whole.unflatten(0, (GROUPS, HEADS // GROUPS + 2, DIM))
            parts = (groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1))
        else:
            parts = whole.split([HEADS * DIM, GROUPS * DIM, GROUPS * DIM])
        parameters |= {
            f"{QKV}.{name}_{kind}": part for name, part in zip(("query", "key", "value"), parts, strict=True)
        }
    return parameters


def head_norm(x, parameters, name, kind, eps):
    if kind is None:
        return x
    if kind == "L2Normalization":
        return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()
    x = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * parameters[f"self_attention.{name}.weight"]
    return x + parameters[f"self_attention.{name}.bias"] if kind == "LayerNorm" else x


PLAIN = {
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x / (1 + (-1.702 * x).exp()),
    "relu": lambda x: x.clamp(min=0),
    "srelu": lambda x: x.clamp(min=0) ** 2,
    "silu": lambda x: x / (1 + (-x).exp()),
}
GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}


def activated(x, kind, params):
    if kind in PLAIN:
        return PLAIN[kind](x)
    gate, up = x.chunk(2, -1)
    if kind == "glu":
        return up / (1 + (-gate).exp())
    if kind == "clamped_swiglu":
        gate = gate.clamp(max=params["limit"])
        up = up.clamp(-params["limit"], params["limit"])
        return gate / (1 + (-params.get("alpha", 1.702) * gate).exp()) * (up + params.get("glu_linear_offset", 1.0))
    return PLAIN[GATED[kind]](gate) * up


def whole_layer(x, module, options):
    """A layer in float64 over one sequence [n, hidden]."""
    interleaved = options.get("qkv_weight_interleaved", True)
    parameters = {name: p.detach().double() for name, p in module.named_parameters()}
    parameters = split(parameters, options.get("fuse_qkv_params", False), interleaved)
    is_last, moves = options.get("output_layernorm"), options.get("apply_residual_connection_post_layernorm")
    qkv = QKV.replace("layernorm_", "") if is_last else QKV
    inner = x if is_last else norm(x, parameters, QKV, "LayerNorm", 1e-5, False)
    residual = inner if moves else x
    q, k, v = (
        product(inner, parameters, f"{qkv}.{n}_weight").unflatten(-1, (-1, DIM)) for n in ("query", "key", "value")
    )
    kind, eps = options.get("qk_norm_type"), options.get("qk_norm_eps", 1e-6)
    first = options.get("qk_norm_before_rope", False)
    for turn in (False, True) if first else (True, False):
        if turn:
            q, k = rotated(q), rotated(k)
        else:
            q, k = head_norm(q, parameters, "q_norm", kind, eps), head_norm(k, parameters, "k_norm", kind, eps)
    sinks = parameters.get("self_attention.core_attention.softmax_offset")
    out = attention(q, k, v, *visible_keys(len(x), len(x), "causal"), sinks=sinks, cap=options.get("softcap", 0.0))
    attended = product(out, parameters, "self_attention.proj.weight")
    x = x if options.get("parallel_attention_mlp") else residual + attended
    normed = norm(x, parameters, "layernorm_mlp", "LayerNorm", 1e-5, False)
    inner = product(normed, parameters, "layernorm_mlp.fc1_weight")
    inner = activated(inner, options.get("activation", "gelu"), options.get("activation_params"))
    out = (normed if moves else x) + product(inner, parameters, "layernorm_mlp.fc2_weight")
    if is_last:
        out = out - out.mean(-1, keepdim=True)
        out = out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        out = out * parameters["layernorm.weight"] + parameters["layernorm.bias"]
    return out + attended if options.get("parallel_attention_mlp") else out


LAYERS = [
    {"fuse_qkv_params": True, "softmax_type": "learnable", "softcap": 1.5},
    {"fuse_qkv_params": True, "qkv_weight_interleaved": False, "qk_norm_type": "RMSNorm", "qk_norm_eps": 0.1},
    {"qk_norm_type": "LayerNorm", "qk_norm_before_rope": True, "qk_norm_eps": 0.1},
    {"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True},
    {"qk_norm_type": "L2Normalization", "qk_norm_eps": 0.5},
    {"parallel_attention_mlp": True},
    {"output_layernorm": True},
    {"apply_residual_connection_post_layernorm": True},
    {"output_layernorm": True, "apply_residual_connection_post_layernorm": True},
    {"activation": "clamped_swiglu", "activation_params": {"limit": 0.7, "alpha": 1.2}},
    {"activation": "glu"},
    *({"activation": name} for name in (*PLAIN, *GATED)),
]


@pytest.mark.parametrize("number", range(len(LAYERS)))
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_layers_have_each_argument_and_one_capture_serves_later_lengths(number, paged):
    options, form = LAYERS[number], "thd" if number % 2 else "bshd"
    module = randomized(
        TransformerLayer(
            HIDDEN, 20, HEADS, GROUPS, kv_channels=DIM, layer_number=1, attn_input_format=form, device="cpu",
            self_attn_mask_type="padding_causal", **options,
        ),
        number,
    )  # fmt: skip
    params = cache(paged, form)
    params.allocate_memory(1)
    angles = RotaryPositionEmbedding(DIM, device="cpu")(LENGTH)
    slots = [Slot(name, ("batch", HIDDEN), torch.float32) for name in ("x", "out")]
    buffers = StepBuffers(slots, max_batch_size=ROWS, device="cpu")
    for name, tensor in params.tensors().items():
        buffers.adopt(name, tensor)

    def step(batch):  # generation as in the original's tutorial: a mask for padding alone
        x = batch.x if form == "thd" else batch.x.unsqueeze(1)
        out = module(x, self_attn_mask_type="padding", inference_params=params, rotary_pos_emb=angles)
        batch.out.copy_(out.view(-1, HIDDEN))

    graphs = GraphManager(step, buffers, (ROWS,), constants=[module, angles])
    graphs.capture(progress=False)
    graphs.freeze()
    generator = torch.Generator().manual_seed(number)
    history = [torch.randn(n, HIDDEN, generator=generator) for n in (4, 1)]
    params.pre_step(OrderedDict(a=4, b=1))
    out = module(in_layout(history, form), inference_params=params, rotary_pos_emb=angles)
    results = [row[-1] for row in split_rows(out, form, (4, 1))]
    for _ in range(4):
        for result, x in zip(results, history, strict=True):
            right = whole_layer(x.double(), module, options)[-1]
            torch.testing.assert_close(result.double(), right, atol=2e-4, rtol=2e-4)
        new = torch.randn(2, HIDDEN, generator=generator)
        history = [torch.cat((old, row[None])) for old, row in zip(history, new, strict=True)]
        params.pre_step(OrderedDict(a=1, b=1))
        buffers.x[:2].copy_(new)
        buffers.set_live_rows(2)
        graphs.replay(2)
        results = list(buffers.out[:2].clone())
    graphs.close()


def test_captured_alibi_and_two_sided_windows_are_right_at_later_lengths():
    module = DotProductAttention(HEADS, DIM, GROUPS, qkv_format="thd", attn_mask_type="padding", window_size=(4, 1))
    params = cache(True, "thd")
    params.allocate_memory(1)
    slots = [Slot(n, ("batch", h, DIM), torch.float32) for n, h in (("q", HEADS), ("k", GROUPS), ("v", GROUPS))]
    buffers = StepBuffers(
        [*slots, Slot("out", ("batch", HEADS * DIM), torch.float32)], max_batch_size=ROWS, device="cpu"
    )
    for name, tensor in params.tensors().items():
        buffers.adopt(name, tensor)
    slopes = torch.tensor(SLOPES)

    def step(batch):
        arguments = (batch.q, batch.k, batch.v)
        batch.out.copy_(
            module(*arguments, inference_params=params, core_attention_bias_type="alibi", alibi_slopes=slopes)
        )

    graphs = GraphManager(step, buffers, (ROWS,), constants=[module, slopes])
    graphs.capture(progress=False)
    graphs.freeze()
    history = [[torch.empty(0, GROUPS, DIM) for _ in range(2)] for _ in "kv"]
    for seed in range(8):
        new = new_tokens((1, 1), seed)
        history = [
            [torch.cat(pair) for pair in zip(old, now, strict=True)] for old, now in zip(history, new[1:], strict=True)
        ]
        params.pre_step(OrderedDict(a=1, b=1))
        for name, rows in zip("qkv", new, strict=True):
            getattr(buffers, name)[:2].copy_(torch.cat(rows))
        buffers.set_live_rows(2)
        buffers.poison(2)
        graphs.replay(2)
        for row in range(2):
            visible, at = visible_keys(1, seed + 1, "padding", (4, 1))
            right = attention(new[0][row], history[0][row], history[1][row], visible, at, slopes=SLOPES)[0]
            torch.testing.assert_close(buffers.out[row].double(), right, atol=1e-5, rtol=1e-5)
    graphs.close()


MATRICES = {  # of the call; what it does to logits [h, q, k] before the cap, and after it
    "pre_scale_bias": lambda logits, bias, cap: cap * torch.tanh((logits + bias * DIM**-0.5) / cap),
    "post_scale_bias": lambda logits, bias, cap: cap * torch.tanh(logits / cap) + bias,
    "arbitrary": lambda logits, bias, cap: (cap * torch.tanh(logits / cap)).masked_fill(bias > 0.5, -math.inf),
}


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("form", ["bshd", "sbhd"])
@pytest.mark.parametrize("storage", ["rows", "pages", "uncached"])
def test_matrices_of_queries_and_keys_are_added_or_hide_them(kind, form, storage, backend):
    mask = "arbitrary" if kind == "arbitrary" else "no_mask" if storage == "uncached" else "padding_causal"
    module = DotProductAttention(HEADS, DIM, GROUPS, qkv_format=form, attn_mask_type=mask, softcap=1.5)
    params, steps = None, ((5, 3), (1, 1), (2, 1))
    if storage == "uncached":
        steps = ((5, 5),)
    else:
        params = cache(storage == "pages", form, backend)
        params.allocate_memory(1)
    history = [[torch.empty(0, GROUPS, DIM) for _ in range(2)] for _ in "kv"]
    generator = torch.Generator().manual_seed(5)
    for seed, lengths in enumerate(steps):
        new = new_tokens(lengths, seed)
        history = [
            [torch.cat(pair) for pair in zip(old, now, strict=True)] for old, now in zip(history, new[1:], strict=True)
        ]
        width = LENGTH if params else 5
        shape = (2, 1, max(lengths), width) if seed == 1 else (1, HEADS, max(lengths), width)
        matrix = torch.randn(shape, generator=generator)
        matrix[..., 0] = 0.0  # a key that each query sees
        if params:
            params.pre_step(OrderedDict(zip("ab", lengths, strict=True)))
        options = {"core_attention_bias_type": kind, "core_attention_bias": matrix.to(backend)}
        if kind == "arbitrary":
            options = {"attention_mask": (matrix > 0.5).to(backend)}
        out = module(*(in_layout(rows, form).to(backend) for rows in new), inference_params=params, **options)
        for row, result in enumerate(split_rows(out, form, lengths)):
            k, v = (rows[row].double().repeat_interleave(HEADS // GROUPS, 1) for rows in history)
            logits = torch.einsum("qhd,khd->hqk", new[0][row].double(), k) * DIM**-0.5
            part = matrix.double()[min(row, len(matrix) - 1), :, : lengths[row], : len(k)]
            aligned = mask.replace("causal", "causal_bottom_right").replace("arbitrary", "no_mask")
            logits = MATRICES[kind](logits, part, 1.5).masked_fill(
                ~visible_keys(lengths[row], len(k), aligned)[0], -math.inf
            )
            right = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v).flatten(-2)
            torch.testing.assert_close(result.double().cpu(), right, atol=1e-5, rtol=1e-5)


def test_matrices_that_do_not_fit_are_refused_by_name():
    new = [in_layout(rows, "bshd") for rows in new_tokens((2, 2))]
    module = DotProductAttention(HEADS, DIM, GROUPS, qkv_format="bshd")
    for wrong in (torch.zeros(1, HEADS, 2, 3), torch.zeros(HEADS, 2, 2), torch.zeros(1, 1, 2, 2).int(), None):
        with pytest.raises(ValueError, match="core_attention_bias"):
            module(*new, core_attention_bias_type="post_scale_bias", core_attention_bias=wrong)
    with pytest.raises(ValueError, match="core_attention_bias"):
        module(*new, core_attention_bias=torch.zeros(1, 1, 2, 2))
    with pytest.raises(ValueError, match="attention_mask"):
        module(*new, torch.zeros(1, 1, 2, 2), attn_mask_type="arbitrary")
    packed = [torch.cat(rows) for rows in new_tokens((2, 2))]
    with pytest.raises(ValueError, match=r"core_attention_bias.*bshd"):
        module(
            *packed, qkv_format="thd", cu_seqlens_q=torch.tensor([0, 2, 4]).int(), core_attention_bias=torch.zeros(1),
            core_attention_bias_type="post_scale_bias",
        )  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
def test_return_bias_and_return_layernorm_output(bias):
    options = {"input_layernorm": True, "qkv_format": "bshd", "bias": bias, "device": "cpu"}
    base = randomized(MultiheadAttention(HIDDEN, HEADS, DIM, **options), 7)
    x = torch.randn(2, 3, HIDDEN)
    separate = MultiheadAttention(HIDDEN, HEADS, DIM, return_bias=True, return_layernorm_output=True, **options)
    separate.load_state_dict(base.state_dict())
    out, part, normed = separate(x)
    assert (part is separate.proj.bias) if bias else part.numel() == 0
    torch.testing.assert_close(out + part if bias else out, base(x))
    parameters = {name: p.double() for name, p in base.named_parameters()}
    right = norm(x.double(), parameters, "layernorm_qkv", "LayerNorm", 1e-5, False)
    torch.testing.assert_close(normed.double(), right, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="parallel_attention_mlp"):
        TransformerLayer(HIDDEN, 20, HEADS, parallel_attention_mlp=True, output_layernorm=True, device="cpu")


def test_state_dicts_have_the_published_names():
    def names(**options):
        return set(MultiheadAttention(HIDDEN, HEADS, DIM, device="cpu", **options).state_dict())

    proj = {"proj.weight", "proj.bias"}
    three = {f"qkv.{name}_{kind}" for name in ("query", "key", "value") for kind in ("weight", "bias")}
    assert names() == names(softmax_type="off-by-one") == names(qk_norm_type="L2Normalization") == proj | three
    assert names(fuse_qkv_params=True) == proj | {"qkv.weight", "qkv.bias"}
    assert names(softmax_type="learnable") == proj | three | {"core_attention.softmax_offset"}
    normed = {f"{name}_norm.{kind}" for name in "qk" for kind in ("weight", "bias")}
    assert names(qk_norm_type="LayerNorm") == proj | three | normed
    assert names(qk_norm_type="RMSNorm") == proj | three | {name for name in normed if name.endswith("weight")}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("core_attention_bias_type", "post_scale_bias"), ("core_attention_bias", torch.zeros(1)),
        ("encoder_output", torch.zeros(1)), ("thd_attention_policies", [1]), ("softcap", math.nan),
        ("alibi_slopes", torch.zeros(HEADS)), ("window_size", (-1, 3)), ("self_attn_mask_type", "arbitrary"),
    ],
)  # fmt: skip
def test_forward_refuses_unsupported_arguments_by_name_before_any_change(name, value):
    module = TransformerLayer(HIDDEN, 20, HEADS, GROUPS, kv_channels=DIM, attn_input_format="bshd", device="cpu")
    params = cache(False, "bshd")
    params.allocate_memory(1)
    params.pre_step({"a": 2})
    with pytest.raises(ValueError, match=name.removeprefix("self_")):
        module(torch.ones(1, 2, HIDDEN), inference_params=params, **{name: value})
    assert not any(tensor.any() for tensor in params.cache_manager.cache[1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cu_seqlens_q", torch.tensor([0, 3, 4])), ("cu_seqlens_q", torch.tensor([0, 3, 9]).int()),
        ("cu_seqlens_q", torch.tensor([0, 5, 4]).int()), ("cu_seqlens_kv", torch.tensor([0, 3]).int()),
        ("cu_seqlens_kv", torch.tensor([1, 3, 4]).int()), ("cu_seqlens_q_padded", torch.tensor([0]).int()),
        ("cu_seqlens_q", [0, 3, 4]), ("key_layer", torch.zeros(4, GROUPS, DIM, dtype=torch.float16)),
        ("value_layer", torch.zeros(3, GROUPS, DIM)), ("window_size", (1.5, 0)), ("window_size", (1,)),
        ("softcap", "2"), ("alibi_slopes", [0.5] * HEADS),
    ],
)  # fmt: skip
def test_sums_and_tensors_without_a_cache_that_do_not_fit_are_refused_by_name(name, value):
    query, keys, values = (in_layout(part, "thd") for part in new_tokens((3, 1)))
    arguments = {
        "query_layer": query,
        "key_layer": keys,
        "value_layer": values,
        "cu_seqlens_q": torch.tensor([0, 3, 4]).int(),
    }
    arguments["core_attention_bias_type"] = "alibi" if name == "alibi_slopes" else "no_bias"
    module = DotProductAttention(HEADS, DIM, GROUPS, qkv_format="thd", attn_mask_type="padding_causal")
    module(**arguments)
    with pytest.raises(ValueError, match=name):
        module(**arguments | {name: value})


def test_angles_and_slopes_of_other_tokens_and_rows_are_refused_without_a_cache():
    layer = TransformerLayer(HIDDEN, 20, HEADS, device="cpu", attn_input_format="bshd")
    angles, x = RotaryPositionEmbedding(HIDDEN // HEADS)(2), torch.ones(3, 4, HIDDEN)
    layer(x[:, :2], rotary_pos_emb=angles)
    with pytest.raises(ValueError, match=r"rotary_pos_emb.* 4 .*2"):
        layer(x, rotary_pos_emb=angles)
    for form, rows, sums in (("bshd", 3, None), ("thd", 2, torch.tensor([0, 3, 5], dtype=torch.int32))):
        module = DotProductAttention(HEADS, DIM, GROUPS, qkv_format=form, attn_mask_type="padding_causal")
        shape = (5,) if form == "thd" else (3, 2)
        q, k, v = (torch.ones(*shape, heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
        arguments = {"cu_seqlens_q": sums, "cu_seqlens_kv": sums, "core_attention_bias_type": "alibi"}
        module(q, k, v, **arguments, alibi_slopes=torch.ones(rows, HEADS))
        with pytest.raises(ValueError, match=rf"alibi_slopes .*\[{rows}, {HEADS}\]"):
            module(q, k, v, **arguments, alibi_slopes=torch.ones(rows + 1, HEADS))


def test_dropout_is_refused_in_training_mode_alone():
    x = torch.ones(2, 1, HIDDEN)
    layer = TransformerLayer(HIDDEN, 20, HEADS, device="cpu")
    layer(x)
    with pytest.raises(ValueError, match="hidden_dropout"):
        layer.train()(x)
    with pytest.raises(ValueError, match="attention_dropout"):
        MultiheadAttention(HIDDEN, HEADS, device="cpu").train()(x)
    TransformerLayer(HIDDEN, 20, HEADS, hidden_dropout=0.0, attention_dropout=0.0, device="cpu").train()(x)
    for name, wrong in (
        ("hidden_dropout", -0.1),
        ("attention_dropout", 2.0),
        ("layernorm_epsilon", 0.0),
        ("layernorm_epsilon", "a"),
        ("qk_norm_eps", -1.0),
    ):
        with pytest.raises(ValueError, match=name):
            TransformerLayer(HIDDEN, 20, HEADS, device="cpu", **{name: wrong})
    for options in (
        {"activation_params": {"limit": 1.0}},
        {"activation": "clamped_swiglu", "activation_params": {"beta": 1}},
    ):
        with pytest.raises(ValueError, match="activation_params"):
            TransformerLayer(HIDDEN, 20, HEADS, device="cpu", **options)
