"""Models with the weight forms of a GPU, on a CPU: which layers take them, with whose values, and in a recorded step.

Here the operators compute with torch; their kernels are interpreted by `tests/kernels/test_tiled_linear.py`.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from driven_decoder import DrivenDecoder
from gguf_checkpoints import quantized_file, random_model
from products import product
from quantized_checkpoints import FORMS, write_pair
from test_gguf_blocks import product_values, values
from test_quantized_experts import experts_in, logits, models_of_file

from graphdecode import GraphManager, Slot, StepBuffers
from graphdecode.kernels.linear.small_linear import SmallLinearConfig, partial_sums
from graphdecode.kernels.linear.tiled_linear import tiled_linear_triton
from graphdecode.kernels.linear.weight_tiles import WeightTiles, dequantized, tiled
from graphdecode.linear.experts import ExpertPanels, ExpertTiles, UnquantizedExperts
from graphdecode.linear.linear_choice import DEQUANTIZED, LinearChoice
from graphdecode.linear.quantization.groups import Groups, packed
from graphdecode.linear.quantized_linear import Int8PanelLinear, PanelLinear
from graphdecode.linear.small_linear_timing import FUSED_FORMS, FusedForm
from graphdecode.linear.tiled_linear import Int8TiledLinear, TiledLinear
from graphdecode.linear.unquantized import UnquantizedLinear
from graphdecode.linear.weight_form import WeightForm
from graphdecode.models import Decoder, load_model
from graphdecode.models.forward_context import Tokens
from graphdecode.models.gguf.source import Gguf

pytest.importorskip("triton")
from step_code.launches import recorded_step

SMALL = {"attn_v.weight": "Q5_0", "ffn_down.weight": "Q8_0", "embd.weight": "Q4_0", "weight": "Q4_1"}


@pytest.fixture
def forms_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU take the forms of a GPU, and none of its own."""
    for form in (PanelLinear, Int8PanelLinear):
        monkeypatch.setattr(form, "unavailable_reason", classmethod(lambda _form, _options: "is not asked for"))
    monkeypatch.setattr(ExpertPanels, "load", classmethod(lambda *_arguments: None))
    monkeypatch.setattr(TiledLinear, "unavailable_reason", classmethod(lambda _form, _options: ""))
    properties = SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)


def fused_products(form: WeightForm, x: torch.Tensor, gain: torch.Tensor) -> list[torch.Tensor]:
    """Normed, gated and added products of a form."""
    fused = form.fused(len(x))
    assert fused is not None
    normed, added = torch.empty(len(x), form.out_features), torch.ones(len(x), form.out_features)
    activated = torch.empty(len(x), form.out_features // 2)
    fused.normed(normed, x, gain, 1e-5)
    fused.gated(activated, x, gain, 1e-5, "silu")
    fused.added(added, x, 0.5)
    return [normed, activated, added]


def test_a_files_blocks_are_kept_part_by_part_and_all_products_are_those_of_their_values(tmp_path, forms_of_a_gpu):
    path = quantized_file(tmp_path / "small.gguf", "llama", SMALL)
    model, source = load_model(path, device="cpu", dtype="float32", quantize="gguf"), Gguf(path)
    assert isinstance(model, Decoder)
    linears = model.layers[1].linears
    assert {name: [part.layout.code for part in form.parts] for name, form in linears.items()} == {  # type: ignore[attr-defined]
        "qkv": ["u4", "s5"],
        "o": ["u4"],
        "gate_up": ["u4"],
        "down": ["s8"],
    }
    draw = torch.Generator().manual_seed(4)
    for name, form in linears.items():
        weight = product_values(source, name, layer=1)
        torch.testing.assert_close(product(form), weight.T, rtol=1e-6, atol=1e-6)
        x, gain = torch.randn(3, form.in_features, generator=draw), torch.rand(form.in_features, generator=draw)
        norm = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain
        gate, up = (norm @ weight.T).chunk(2, dim=1)
        expected = [norm @ weight.T, torch.nn.functional.silu(gate) * up, 1 + 0.5 * (x @ weight.T)]
        for one, other in zip(fused_products(form, x, gain), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert isinstance(model.head.lm_head, TiledLinear | UnquantizedLinear)
    assert model.stem.table is not None
    table, nothing = values(source, "model.embed_tokens.weight"), torch.zeros(0, dtype=torch.int32)
    tokens = Tokens(torch.tensor([3, 1, 4]), nothing, nothing, torch.tensor([3], dtype=torch.int32), nothing)
    torch.testing.assert_close(model.stem.run(tokens), table[[3, 1, 4]])


@pytest.mark.parametrize("size", [32, 128, 300])
@pytest.mark.parametrize("kind", ["int4", "int4 zeros", "int8", "int8 zeros", "e4m3", "e4m3 blocks", "e2m1"])
def test_groups_in_tiles_have_the_same_values(kind: str, size: int) -> None:
    """Columns that groups do not divide, and one group for all."""
    draw = torch.Generator().manual_seed(size)
    code = kind.split()[0]
    bits, rows, columns = (8 if code in ("int8", "e4m3") else 4), 70, 300
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=draw, dtype=torch.uint8)
    rows_of_scale, groups = 64 if "blocks" in kind else 1, -(-columns // size)
    scales = torch.rand(-(-rows // rows_of_scale), groups, generator=draw).half()
    zeros = torch.randint(0, 1 << bits, (rows, groups), generator=draw, dtype=torch.uint8) if "zeros" in kind else None
    stored = codes if bits == 8 else packed(codes)
    if code == "e4m3":
        stored = codes.clamp(max=120).view(torch.float8_e4m3fn)
    if code == "e2m1":
        scales = torch.exp2((scales.float() * 8).round()).to(torch.float8_e8m0fnu)
    meaning = code if code.startswith("e") else "integer"
    weight_groups = Groups(meaning, bits, stored, scales, zeros, size, rows_of_scale)  # type: ignore[arg-type]
    tiles = weight_groups.tiles()
    assert tiles is not None
    torch.testing.assert_close(dequantized(tiles)[:, :columns], weight_groups.dequantized(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("quantize", ["int4", "fp8", "q8_0"])
def test_weights_that_are_rounded_while_they_are_read_are_tiles(quantize, checkpoint, forms_of_a_gpu):
    plain = load_model(checkpoint("qwen3"), device="cpu", dtype="float32")
    model = load_model(checkpoint("qwen3"), device="cpu", dtype="float32", quantize=quantize)
    assert isinstance(model, Decoder)
    assert isinstance(plain, Decoder)
    for name, form in model.layers[0].linears.items():
        assert isinstance(form, TiledLinear), (name, form)
        weight = product(plain.layers[0].linears[name])
        step = weight.abs().max() / {"int4": 7, "fp8": 14, "q8_0": 127}[quantize]
        assert (product(form) - weight).abs().max() <= step


def dequantizing(scratch_rows: int, in_order: bool = True) -> tuple[TiledLinear, torch.Tensor]:
    """Return a weight of two parts [24 + 8, 256] that dequantizes from 96 rows on, and its values rounded to bf16."""
    draw = torch.Generator().manual_seed(3)
    parts = []
    for rows, code in ((24, "s8"), (8, "s4")):
        codes = torch.randint(0, 16, (rows, 256), generator=draw, dtype=torch.uint8)
        parts.append(tiled(codes, code, torch.rand(rows, 2, generator=draw).bfloat16(), 128))
    order = None if in_order else torch.randperm(256, generator=draw).int()
    values = torch.cat([dequantized(part).bfloat16() for part in parts])
    if order is not None:
        values = torch.empty_like(values).index_copy_(1, order.long(), values)
    counters, bias = torch.zeros(8, dtype=torch.int32), torch.rand(32, generator=draw).bfloat16()
    scratch = torch.empty(scratch_rows * 256, dtype=torch.bfloat16)
    choices = {8: LinearChoice("tiles"), 96: LinearChoice(DEQUANTIZED), 512: LinearChoice("tiles")}
    form = TiledLinear(
        (32, 256), bias, tuple(parts), counters, 132, False, 9, False, FusedForm(), order, scratch, choices=choices
    )
    return form, values


@pytest.mark.parametrize("scratch_rows", [5, 32])
@pytest.mark.parametrize("in_order", [True, False])
def test_many_rows_dequantize_the_weight_first_where_that_was_faster(scratch_rows: int, in_order: bool) -> None:
    form, values = dequantizing(scratch_rows, in_order)
    assert form.scratch is not None
    assert [form.choice(rows).path for rows in (8, 64, 95, 96, 511, 512)] == [
        "tiles", "tiles", "tiles", DEQUANTIZED, DEQUANTIZED, "tiles",
    ]  # fmt: skip
    for rows, is_written in ((95, False), (96, True), (512, False)):
        form.scratch.fill_(torch.nan)
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).bfloat16()
        out = torch.empty(rows, 32, dtype=torch.bfloat16)
        form.apply(out, x)
        assert bool(form.scratch[:256].isfinite().all()) == is_written
        assert (form.fused(rows) is None) == (is_written or not in_order)
        expected = x.double() @ values.double().T + form.bias.double()
        torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()))


def test_a_captured_step_dequantizes_into_memory_that_stays_where_it_is() -> None:
    """Laws: fixed addresses; replay is eager."""
    form, _ = dequantizing(9)
    slots = [Slot("x", ("batch", 256), torch.bfloat16), Slot("y", ("batch", 32), torch.bfloat16)]
    buffers = StepBuffers(slots, max_batch_size=128, device="cpu")
    for place, tensor in enumerate(form.workspace):
        buffers.adopt(f"workspace_{place}", tensor)
    graphs = GraphManager(lambda batch: form.apply(batch.y, batch.x), buffers, [128], constants=form.tensors)
    graphs.capture(progress=False)
    for seed in range(2):
        buffers.all_rows.x.copy_(torch.randn(128, 256, generator=torch.Generator().manual_seed(seed)))
        graphs.replay(128)
        replayed = buffers.all_rows.y.clone()
        graphs.run_eager(128)
        assert torch.equal(replayed, buffers.all_rows.y)
        assert replayed.any()
    graphs.close()


def test_columns_in_another_order_are_put_right(forms_of_a_gpu: None) -> None:
    draw = torch.Generator().manual_seed(8)
    codes = torch.randint(0, 16, (6, 64), generator=draw, dtype=torch.uint8)
    order = torch.randperm(64, generator=draw).int()
    groups = Groups("integer", 4, packed(codes), torch.rand(6, 2, generator=draw), None, 32, order=order)
    tiles = groups.tiles()
    assert tiles is not None
    counters = torch.zeros(8, dtype=torch.int32)
    form = TiledLinear((6, 64), None, (tiles,), counters, 132, False, 9, False, FusedForm(), order)
    torch.testing.assert_close(product(form), groups.dequantized().T, rtol=1e-6, atol=1e-6)
    assert form.fused(1) is None


def test_int8_weights_are_those_of_the_rounded_ones(checkpoint: Callable[[str], Path], forms_of_a_gpu: None) -> None:
    plain = load_model(checkpoint("qwen3"), device="cpu", dtype="float32")
    tiled = load_model(checkpoint("qwen3"), device="cpu", dtype="float32", quantize="int8")
    assert isinstance(plain, Decoder)
    assert isinstance(tiled, Decoder)
    for name, form in tiled.layers[0].linears.items():
        assert isinstance(form, Int8TiledLinear)
        weight = product(plain.layers[0].linears[name]).T
        scales = weight.abs().amax(1, keepdim=True) / 127
        torch.testing.assert_close(product(form), ((weight / scales).round() * scales).T, rtol=1e-6, atol=1e-7)
        assert form.fused_form == FUSED_FORMS[name.rpartition(".")[2]]


def test_a_gated_product_of_few_rows_does_not_start_early() -> None:
    tiles = Groups("integer", 4, packed(torch.zeros(6, 64, dtype=torch.uint8)), torch.ones(6, 2), None, 32).tiles()
    assert tiles is not None
    for name, rows, may in (("gate_up", 1, False), ("gate_up", 16, False), ("gate_up", 17, True), ("o", 1, True)):
        counters = torch.zeros(8, dtype=torch.int32)
        form = TiledLinear((6, 64), None, (tiles,), counters, 132, True, 9, False, FUSED_FORMS[name])
        config = form.choice(rows).config
        assert config is not None
        assert config.pdl == may


def test_a_step_with_tiles_can_be_captured_and_its_replay_is_eager(tmp_path: Path, forms_of_a_gpu: None) -> None:
    """Law: replay is eager."""
    path = quantized_file(tmp_path / "small.gguf", "llama", SMALL)
    model = load_model(path, device="cpu", dtype="float32", quantize="gguf")
    assert isinstance(model, Decoder)
    driven = DrivenDecoder(model, 3, max_length=32)
    driven.prefill([[5, 6, 7], [8], [9, 1, 2, 3]], [0, 0, 0])
    for index, counters in enumerate(model.workspace):
        driven.buffers.adopt(f"counters_{index}", counters)
    constants = model.constants
    ids = {id(tensor) for tensor in constants}
    tiles = [part.words for layer in model.layers for form in layer.linears.values() for part in form.parts]  # type: ignore[attr-defined]
    assert tiles
    assert ids >= {id(words) for words in tiles}
    driven.assert_captured((1, 3), (3, 1, 4))


def test_four_bits_have_the_tokens_of_their_undone_weights_by_the_interpreted_kernel(
    tmp_path: Path, forms_of_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt and steps behind it, every product by the kernel that a GPU runs; it is in fp16, what is undone not."""
    path = quantized_file(tmp_path / "small.gguf", "llama", SMALL)
    texts, steps, launches = [[5, 6, 7], [65]], 2, 0
    plain = DrivenDecoder(load_model(path, device="cpu", dtype="float32"), 2, max_length=32)
    packed = DrivenDecoder(load_model(path, device="cpu", dtype="float16", quantize="gguf"), 2, max_length=32)

    def by_the_kernel(
        out: torch.Tensor,
        x: torch.Tensor,
        tiles: WeightTiles,
        bias: torch.Tensor | None,
        counters: torch.Tensor | None,
        config: SmallLinearConfig,
        *,
        gain: torch.Tensor | None = None,
        eps: float = 0.0,
        epilogue: str = "store",
        scale: float = 1.0,
    ) -> None:
        nonlocal launches
        launches += 1
        partial = partial_sums(config, x, tiles.words.shape[1], counters)
        late = config._replace(pdl=False)
        tiled_linear_triton(out, x, tiles, bias, gain, partial, counters, eps, epilogue, scale, late)

    monkeypatch.setattr("graphdecode.linear.tiled_linear.tiled_linear", by_the_kernel)
    for driven in (plain, packed):
        driven.prefill(texts, [0, 0])
    tokens = [70, 71]
    for step in range(steps):
        positions = [len(text) + step for text in texts]
        expected, actual = plain.decode(tokens, positions), packed.decode(tokens, positions).float()
        errors = (actual - expected).square().mean(-1).sqrt() / expected.std(-1)
        assert errors.max() < 12 * 2**-11
        tokens = expected.argmax(-1).tolist()
        assert actual.argmax(-1).tolist() == tokens
    assert launches > 11 * steps  # QKV is of two types, so five a layer, and the head's


def test_a_layer_of_int8_weights_is_five_launches_on_a_gpu_and_reads_half_the_bytes() -> None:
    plain, tiled = (recorded_step("shape:llama-100m", 1, quantize=quantize) for quantize in (None, "int8"))
    assert len(tiled.launches) == len(plain.launches)
    products = [launch for launch in tiled.launches if launch.operator == "tiled_linear"]
    assert len(products) == 4 * tiled.model.num_layers + 1
    layers, late = tiled.model.num_layers, [not launch.starts_early for launch in products]
    assert late == [False, False, True, False] * layers + [False]  # QKV, O, gate and up, down; the head
    assert tiled.model.weight_bytes < 0.51 * plain.model.weight_bytes


@pytest.mark.parametrize(
    ("name", "gate_up", "down"),
    [("mixtral", "Q4_0", "Q8_0"), ("gpt-oss", "MXFP4", "MXFP4"), ("qwen3moe", "F16", "Q4_0")],
)
def test_experts_of_a_file_are_tiles_too(tmp_path, forms_of_a_gpu, name, gate_up, down):
    packed, _ = models_of_file(tmp_path / "small.gguf", name, gate_up, gate_up, down)
    for experts in experts_in(packed):
        assert type(experts.down) is ExpertTiles
        assert type(experts.gate_up) is (UnquantizedExperts if gate_up == "F16" else ExpertTiles)


@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8", "q8_0"])
def test_experts_that_are_rounded_while_they_are_read_are_tiles(tmp_path, forms_of_a_gpu, monkeypatch, quantize):
    random_model("gpt-oss").save_pretrained(tmp_path)
    packed = load_model(tmp_path, device="cpu", dtype="float32", quantize=quantize)
    monkeypatch.setattr(ExpertTiles, "load", classmethod(lambda *_arguments: None))
    undone = load_model(tmp_path, device="cpu", dtype="float32", quantize=quantize)
    torch.testing.assert_close(logits(packed), logits(undone), rtol=3e-4, atol=3e-4)
    for model, form in ((packed, ExpertTiles), (undone, UnquantizedExperts)):
        assert all(type(each) is form for experts in experts_in(model) for each in (experts.gate_up, experts.down))


def test_experts_in_groups_are_tiles_and_those_with_an_order_of_columns_are_undone(tmp_path, forms_of_a_gpu):
    for form, kind in (("int4 group with zeros", ExpertTiles), ("gptq desc_act", UnquantizedExperts)):
        folders = write_pair(FORMS[form], tmp_path / form, "mixtral")
        packed, plain = (load_model(folder, device="cpu", dtype="float32") for folder in folders)
        torch.testing.assert_close(logits(packed), logits(plain), rtol=3e-4, atol=3e-4)
        assert all(type(experts.gate_up) is type(experts.down) is kind for experts in experts_in(packed))
