"""Weights in groups: what they stand for, and their parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from graphdecode.linear.quantization.groups import TABLES, Groups, packed, unpacked
from graphdecode.linear.weight_form import Shard

ROWS, COLUMNS, GROUP = 12, 80, 32  # the last group has 16 columns


def random_groups(
    code: str, *, zeros: bool = False, order: bool = False, rows_of_scale: int = 1, seed: int = 0
) -> Groups:
    """Return random groups."""
    generator = torch.Generator().manual_seed(seed)
    bits = 8 if code in ("int8", "e4m3") else 4
    codes = torch.randint(0, 2**bits, (ROWS, COLUMNS), generator=generator).to(torch.uint8)
    if code == "e4m3":
        codes = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.float8_e4m3fn)
    groups = math.ceil(COLUMNS / GROUP)
    scales = torch.rand(math.ceil(ROWS / rows_of_scale), groups, generator=generator) + 0.5
    if code == "e2m1":
        scales = torch.randint(120, 130, scales.shape, generator=generator).to(torch.uint8).view(torch.float8_e8m0fnu)
    return Groups(
        code="integer" if code.startswith("int") else code,
        bits=bits,
        codes=packed(codes) if bits == 4 else codes,
        scales=scales,
        zeros=torch.randint(0, 2**bits, (ROWS, groups), generator=generator).to(torch.uint8) if zeros else None,
        group_size=GROUP,
        rows_of_scale=rows_of_scale,
        order=torch.randperm(COLUMNS, generator=generator).int() if order else None,
    )


def stands_for(groups: Groups) -> np.ndarray:
    """Return the weight in float64, value by value, from the words of the definition."""
    rows, columns = groups.shape
    codes = unpacked(groups.codes) if groups.bits == 4 else groups.codes
    weight = np.zeros((rows, columns))
    for row in range(rows):
        for column in range(columns):
            group, code = column // groups.group_size, codes[row, column]
            if groups.code == "integer":
                zero = 2 ** (groups.bits - 1) if groups.zeros is None else int(groups.zeros[row, group])
                value = float(int(code) - zero)
            else:
                value = float(code.float()) if groups.code == "e4m3" else TABLES[groups.code][int(code)]
            feature = column if groups.order is None else int(groups.order[column])
            weight[row, feature] = value * float(groups.scales[row // groups.rows_of_scale, group].float())
    return weight


KINDS = {
    "int4": {"code": "int4"},
    "int4 with zeros": {"code": "int4", "zeros": True},
    "int4 in another order": {"code": "int4", "zeros": True, "order": True},
    "int8": {"code": "int8"},
    "int8 with zeros": {"code": "int8", "zeros": True},
    "fp8 in blocks": {"code": "e4m3", "rows_of_scale": 5},
    "mxfp4": {"code": "e2m1"},
    "nf4": {"code": "nf4"},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_groups_stand_for_what_their_definition_says(kind):
    groups = random_groups(**kind)
    actual = groups.dequantized()
    assert actual.dtype == torch.float32
    np.testing.assert_allclose(actual.double().numpy(), stands_for(groups), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_parts_by_rows_are_the_rows_of_the_whole(kind):
    groups = random_groups(**kind)
    parts = [groups.part(Shard(rank, 3, 0)) for rank in range(3)]
    assert [part.shape for part in parts] == [(4, COLUMNS)] * 3
    assert torch.equal(torch.cat([part.dequantized() for part in parts]), groups.dequantized())


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if not kind.get("order")], ids=str)
def test_parts_by_columns_begin_with_a_group(kind):
    whole = random_groups(**kind)
    groups = whole.part(Shard(0, 1, 1))
    assert torch.equal(groups.dequantized(), whole.dequantized())
    with pytest.raises(ValueError, match="within a group of 32"):
        groups.part(Shard(1, 2, 1))


def test_a_part_may_be_of_rows_and_of_columns():
    whole = random_groups("int4", zeros=True)
    part = Shard(0, 1, 1, begin=32, size=32, within=Shard(2, 3, 0))
    assert torch.equal(whole.part(part).dequantized(), whole.dequantized()[8:, 32:64])


def test_columns_of_one_scale_are_shared_out_anywhere():
    groups = random_groups("int8")
    channel = Groups("integer", 8, groups.codes, groups.scales[:, :1], None, COLUMNS)
    parts = [channel.part(Shard(rank, 3, 1)) for rank in range(3)]
    assert torch.equal(torch.cat([part.dequantized() for part in parts], dim=1), channel.dequantized())


def test_columns_in_another_order_are_not_shared_out():
    with pytest.raises(ValueError, match="reordered"):
        random_groups("int4", order=True).part(Shard(0, 2, 1))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_layers_one_below_another_are_one_weight(kind):
    parts = [random_groups(**kind), random_groups(**kind)]
    whole = Groups.joined(parts)
    assert whole is not None
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts]))


def test_zeros_of_one_layer_are_written_out_for_the_others():
    parts = [random_groups("int4"), random_groups("int4", zeros=True)]
    whole = Groups.joined(parts)
    assert whole is not None
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts]))


def test_layers_that_differ_are_not_fused():
    assert Groups.joined([random_groups("int4"), random_groups("int8")]) is None
    assert Groups.joined([random_groups("int4", order=True), random_groups("int4", order=True, seed=1)]) is None
    assert Groups.joined([random_groups("int4", order=True), random_groups("int4")]) is None
