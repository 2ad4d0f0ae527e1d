"""Quantized checkpoints of Hugging Face are what their plain ones are."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from compiled_kernels import compiled
from family_checkpoints import edit_config, edited_tensors, save_checkpoint
from greedy_tokens import greedy_tokens
from products import assert_same_products, product
from quantized_checkpoints import FORMS, packed_tensors, write_pair
from safetensors.torch import load_file, save_file

from graphdecode import LLM
from graphdecode.linear.composite import MergedLinear
from graphdecode.linear.quantization.registry import weight_type
from graphdecode.linear.quantized_linear import PanelLinear
from graphdecode.linear.unquantized import Panels
from graphdecode.linear.weight_form import Shard
from graphdecode.models import CheckpointError, UnsupportedModelError, check_model, load_model
from graphdecode.models.checkpoint import Checkpoint

MLP, ATTENTION = "model.layers.0.mlp.down_proj.weight", "model.layers.2.self_attn.q_proj.weight"


@pytest.fixture(scope="module", params=FORMS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(FORMS[request.param], tmp_path_factory.mktemp("pair"))


def read(source: Checkpoint, name: str, shard: Shard | None = None) -> torch.Tensor:
    shape = torch.empty(source.tensors[name].shape, device="meta")
    out = torch.empty((shape if shard is None else shape[shard.slices(tuple(shape.shape))]).shape)
    source.read(name, out, shard)
    return out


def test_a_weight_is_read_as_what_it_stands_for(pair: tuple[Path, Path]) -> None:
    packed, plain = map(Checkpoint, pair)
    assert packed.tensors.keys() - {name for name in packed.tensors if name.endswith("bias")} == plain.tensors.keys()
    assert packed.tensors["model.layers.1.mlp.down_proj.weight"].dtype in ("F32", "BF16", "F16")
    for name in (MLP, ATTENTION):
        assert weight_type(packed.tensors[name].dtype) is not None
        torch.testing.assert_close(read(packed, name), read(plain, name), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("shard", [Shard(1, 4, 0), Shard(2, 3, 1)], ids=str)
def test_a_part_is_that_of_the_whole(pair: tuple[Path, Path], shard: Shard) -> None:
    packed, plain = map(Checkpoint, pair)
    expected = read(plain, MLP, shard)
    torch.testing.assert_close(read(packed, MLP, shard), expected, rtol=2e-6, atol=1e-7)
    groups = packed.read_quantized(MLP)
    with suppress(ValueError):  # it begins or ends within a group
        torch.testing.assert_close(groups.part(shard).dequantized(), expected, rtol=2e-6, atol=1e-7)


@compiled
def test_a_layer_keeps_its_codes(pair: tuple[Path, Path]) -> None:
    packed, plain = (load_model(folder, device="cpu", dtype="float32") for folder in pair)
    is_kept = Checkpoint(pair[0]).tensors[MLP].dtype != "NF4"
    for index, layer in enumerate(packed.layers):
        for name, form in layer.linears.items():
            is_plain = not is_kept or (index == 1 and name in ("gate_up", "down"))
            assert type(form) is (Panels if is_plain else PanelLinear), (index, name)
            assert_same_products(form, plain.layers[index].linears[name], index)


def test_tokens_are_those_of_the_dequantized_model(pair: tuple[Path, Path]) -> None:
    answers = []
    for folder in pair:
        with LLM(folder, dtype="float32", max_batch_size=2, max_sequence_length=64) as llm:
            answers.append(greedy_tokens(llm, [[65, 66], [67] * 9], 12))
    assert answers[0] == answers[1]


INT4, CACHE = FORMS["int4 group"].settings, {"num_bits": 8, "type": "float", "strategy": "channel"}
REFUSED = {
    "an unknown method": ({"quant_method": "hqq"}, r"\(hqq\) .*compressed-tensors, gptq"),
    "no method": ({"bits": 4}, r"\(None\)"),
    "gptq of three bits": (FORMS["gptq"].settings | {"bits": 3}, "bits 3 .*4, 8"),
    "gptq that differs by layer": (FORMS["gptq"].settings | {"dynamic": {"a": {}}}, "dynamic "),
    "awq for matrix-vector products": (FORMS["awq"].settings | {"version": "gemv"}, "version gemv"),
    "fp8 in blocks that are no blocks": ({"quant_method": "fp8", "weight_block_size": [0]}, "weight_block_size"),
    "bitsandbytes of eight bits": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit True"),
    "a transform of the weights": (INT4 | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    "a cache of four bits": (INT4 | {"kv_cache_scheme": CACHE | {"num_bits": 4}}, r"kv_cache_scheme\.num_bits 4 .*8"),
    "scales of a cache by channel": (INT4 | {"kv_cache_scheme": CACHE}, r"kv_cache_scheme\.strategy channel .*tensor"),
    "a cache that is a word": (INT4 | {"kv_cache_scheme": "abc"}, "'abc'"),
    "modules that are a number": (INT4 | {"ignore": 7}, "ignore .*7"),
    "sparse weights": (INT4 | {"format": "marlin-24"}, "format marlin-24"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_known_is_refused_by_its_configuration(tmp_path: Path, settings: dict, message: str) -> None:
    save_checkpoint("llama-2", tmp_path)
    edit_config(tmp_path, lambda config: config.update(quantization_config=settings))
    with pytest.raises(UnsupportedModelError, match=message):
        check_model(tmp_path)


@compiled
@pytest.mark.parametrize(("ignored", "place"), [("mlp.down_proj", "down"), ("self_attn.k_proj", "qkv")])
def test_one_module_that_is_ignored_is_plain_and_so_is_what_it_is_fused_with(tmp_path, ignored, place):
    form = FORMS["int4 group"]
    module = f"model.layers.0.{ignored}"
    form = form._replace(settings=form.settings | {"ignore": ["lm_head", module]})
    packed, plain = (
        load_model(each, device="cpu", dtype="float32") for each in write_pair(form, tmp_path, left_plain=module)
    )
    for name, linear in packed.layers[0].linears.items():
        assert type(linear) is (Panels if name == place else PanelLinear), name
        assert_same_products(linear, plain.layers[0].linears[name], 0)


@compiled
@pytest.mark.parametrize(
    ("forms", "products"),
    [
        (["int4 group"] * 4, 1),
        (["int4 group"] * 2 + ["int8 packed"] * 2, 2),
        (["int4 group"] * 2 + ["int4 channel"] * 2, 2),
        (["int4 group", "int8 packed", "int4 group", "int4 group"], 3),
    ],
)
def test_a_delta_net_keeps_weights_in_groups_that_cannot_be_joined(tmp_path, monkeypatch, forms, products):
    folder = save_checkpoint("qwen3.5", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    names = [f"in_proj_{part}.weight" for part in ("qkv", "z", "a", "b")]
    for name, form in zip(names, forms, strict=True):
        monkeypatch.setattr("quantized_checkpoints.PRODUCTS", (name,))
        tensors, _ = packed_tensors(FORMS[form], tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    groups = {form: FORMS[form].settings["config_groups"]["group_0"] for form in forms}
    settings = FORMS["int4 group"].settings | {"config_groups": groups}
    edit_config(folder, lambda config: config.update(quantization_config=settings))
    form = load_model(folder, device="cpu", dtype="float32").layers[0].linears["in_proj"]
    products_found = form.forms if isinstance(form, MergedLinear) else (form,)
    assert [type(part) for part in products_found] == [PanelLinear] * products
    source = Checkpoint(folder)
    weight = torch.cat([read(source, f"model.layers.0.linear_attn.{name}") for name in names])
    torch.testing.assert_close(product(form), weight.T, rtol=1e-5, atol=1e-6)


def test_weights_that_are_not_symmetric_need_zero_points(tmp_path: Path) -> None:
    form = FORMS["int4 group"]
    settings = copy.deepcopy(form.settings)
    settings["config_groups"]["group_0"]["weights"]["symmetric"] = False
    packed, _ = write_pair(form._replace(settings=settings), tmp_path)
    with pytest.raises(CheckpointError, match=r"weight_zero_point is missing: the configuration has symmetric false"):
        load_model(packed, device="cpu")


def test_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    packed, _ = write_pair(FORMS["int4 group"], tmp_path)
    name = MLP.replace("weight", "weight_scale")
    with edited_tensors(packed) as tensors:
        tensors[name] = tensors[name][:, :-1].contiguous()
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_scale is BF16 \[64, 2\]"):
        load_model(packed, device="cpu")


def test_groups_of_unequal_sizes_are_refused(tmp_path: Path) -> None:
    packed, _ = write_pair(FORMS["gptq desc_act"], tmp_path)
    with edited_tensors(packed) as tensors:
        tensors[MLP.replace("weight", "g_idx")].zero_()
    with pytest.raises(CheckpointError, match="not 32 columns each"):
        load_model(packed, device="cpu")
