"""Plain weights that are rounded while they are read: into what, how closely, and what is refused."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from compiled_kernels import compiled
from family_checkpoints import save_checkpoint
from quantized_checkpoints import FORMS, write_pair

from graphdecode import LLM, ArgumentError, SamplingParams
from graphdecode.engine.loading import load_runner
from graphdecode.linear.quantization.compressed_tensors import GROUP_QUANTIZATIONS, quantized_groups
from graphdecode.linear.quantization.gguf import quantized_blocks
from graphdecode.linear.quantization.groups import Groups
from graphdecode.linear.quantized_linear import Int8PanelLinear, PanelLinear
from graphdecode.linear.weight_form import Shard
from graphdecode.models import load_model


def weight(seed: int = 0, shape: tuple[int, int] = (96, 512)) -> torch.Tensor:
    """Return a weight whose rows differ in size, with a row, a group and single values out of the ordinary."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator)
    values[3] = 0.0
    values[5] = 0.5
    values[6, :256] = -1.0
    values[7, 9] = 40.0
    return values


def test_how_weights_are_stored_may_be_said_and_is_refused_where_it_is_not_so(tmp_path: Path) -> None:
    packed, plain = write_pair(FORMS["awq"], tmp_path)
    options = {"max_batch_size": 1, "max_sequence_length": 32, "skip_tokenizer_init": True}
    with LLM(packed, quantization="awq", **options) as stated, LLM(packed, **options) as unstated:
        params = SamplingParams(temperature=0.0, max_tokens=4)
        first, second = (llm.generate([1, 2, 3], params)[0].outputs[0].token_ids for llm in (stated, unstated))
        assert first == second
    for model, quantization in ((packed, "gptq"), (plain, "compressed-tensors")):
        with pytest.raises(ArgumentError, match=f"quantize='{quantization}' is for weights .* by quantize='int8'"):
            LLM(model, quantization=quantization, **options)
    load_model(packed, device="cpu", quantize="awq")


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("name", "group_size", "most"), [("int8", None, 0.02), ("int8", 64, 0.009), ("fp8", None, 0.03)]
)
def test_a_group_is_rounded_to_its_nearest_codes(name: str, group_size: int | None, most: float) -> None:
    scheme = GROUP_QUANTIZATIONS[name].sized(group_size, [512])
    plain = weight()
    groups = quantized_groups(plain, scheme)
    assert groups.scales.shape == (96, 512 // (group_size or 512))
    assert error(groups.dequantized(), plain) < most
    codes = groups.values()
    step = groups.scales.repeat_interleave(512 // groups.scales.shape[1], 1)
    if name == "int8":  # no code beside it is nearer
        assert ((groups.dequantized() - plain).abs() <= 0.5001 * step).all()
        assert codes.abs().max() <= 127


def test_four_bits_are_closer_than_with_the_scale_of_the_largest_value() -> None:
    plain = weight().bfloat16()
    groups = quantized_groups(plain, GROUP_QUANTIZATIONS["int4"].sized(None, [512]))
    assert isinstance(groups, Groups)
    assert (groups.bits, groups.group_size, groups.scales.dtype) == (4, 128, torch.bfloat16)
    by_group = plain.float().view(96, -1, 128)
    largest = by_group.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 7
    simple = ((by_group / largest).round().clamp(-8, 7) * largest).flatten(1)
    assert error(groups.dequantized(), plain) < 0.93 * error(simple, plain)


@pytest.mark.parametrize(("block_type", "most"), [("Q8_0", 0.008), ("Q6_K", 0.02), ("Q5_0", 0.045), ("Q4_K", 0.08)])
def test_blocks_are_what_the_library_undoes(block_type: str, most: float) -> None:
    plain = weight()
    plain[7, 9] = 0.0
    blocks = quantized_blocks(plain, block_type)
    actual = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[block_type])
    assert np.isfinite(actual).all()
    assert error(torch.from_numpy(actual), plain) < most


def test_blocks_of_four_bits_keep_large_values_better_than_scales_of_the_largest_that_are_not_rounded() -> None:
    plain = torch.randn(64, 512, generator=torch.Generator().manual_seed(4))
    kind = gguf.GGMLQuantizationType.Q4_K
    actual = torch.from_numpy(gguf.quants.dequantize(quantized_blocks(plain, "Q4_K").numpy(), kind))
    groups = plain.view(64, -1, 32)
    least = groups.amin(-1, keepdim=True)
    scale = (groups.amax(-1, keepdim=True) - least) / 15  # those that are stored have six bits
    simple = (((groups - least) / scale).round() * scale + least).flatten(1)
    lost = [float(((each - plain).square() * plain.square()).sum()) for each in (actual, simple)]
    assert lost[0] < 0.97 * lost[1]


FORMS_OF = {"int4": PanelLinear, "fp8": PanelLinear, "q8_0": PanelLinear, "q4_k": PanelLinear, "int8": Int8PanelLinear}


@compiled
@pytest.mark.parametrize("quantize", FORMS_OF)
def test_a_model_answers_with_rounded_weights(tmp_path: Path, quantize: str) -> None:
    save_checkpoint("llama-3.2", tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(tmp_path, quantize=quantize, dtype="float32", max_batch_size=2, max_sequence_length=64) as llm:
        layer = llm.model.layers[0]
        assert {type(form) for form in layer.linears.values()} == {FORMS_OF[quantize]}
        assert all(len(output.outputs[0].token_ids) == 8 for output in llm.generate([[65, 66], [67] * 9], params))
        path = {"int4": "groups", "fp8": "groups", "int8": "int8"}.get(quantize, "blocks")
        assert path in str(llm.graphs.report())


def test_blocks_of_five_bits_keep_large_values_better_than_with_a_scale_by_the_largest() -> None:
    plain = torch.randn(64, 576, generator=torch.Generator().manual_seed(4))
    kind = gguf.GGMLQuantizationType.Q5_0
    theirs = gguf.quants.quantize(plain.numpy(), kind)
    lost = [
        float(((torch.from_numpy(gguf.quants.dequantize(blocks, kind)) - plain).square() * plain.square()).sum())
        for blocks in (quantized_blocks(plain, "Q5_0").numpy(), theirs)
    ]
    assert lost[0] < 0.9 * lost[1]


@compiled
def test_the_report_has_every_bucket_prompts_and_experts(tmp_path: Path) -> None:
    save_checkpoint("mixtral", tmp_path)
    settings = {"quantize": "q8_0", "max_batch_size": 3, "max_sequence_length": 64, "max_prefill_tokens": 24}
    with closing(load_runner(tmp_path, **settings)) as runner:
        runner.graphs.capture(progress=False)
        reports = runner.reports()
    assert [bucket.bucket for bucket in reports["steps"].buckets] == [1, 2, 3]
    assert [(bucket.bucket, bucket.state) for bucket in reports["prompts"].buckets][-1] == (24, "captured")
    for bucket in (*reports["steps"].buckets, *reports["prompts"].buckets):
        rounded_ones = {name: choice for name, choice in bucket.choices.items() if not name.startswith("router")}
        assert {"gate_up 192x64 of 5 experts", "down 64x96 of 5 experts", "qkv 128x64"} <= set(rounded_ones)
        assert {choice["path"] for choice in rounded_ones.values()} == {"blocks"}


@compiled
def test_groups_of_a_size_that_is_asked_for_are_made(tmp_path: Path) -> None:
    save_checkpoint("llama-2", tmp_path)
    for quantize, size in (("int8", 32), ("int4", 16)):
        model = load_model(tmp_path, device="cpu", quantize=quantize, quantize_group_size=size)
        form = model.layers[0].linears["o"]
        assert isinstance(form, PanelLinear)
        assert form.parts[0].scales.shape[1] == 64 // size


REFUSED = {
    "groups that do not fit": ("int4", 48, "divide all weights' columns, and so 32; those of 32 are"),
    "groups that are too small": ("int4", 8, "must be a multiple of 16"),
    "groups of float8": ("fp8", 32, "has a scale for each row"),
    "groups of blocks": ("q8_0", 32, "has blocks of one size"),
    "groups of nothing": (None, 32, "quantize_group_size is for quantize='int4' and 'int8'"),
}


@pytest.mark.parametrize(("quantize", "size", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_had_is_refused(tmp_path: Path, quantize: str | None, size: int, message: str) -> None:
    save_checkpoint("llama-2", tmp_path)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, device="cpu", quantize=quantize, quantize_group_size=size)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_weights_of_few_bits_are_not_rounded_again(tmp_path: Path, quantize: str) -> None:
    packed, _ = write_pair(FORMS["int4 group"], tmp_path)
    with pytest.raises(ValueError, match="is for plain weights, and these are"):
        load_model(packed, device="cpu", quantize=quantize)


def test_a_part_by_rows_is_rounded_as_the_whole() -> None:
    plain = weight()
    scheme = GROUP_QUANTIZATIONS["int4"].sized(64, [512])
    part = Shard(1, 3, 0)
    assert torch.equal(
        quantized_groups(plain, scheme).part(part).dequantized(),
        quantized_groups(plain[part.slices((96, 512))], scheme).dequantized(),
    )
