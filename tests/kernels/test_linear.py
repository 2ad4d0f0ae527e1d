"""Linear layers: every path against float64, for any number of rows, and the choice between the paths."""

import pytest
import torch

from graphdecode.kernels.linear.linear import linear, packed_linear
from graphdecode.kernels.native import library as native
from graphdecode.linear.forms import linear_of
from graphdecode.linear.linear_choice import LinearTuner
from graphdecode.linear.quantized_linear import Int8PanelLinear
from graphdecode.linear.unquantized import Panels
from graphdecode.linear.weight_form import FormOptions

ROWS = [1, 2, 3, 8, 17, 200, 512]
cpu_only = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
compiled = pytest.mark.skipif(native.library() is None or torch.cuda.is_available(), reason="needs compiled kernels")


def inputs(rows, dtype, with_bias, out_features=96, in_features=80):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, in_features, generator=generator).to(dtype)
    weight = (torch.randn(out_features, in_features, generator=generator) / 9).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype) if with_bias else None
    return x, weight, bias


def prepare(weight, bias=None, **options):
    return linear_of(weight, bias, FormOptions(weight.device, weight.dtype, LinearTuner(), **options))


def check(out, x, weight, bias):
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    scale = 3e-6 if x.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out.double(), expected, rtol=scale, atol=2 * scale)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ROWS)
def test_the_plain_product_is_right(rows, dtype, with_bias, device):
    x, weight, bias = (None if t is None else t.to(device) for t in inputs(rows, dtype, with_bias))
    out = torch.full((rows, 96), torch.nan, dtype=dtype, device=device)
    linear(out, x, weight, bias)
    check(out.cpu(), x.cpu(), weight.cpu(), None if bias is None else bias.cpu())


@cpu_only
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed_for", [1, 8])
@pytest.mark.parametrize("rows", ROWS)
def test_a_packed_weight_is_right_for_any_number_of_rows(rows, packed_for, dtype, with_bias):
    x, weight, bias = inputs(rows, dtype, with_bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, packed_for)
    out = torch.full((rows, 96), torch.nan, dtype=dtype)
    packed_linear(out, x, packed, bias)
    check(out, x, weight, bias)


@cpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 8])
def test_a_hostile_row_changes_no_other(rows, dtype):
    """Law: padding is inert."""
    x, weight, _ = inputs(rows, dtype, False)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    for product, *operands in ((linear, weight), (packed_linear, packed)):
        calm, hostile = torch.zeros(rows, 96, dtype=dtype), torch.zeros(rows, 96, dtype=dtype)
        product(calm, x, *operands)
        poisoned = x.clone()
        poisoned[-1] = torch.nan
        product(hostile, poisoned, *operands)
        assert torch.equal(calm[:-1], hostile[:-1]), product.__name__


@pytest.fixture
def no_compiled_kernels(monkeypatch):
    monkeypatch.setattr("graphdecode.linear.unquantized.can_panel", lambda weight: False)


@cpu_only
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("dtype", "path"), [(torch.float32, "packed"), (torch.float16, "plain")])
def test_without_compiled_kernels_onednn_packs_what_it_can(dtype, path, with_bias, no_compiled_kernels):
    x, weight, bias = inputs(5, dtype, with_bias)
    prepared = prepare(weight, bias)
    assert prepared.path == path
    assert (getattr(prepared, "weight", None) is None) == (path != "plain")
    assert prepared.nbytes == weight.nbytes + (0 if bias is None else bias.nbytes)
    assert len(prepared.tensors) == 1 + with_bias
    out = torch.zeros(5, 96, dtype=dtype)
    prepared.apply(out, x)
    check(out, x, weight, bias)


@cpu_only
@pytest.mark.skipif(native.library() is None, reason="there are no compiled kernels")
def test_compiled_kernels_are_taken_where_there_are_some():
    x, weight, bias = inputs(5, torch.float32, True)
    prepared = prepare(weight, bias)
    assert prepared.path == "native"
    assert prepared.nbytes == 96 * 80 * 4 + 96 * 4
    out = torch.zeros(5, 96)
    prepared.apply(out, x)
    check(out, x, weight, bias)


@compiled
@cpu_only
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_answers_nearly_like_the_full_weight(with_bias):
    x, weight, bias = inputs(5, torch.float32, with_bias, in_features=96)
    prepared = prepare(weight, bias, quantize="int8")
    assert type(prepared) is Int8PanelLinear
    assert prepared.nbytes == 96 * 96 + 96 * 4 * (1 + with_bias)
    out = torch.zeros(5, 96)
    prepared.apply(out, x)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert (out.double() - expected).norm() < 0.02 * expected.norm()


@compiled
@cpu_only
def test_a_weight_whose_columns_int8_does_not_support_is_rounded_in_the_plain_form():
    x, weight, _ = inputs(5, torch.float32, False)  # 80 columns
    prepared = prepare(weight, quantize="int8")
    assert type(prepared) is Panels
    scales, out = weight.abs().amax(1, keepdim=True) / 127, torch.zeros(5, 96)
    prepared.apply(out, x)
    check(out, x, (weight / scales).round() * scales, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int3"}, "quantize must be None or 'int8' or 'gguf', got 'int3'; a form or format of your own"),
        ({"batch_sizes": ()}, "batch_sizes is ()"),
        ({"batch_sizes": (0, 8)}, "batch_sizes is (0, 8)"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared literally
        prepare(torch.zeros(2, 2), **options)
    assert message in str(caught.value)


def test_the_operators_pass_opcheck(device):
    x, weight, bias = (t.to(device) for t in inputs(2, torch.float32, True))
    out = torch.zeros(2, 96, device=device)
    torch.library.opcheck(torch.ops.graphdecode.linear.default, (out, x, weight, bias))
