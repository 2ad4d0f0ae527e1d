"""The linear paths of an engine: shown in the capture report, and those of a GPU with the workspace that they need."""

import dataclasses

import pytest
import torch

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.kernels.linear.small_linear import SmallLinearConfig, small_linear_triton
from graphdecode.linear import forms, unquantized
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.unquantized import UnquantizedLinear
from graphdecode.linear.weight_form import FormOptions, WeightForm

SPLIT = SmallLinearConfig("dot", 32, 64, 2, 4, 2)
PROMPTS = ["12+30=", "rev abc=", "417+385="]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
LAYERS = {"qkv 256x128", "o 128x128", "gate_up 768x128", "down 128x384", "lm_head 259x128"}


def make_llm() -> LLM:
    return LLM("demo", config=BucketConfig(max_batch_size=4, max_sequence_length=64, batch_sizes=[1, 2, 4]))


def test_the_capture_report_names_the_path_of_each_layer_shape() -> None:
    with make_llm() as llm:
        report = llm.graphs.report()
        for bucket in report.buckets:
            assert bucket.choices.keys() == LAYERS
        smallest, largest = report.buckets[0].choices, report.buckets[-1].choices
        for layer in LAYERS:
            assert smallest[layer]["path"] == largest[layer]["path"]
            assert f"  {layer}: path {smallest[layer]['path']}" in str(report)


@pytest.mark.parametrize("is_fixed", [False, True])
def test_products_with_counters_are_captured_and_the_report_shows_their_buckets(monkeypatch, is_fixed):
    """What a GPU's choice makes of the model, with the torch version in the kernel's place where there is no GPU."""
    with make_llm() as llm:
        expected = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]
        device = llm.device
    counters = torch.zeros(4096, dtype=torch.int32, device=device)

    class Split(UnquantizedLinear):
        @classmethod
        def unavailable_reason(cls, options: FormOptions) -> str:
            return ""

        @classmethod
        def of(cls, weight: torch.Tensor, bias: torch.Tensor | None, options: FormOptions) -> WeightForm:
            held = super().of(weight, bias, options)
            if is_fixed:
                return dataclasses.replace(held, counters=counters, config=SPLIT)
            choices = {2: LinearChoice("small", SPLIT, us=1.0, gb_per_s=2.0)}
            return dataclasses.replace(held, counters=counters, choices=choices)

    monkeypatch.setattr(forms, "FORMS", [Split])
    with make_llm() as llm:
        assert [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)] == expected
        report = llm.graphs.report()
    kernels = {bucket.bucket: bucket.kernels for bucket in report.buckets}
    products = {1: 17 * is_fixed, 2: 17, 4: 17 * is_fixed}
    if device.type == "cpu":
        found = {bucket: names["graphdecode.small_linear.default"] for bucket, names in kernels.items()}
        assert found == products
        fused = {"small_linear": 17, "append_attention": 4}
        layers = {name.split(".")[1]: count for name, count in kernels[2].items() if count >= 4}
        assert layers == fused, "norms, gates and sums with the residual take no launch of their own"
        assert kernels[1]["graphdecode.act_mul.default"] == 4 * (not is_fixed)
    paths = {bucket.bucket: bucket.choices["qkv 256x128"]["path"] for bucket in report.buckets}
    assert paths == ({1: "fixed", 2: "fixed", 4: "fixed"} if is_fixed else {1: "plain", 2: "small", 4: "plain"})
    assert report.buckets[1].choices["down 128x384"]["config"] == str(SPLIT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the choice on a GPU takes the kernel by itself")
@pytest.mark.parametrize("kind", ["dot", "gemv"])
def test_a_model_whose_products_the_interpreted_kernel_makes_answers_the_same(monkeypatch, kind):
    pytest.importorskip("triton")
    config = SmallLinearConfig(kind, 256, 64, 2, 4, 2)  # large blocks: the interpreter takes as long for small ones
    launched = []

    def product(
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: None,
        counters: torch.Tensor,
        _: object,
        gain: torch.Tensor | None = None,
        eps: float = 0.0,
        epilogue: str = "store",
        scale: float = 1.0,
    ) -> None:
        launched.append((x.shape[0], gain is not None, epilogue))
        columns = -(-weight.shape[0] // config.block_n) * (config.block_n + 1)
        partial = torch.full((config.splits, x.shape[0], columns), torch.nan)
        given = config._replace(pdl=False)
        small_linear_triton(out, x, weight, bias, gain, partial, counters, eps, epilogue, scale, given)

    class Interpreted(UnquantizedLinear):
        @classmethod
        def of(cls, weight: torch.Tensor, bias: torch.Tensor | None, options: FormOptions) -> WeightForm:
            choices = {rows: LinearChoice("small", config) for rows in ((1, 2) if kind == "gemv" else (1, 2, 4))}
            return dataclasses.replace(super().of(weight, bias, options), counters=counters, choices=choices)

    with make_llm() as llm:
        expected = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]
    counters = torch.zeros(4096, dtype=torch.int32)
    monkeypatch.setattr(forms, "FORMS", [Interpreted])
    monkeypatch.setattr(unquantized, "small_linear", product)
    buckets = BucketConfig(max_batch_size=4, max_sequence_length=64, batch_sizes=[1, 2, 4], backend="eager")
    with LLM("demo", config=buckets) as llm:
        assert [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)] == expected
    shares = {(has_norm, epilogue) for _, has_norm, epilogue in launched}
    assert shares == {(True, "store"), (False, "add"), (True, "silu")}
    assert launched
    assert not counters.any()
