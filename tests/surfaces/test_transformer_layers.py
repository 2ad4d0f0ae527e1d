"""The modules of TransformerEngine's surface against float64 over whole sequences, eagerly and captured."""

import inspect
from collections import OrderedDict
from contextlib import contextmanager

import pytest
import torch
from layer_oracle import attended, attention_block, in_layout, layer, random_life, rotated, split_rows
from torch import nn

from graphdecode import BucketLadder, GraphManager, InferenceParams, Slot, StepBuffers
from graphdecode.graphs import check
from graphdecode.surfaces.transformer_engine import (
    DotProductAttention,
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
    apply_rotary_pos_emb,
)

HIDDEN, FFN, HEADS, GROUPS, DIM = 24, 40, 4, 2, 8
MAX_BATCH, MAX_LENGTH = 4, 40
FORMATS = ("bshd", "sbhd", "thd")
BOTH = pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
LLAMA = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "num_gqa_groups": GROUPS}
OTHERS = [
    LLAMA,
    {"normalization": "LayerNorm", "activation": "gelu", "bias": True, "rotary_pos_interleaved": True},
    {**LLAMA, "activation": "geglu", "zero_centered_gamma": True, "window_size": (3, 0)},
    {"normalization": "LayerNorm", "activation": "relu", "num_gqa_groups": 1},
]


def cache(paged, device, groups=GROUPS, dim=DIM, form="bshd", **options):
    options |= {"total_num_pages": 40, "page_size": 4} if paged else {}
    sizes = (MAX_BATCH, MAX_LENGTH, groups, dim)
    return InferenceParams(*sizes, torch.float32, is_paged=paged, qkv_format=form, device=device, **options)


def filled(module, seed=0):
    """Give a module weights that matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        scale = 0.3 if parameter.dim() == 2 else 0.2
        noise = torch.randn(parameter.shape, generator=generator) * scale
        parameter.copy_(noise + (1.0 if name.endswith("norm_weight") else 0.0))
    return module


def angles(device, dim=DIM, interleaved=False, length=MAX_LENGTH):
    return RotaryPositionEmbedding(dim, interleaved=interleaved, device=device)(length)


@BOTH
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("mask", ["causal", "padding_causal"])
def test_attention_over_the_cache_agrees_with_float64(form, paged, mask, device):
    attention = DotProductAttention(HEADS, (DIM, 6), GROUPS, qkv_format=form, attn_mask_type=mask, layer_number=7)
    params = cache(paged, device, head_dim_v=6)
    params.allocate_memory(7)
    generator = torch.Generator().manual_seed(1)
    history = {}
    for step in random_life(seed=11, steps=25, max_batch=MAX_BATCH, max_length=MAX_LENGTH):
        params.pre_step(step)
        shapes = ((HEADS, DIM), (GROUPS, DIM), (GROUPS, 6))
        new = [[torch.randn(n, *shape, generator=generator) for n in step.values()] for shape in shapes]
        existing, history = history, {}
        for row, i in enumerate(step):
            before = existing.get(i) or [t[row][:0] for t in new]
            history[i] = [torch.cat((old, t[row])) for old, t in zip(before, new, strict=True)]
        out = attention(*(in_layout(rows, form).to(device) for rows in new), inference_params=params)
        for row, (result, n) in enumerate(zip(split_rows(out, form, step.values()), step.values(), strict=True)):
            expected = attended(*(t.double() for t in history[list(step)[row]]))[-n:].flatten(-2)
            torch.testing.assert_close(result.double().cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("lengths", [(5, 5, 5), (1, 6, 3)])
def test_attention_without_a_cache_agrees_with_float64(form, lengths, device):
    attention = DotProductAttention(HEADS, DIM, GROUPS, qkv_format=form, softmax_scale=0.2, window_size=(2, 0))
    generator = torch.Generator().manual_seed(2)
    new = [[torch.randn(n, heads, DIM, generator=generator) for n in lengths] for heads in (HEADS, GROUPS, GROUPS)]
    cu = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    existing = cu if form == "thd" or len(set(lengths)) > 1 else None
    out = attention(*(in_layout(rows, form).to(device) for rows in new), cu_seqlens_q=existing)
    for row, result in enumerate(split_rows(out, form, lengths)):
        expected = attended(*(rows[row].double() for rows in new), window=2, scale=0.2).flatten(-2)
        torch.testing.assert_close(result.double().cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("normed", [False, True])
def test_multihead_attention_projects_around_it_and_names_its_weights_as_published(normed, device):
    module = MultiheadAttention(HIDDEN, HEADS, DIM, num_gqa_groups=GROUPS, input_layernorm=normed, device=device)
    filled(module)
    qkv = "layernorm_qkv" if normed else "qkv"
    names = [f"{qkv}.{n}_{kind}" for n in ("query", "key", "value") for kind in ("weight", "bias")]
    names += ["proj.weight", "proj.bias"] + [f"{qkv}.layer_norm_{kind}" for kind in ("weight", "bias") if normed]
    assert sorted(name for name, _ in module.named_parameters()) == sorted(names)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    x = torch.randn(5, 2, HIDDEN, generator=torch.Generator().manual_seed(3))  # sbhd
    out = module(x.to(device), rotary_pos_emb=angles(device))
    parameters = {name: p.double().cpu() for name, p in module.named_parameters()}
    for row in range(2):
        inner = x[:, row].double()
        if normed:
            weight, bias = (parameters[f"{qkv}.layer_norm_{kind}"] for kind in ("weight", "bias"))
            inner = torch.nn.functional.layer_norm(inner, (HIDDEN,), weight, bias)
        expected = attention_block(inner, parameters, qkv, DIM)
        torch.testing.assert_close(out[:, row].double().cpu(), expected, atol=2e-5, rtol=2e-5)


@BOTH
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_layers_agree_with_float64_while_sequences_enter_leave_and_change_order(form, paged, number, device):
    options = OTHERS[number]
    groups, interleaved = options.get("num_gqa_groups") or HEADS, options.get("rotary_pos_interleaved", False)
    layers = [
        filled(
            TransformerLayer(
                HIDDEN, FFN, HEADS, kv_channels=DIM, layer_number=i, attn_input_format=form,
                self_attn_mask_type="padding_causal", device=device, **options,
            ),
            seed=i,
        )
        for i in (1, 2)
    ]  # fmt: skip
    params = cache(paged, device, groups, form=form)
    freqs = angles(device, interleaved=interleaved)
    meaning = {
        "kind": options["normalization"],
        "activation": options["activation"],
        "centered": options.get("zero_centered_gamma", False),
        "window": options.get("window_size", (-1, 0))[0],
        "interleaved": interleaved,
    }
    generator = torch.Generator().manual_seed(4)
    history = {}
    for step in random_life(seed=5 + number, steps=12, max_batch=MAX_BATCH, max_length=MAX_LENGTH):
        params.pre_step(step)
        new = [torch.randn(n, HIDDEN, generator=generator) for n in step.values()]
        history = {i: torch.cat((history.get(i, new[row][:0]), new[row])) for row, i in enumerate(step)}
        out = in_layout(new, form).to(device)
        for module in layers:
            out = module(out, inference_params=params, rotary_pos_emb=freqs)
        for result, (i, n) in zip(split_rows(out, form, step.values()), step.items(), strict=True):
            expected = history[i].double()
            for module in layers:
                expected = layer(expected, module, DIM, **meaning)
            torch.testing.assert_close(result.double().cpu(), expected[-n:], atol=2e-4, rtol=2e-4)


class CapturedLayers:
    """Two layers as a step: one token a row, a graph for each bucket."""

    def __init__(self, form, paged, device, backend):
        self.form = form
        self.layers = [
            filled(TransformerLayer(HIDDEN, FFN, HEADS, kv_channels=DIM, layer_number=i, attn_input_format=form,
                                    device=device, **LLAMA), seed=i)
            for i in (1, 2)
        ]  # fmt: skip
        self.params = cache(paged, device, form=form)
        self.freqs = angles(device)
        for i in (1, 2):
            self.params.allocate_memory(i)
        slots = [Slot("x", ("batch", HIDDEN), torch.float32), Slot("out", ("batch", HIDDEN), torch.float32)]
        self.buffers = StepBuffers(slots, max_batch_size=MAX_BATCH, device=device)
        for name, tensor in self.params.tensors().items():
            self.buffers.adopt(name, tensor)
        constants = [*self.layers, self.freqs]
        ladder = BucketLadder([1, 2], MAX_BATCH)
        self.graphs = GraphManager(self.step, self.buffers, ladder, constants=constants, backend=backend)
        self.graphs.capture(progress=False)
        self.graphs.freeze()

    def step(self, batch):
        token_dim = {"bshd": 1, "sbhd": 0, "thd": None}[self.form]
        out = batch.x if token_dim is None else batch.x.unsqueeze(token_dim)
        for module in self.layers:
            out = module(out, inference_params=self.params, rotary_pos_emb=self.freqs)
        batch.out.copy_(out.view_as(batch.x))

    def run(self, step, x):
        self.params.pre_step(step)
        n = len(step)
        self.buffers.x[:n].copy_(x)
        self.buffers.set_live_rows(n)
        self.buffers.poison(n)
        self.graphs.replay(n)
        return self.buffers.out[:n].clone()


@BOTH
@pytest.mark.parametrize("form", FORMATS)
def test_captured_layers_agree_with_eager_ones_bit_for_bit_and_with_float64(form, paged, native_device):
    """Laws 2, 4 and 5: one capture, any later membership, hostile padding."""
    device = native_device
    captured, eager = (CapturedLayers(form, paged, device, backend) for backend in ("auto", "eager"))
    generator = torch.Generator().manual_seed(6)
    history, memberships = {}, set()
    for step in random_life(seed=21, steps=60, max_batch=MAX_BATCH, max_length=MAX_LENGTH, widths=(1,)):
        x = torch.randn(len(step), HIDDEN, generator=generator)
        history = {i: torch.cat((history.get(i, x[:0]), x[row : row + 1])) for row, i in enumerate(step)}
        out = captured.run(step, x.to(device))
        assert torch.equal(out, eager.run(step, x.to(device))), step
        for row, i in enumerate(step):
            expected = history[i].double()
            for module in captured.layers:
                expected = layer(expected, module, DIM, kind="RMSNorm", activation="swiglu")
            torch.testing.assert_close(out[row].double().cpu(), expected[-1], atol=2e-4, rtol=2e-4)
        memberships.add(tuple(step))
    assert len(memberships) > 20
    assert sum(report.replays for report in captured.graphs.report().buckets) == 60
    captured.graphs.close()


@BOTH
@pytest.mark.parametrize("form", FORMATS)
def test_check_finds_nothing_in_a_step_of_layers(form, paged, device):
    layers = CapturedLayers(form, paged, device, "eager")
    assert not check(layers.step, layers.buffers, constants=[*layers.layers, layers.freqs])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layers_of_narrow_dtypes_stay_near_float64(dtype, device):
    module = TransformerLayer(
        HIDDEN, FFN, HEADS, kv_channels=DIM, attn_input_format="bshd", params_dtype=dtype, device=device, **LLAMA
    )
    filled(module)
    params = InferenceParams(2, MAX_LENGTH, GROUPS, DIM, dtype, device=device)
    x = torch.randn(2, 6, HIDDEN, generator=torch.Generator().manual_seed(9)).to(dtype)
    parts = []
    for begin, end in ((0, 4), (4, 5), (5, 6)):
        params.pre_step(OrderedDict([("a", end - begin), ("b", end - begin)]))
        parts.append(module(x[:, begin:end].to(device), inference_params=params, rotary_pos_emb=angles(device)))
    out = torch.cat(parts, 1)
    assert out.dtype == dtype
    for row in range(2):
        expected = layer(x[row].double(), module, DIM, kind="RMSNorm", activation="swiglu")
        error = (out[row].double().cpu() - expected).norm() / expected.norm()
        assert error < (2e-3 if dtype == torch.float16 else 1.5e-2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_rotary_embedding_starts_at_each_rows_position(form, interleaved, device):
    lengths, starts = (3, 1, 4), torch.tensor([0, 9, 5, 99], dtype=torch.int32, device=device)  # one row too many
    rows = [torch.randn(n, HEADS, DIM, generator=torch.Generator().manual_seed(n)) for n in lengths]
    cu = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    freqs = angles(device, dim=6, interleaved=interleaved)
    out = apply_rotary_pos_emb(in_layout(rows, form).to(device), freqs, form, starts, interleaved, cu_seqlens=cu)
    for result, row, start in zip(split_rows(out, form, lengths), rows, starts.tolist(), strict=False):
        whole = torch.cat((torch.zeros(start, HEADS, DIM), row)).double()
        expected = torch.cat((rotated(whole[..., :6], interleaved=interleaved)[start:], whole[start:, :, 6:]), -1)
        torch.testing.assert_close(result.double().cpu(), expected, atol=1e-5, rtol=1e-5)
    if form != "thd":
        base = apply_rotary_pos_emb(in_layout(rows, form).to(device), freqs, form, None, interleaved)
        from_zero = apply_rotary_pos_emb(
            in_layout(rows, form).to(device), freqs, form, torch.zeros_like(starts), interleaved
        )
        assert torch.equal(base, from_zero)


def test_angles_are_scaled_as_published():
    base = RotaryPositionEmbedding(8, device="cpu")
    assert base(5).shape == (5, 1, 1, 8)
    assert torch.equal(base(7)[2:], base(5, offset=2))
    assert RotaryPositionEmbedding(8, rotary_percent=0.5, device="cpu")(3).shape[-1] == 4
    inside = RotaryPositionEmbedding(8, 1.0, 2, 10, device="cpu")
    torch.testing.assert_close(inside(20), base(20) / 2)
    torch.testing.assert_close(inside(40), base(40) / 4)  # longer than twice 10: into 10 positions


def test_signatures_begin_as_published():
    def names(function, count):
        return list(inspect.signature(function).parameters)[:count]

    assert names(apply_rotary_pos_emb, 9) == [
        "t", "freqs", "tensor_format", "start_positions", "interleaved", "fused", "cu_seqlens", "cp_size", "cp_rank",
    ]  # fmt: skip
    assert names(RotaryPositionEmbedding, 6) == [
        "dim", "rotary_percent", "seq_len_interpolation_factor", "pretrained_max_position_embeddings", "rotary_base",
        "interleaved",
    ]  # fmt: skip
    assert names(DotProductAttention, 7) == [
        "num_attention_heads", "kv_channels", "num_gqa_groups", "attention_dropout", "qkv_format", "attn_mask_type",
        "window_size",
    ]  # fmt: skip
    assert names(DotProductAttention.forward, 8)[1:] == [
        "query_layer", "key_layer", "value_layer", "attention_mask", "qkv_format", "cu_seqlens_q", "cu_seqlens_kv",
    ]  # fmt: skip
    assert names(MultiheadAttention, 10) == [
        "hidden_size", "num_attention_heads", "kv_channels", "attention_dropout", "layernorm_epsilon", "init_method",
        "output_layer_init_method", "layer_number", "attn_mask_type", "window_size",
    ]  # fmt: skip
    assert names(TransformerLayer, 13) == [
        "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_gqa_groups", "layernorm_epsilon",
        "hidden_dropout", "attention_dropout", "init_method", "output_layer_init_method", "layer_number",
        "kv_channels", "self_attn_mask_type", "window_size",
    ]  # fmt: skip
    for module in (DotProductAttention, MultiheadAttention, TransformerLayer):
        assert inspect.signature(module.forward).parameters["inference_params"].default is None


def test_training_arguments_are_accepted_and_unsupported_ones_refused():
    TransformerLayer(
        HIDDEN, FFN, HEADS, hidden_dropout=0.1, fuse_qkv_params=False, tp_size=1, tp_group=None, seq_length=128,
        layer_type="encoder", init_method=torch.nn.init.zeros_, device="cpu",
    )  # fmt: skip
    refused = [
        {"tp_size": 2},
        {"softcap": -1.0},
        {"layer_type": "decoder"},
        {"drop_path_rate": 0.1},
        {"activation": "tanh"},
        {"normalization": "BatchNorm"},
        {"self_attn_mask_type": "upside_down"},
        {"attn_input_format": "bhsd"},
        {"window_size": (-1, 4)},
        {"num_gqa_groups": 3},
        {"fuse_wgrad_accumulation": True},
        {"softmax_type": "off-by-two"},
        {"qk_norm_type": "BatchNorm"},
        {"init_method": "normal"},
        {"output_layer_init_method": 0.02},
        {"get_rng_state_tracker": True},
    ]
    for options in refused:
        name = next(iter(options)).removeprefix("self_").replace("attn_input_format", "qkv_format")
        with pytest.raises(ValueError, match=name):
            TransformerLayer(HIDDEN, FFN, HEADS, device="cpu", **options)
    with pytest.raises(TypeError, match="colour"):
        TransformerLayer(HIDDEN, FFN, HEADS, device="cpu", colour="red")
    with pytest.raises(ValueError, match="hidden_size=25.*num_attention_heads=4"):
        MultiheadAttention(25, 4, device="cpu")


INNER = {f"self_attention.layernorm_qkv.{name}_weight" for name in ("query", "key", "value")} | {
    "layernorm_mlp.fc1_weight"
}
OUTER = {"self_attention.proj.weight", "layernorm_mlp.fc2_weight"}


def test_initializers_fill_weights_within_the_random_state():
    forks = []

    class Tracker:
        @contextmanager
        def fork(self):
            forks.append("begun")
            yield
            forks.append("ended")

    def constant(value):
        return lambda weight: (forks.append(value), weight.fill_(value))

    methods = (constant(2.0), constant(3.0))
    module = TransformerLayer(
        *(HIDDEN, FFN, HEADS, GROUPS, 1e-5, 0.1, 0.1, *methods), get_rng_state_tracker=Tracker, device="cpu"
    )
    weights = {name: weight for name, weight in module.named_parameters() if weight.dim() == 2}
    assert weights.keys() == INNER | OUTER
    for name, weight in weights.items():
        assert weight.eq(2.0 if name in INNER else 3.0).all(), name
        assert not weight.requires_grad
    assert [forks[position::3] for position in (0, 2)] == [["begun"] * 6, ["ended"] * 6]
    assert sorted(forks[1::3]) == [2.0] * 4 + [3.0] * 2
    assert all(bias.eq(0).all() for name, bias in module.named_parameters() if name.endswith("bias"))


def test_weights_without_initializers_are_normal():
    torch.manual_seed(0)
    module = TransformerLayer(256, 256, 4, device="cpu")
    for name in INNER | OUTER:
        weight = module.get_parameter(name)
        assert abs(weight.std() - 0.023) < 0.0005, name
        assert abs(weight.mean()) < 0.0005, name
        assert weight.abs().max() > 3.5 * 0.023, "a uniform distribution has no such tail"
    attention = MultiheadAttention(HIDDEN, HEADS, output_layer_init_method=torch.nn.init.zeros_, device="cpu")
    assert attention.proj.weight.eq(0).all()
    assert attention.qkv.query_weight.ne(0).any()
    with pytest.raises(TypeError, match="init_method"):
        DotProductAttention(HEADS, DIM, init_method=torch.nn.init.zeros_)


def test_forward_refuses_masks_formats_and_angles_that_do_not_fit(device):
    module = TransformerLayer(HIDDEN, FFN, HEADS, kv_channels=DIM, attn_input_format="thd", device=device, **LLAMA)
    params, x = cache(False, device, form="thd"), torch.zeros(3, HIDDEN, device=device)
    params.pre_step(OrderedDict(a=3))
    with pytest.raises(ValueError, match="attention_mask"):
        module(x, torch.ones(3, 3, device=device), inference_params=params)
    with pytest.raises(ValueError, match="attn_mask_type"):
        module(x, self_attn_mask_type="arbitrary", inference_params=params)
    with pytest.raises(ValueError, match="rotary_pos_emb.*40.*39"):
        module(x, inference_params=params, rotary_pos_emb=angles(device, length=39))
    with pytest.raises(ValueError, match="cu_seqlens_q or inference_params"):
        module(x)
    with pytest.raises(ValueError, match="cp_size"):
        apply_rotary_pos_emb(x.view(3, 3, DIM), angles(device), "thd", cp_size=2)
    with pytest.raises(ValueError, match="cu_seqlens"):
        apply_rotary_pos_emb(x.view(3, 3, DIM), angles(device), "thd")
    with pytest.raises(ValueError, match="sbhd, bshd or thd"):
        apply_rotary_pos_emb(x.view(3, 3, DIM), angles(device), "bshd")
    with pytest.raises(ValueError, match="start_positions .*3"):
        apply_rotary_pos_emb(x.view(1, 3, 3, DIM), angles(device), "sbhd", torch.zeros(2, device=device))


VOCABULARY, MODEL_HIDDEN, MODEL_HEADS, MODEL_GROUPS, LAYERS, MODEL_ROWS, MODEL_LENGTH = 61, 32, 4, 2, 2, 4, 32
MODEL_DIM = MODEL_HIDDEN // MODEL_HEADS


class Model(nn.Module):
    """Embedding, layers, head: what a user writes over the modules."""

    def __init__(self, form, device):
        super().__init__()
        self.form = form
        self.embedding = nn.Embedding(VOCABULARY, MODEL_HIDDEN, device=device)
        self.layers = nn.ModuleList(
            TransformerLayer(
                MODEL_HIDDEN, 64, MODEL_HEADS, MODEL_GROUPS, layer_number=number, self_attn_mask_type="padding_causal",
                bias=False, normalization="RMSNorm", activation="swiglu", attn_input_format=form, device=device,
            )
            for number in range(1, LAYERS + 1)
        )  # fmt: skip
        self.head = nn.Linear(MODEL_HIDDEN, VOCABULARY, bias=False, device=device)
        self.freqs = RotaryPositionEmbedding(MODEL_DIM, device=device)(MODEL_LENGTH)
        generator = torch.Generator().manual_seed(8)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)

    def forward(self, tokens, inference_params):
        """Return logits, in the format of the tokens."""
        hidden = self.embedding(tokens)
        for module in self.layers:
            hidden = module(hidden, inference_params=inference_params, rotary_pos_emb=self.freqs)
        return self.head(hidden)


class Generator:
    """Prompts eagerly, all further tokens by graphs, one for each bucket of rows."""

    def __init__(self, form, paged, device):
        self.model, self.form, self.device = Model(form, device), form, device
        pages = {"total_num_pages": 40, "page_size": 4} if paged else {}
        self.params = InferenceParams(
            MODEL_ROWS,
            MODEL_LENGTH,
            MODEL_GROUPS,
            MODEL_DIM,
            torch.float32,
            is_paged=paged,
            qkv_format=form,
            device=device,
            **pages,
        )
        for module in self.model.layers:
            self.params.allocate_memory(module.self_attention.layer_number)
        slots = [Slot("tokens", ("batch",), torch.int64, pad=1), Slot("sampled", ("batch",), torch.int64)]
        self.buffers = StepBuffers(slots, max_batch_size=MODEL_ROWS, device=device)
        for name, tensor in self.params.tensors().items():
            self.buffers.adopt(name, tensor)
        ladder = BucketLadder([1, 2], MODEL_ROWS)
        self.graphs = GraphManager(self.step, self.buffers, ladder, constants=[self.model, self.model.freqs])
        self.graphs.capture(progress=False)
        self.graphs.freeze()

    def step(self, batch):
        shape = {"bshd": (-1, 1), "sbhd": (1, -1), "thd": (-1,)}[self.form]
        logits = self.model(batch.tokens.view(shape), self.params)
        batch.sampled.copy_(logits.view(-1, VOCABULARY).argmax(-1))

    def prefill(self, prompts):
        """Return the first token of each prompt, all in one pass; `prompts` and who goes on are the step."""
        rows = [torch.tensor(tokens) for tokens in prompts]
        logits = self.model(in_layout(rows, self.form).long().to(self.device), self.params)
        if self.form == "thd":
            last = self.params.cu_seqlens_q[1 : len(rows) + 1].long() - 1
            return logits[last].argmax(-1).tolist()
        logits = logits.transpose(0, 1) if self.form == "sbhd" else logits
        return [logits[i, len(row) - 1].argmax().item() for i, row in enumerate(rows)]

    def generate(self, arrivals, count):
        """Serve `arrivals` (step number -> id, prompt), `count` tokens each; a newcomer's prompt joins a step."""
        texts, running, now = {}, [], 0
        while running or any(at >= now for at in arrivals):
            new = dict(arrivals.get(now, ()))
            running = [*reversed(running), *new]  # rows change places, too
            if running:
                step = OrderedDict((i, len(new[i]) if i in new else 1) for i in running)
                self.params.pre_step(step)
                if new:
                    sampled = self.prefill([new.get(i) or [texts[i][-1]] for i in running])
                else:
                    n = len(running)
                    self.buffers.tokens[:n].copy_(torch.tensor([texts[i][-1] for i in running]))
                    self.buffers.set_live_rows(n)
                    self.graphs.replay(n)
                    sampled = self.buffers.sampled[:n].tolist()
                for i, token in zip(running, sampled, strict=True):
                    texts.setdefault(i, []).append(token)
                running = [i for i in running if len(texts[i]) < count]
            now += 1
        return texts


def greedy(model, prompt, count):
    """The same tokens in float64, over the whole text again for each."""
    tokens = list(prompt)
    for _ in range(count):
        hidden = model.embedding.weight.double().cpu()[tokens]
        for module in model.layers:
            hidden = layer(hidden, module, MODEL_DIM, kind="RMSNorm", activation="swiglu")
        tokens.append((hidden[-1] @ model.head.weight.double().cpu().T).argmax().item())
    return tokens[len(prompt) :]


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
def test_a_small_model_generates_the_tokens_of_float64(form, paged, device):
    generator = Generator(form, paged, device)
    prompts = {7: [5, 9, 33], 3: [60, 2], 12: [1, 1, 1, 8, 40], 4: [17], 20: [30, 31]}
    arrivals = {
        0: [(7, prompts[7]), (3, prompts[3])],
        4: [(12, prompts[12])],
        6: [(4, prompts[4])],
        11: [(20, prompts[20])],
    }
    texts = generator.generate(arrivals, count=9)
    assert texts == {i: greedy(generator.model, prompt, 9) for i, prompt in prompts.items()}
    replays = {report.bucket: report.replays for report in generator.graphs.report().buckets}
    assert replays.keys() == {1, 2, 4}
    assert all(replays.values()), "every bucket's graph was used"
    generator.graphs.close()
