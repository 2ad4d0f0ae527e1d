"""The CUDA C++ products of 9 to 64 rows: which launches there are, and the machine code of GPUs that are not here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from products_of_8b import ARCHITECTURES, BFLOAT16, PRODUCTS, TILES, needs_nvrtc, operands

from graphdecode.kernels.cuda.nvrtc import compiled
from graphdecode.kernels.linear import skinny_linear, wide_linear
from graphdecode.kernels.linear import small_linear as small_linear_module
from graphdecode.kernels.linear.skinny_linear import columns
from graphdecode.kernels.linear.small_linear import SmallLinearConfig, skinny_candidates, small_linear
from graphdecode.kernels.linear.weight_tiles import WeightTiles
from graphdecode.kernels.linear.wide_linear import (
    WARP_ROWS,
    GpuLimits,
    most_rows,
    shared_bytes,
    wide_blocks,
    wide_configs,
    wide_macros,
    wide_step,
)

LIMITS = {
    "sm_80": GpuLimits(108, 163 << 10, False),
    "sm_90a": GpuLimits(132, 227 << 10, True),
    "sm_100": GpuLimits(148, 227 << 10, True),
    "sm_120": GpuLimits(170, 99 << 10, True),
}


def check(kind: str, product: str, rows: int, arch: str) -> None:
    sass = pytest.importorskip("step_code.sass")
    out, x, weight, fused = operands(kind, product, rows)
    config = wide_configs(weight, rows, True, LIMITS[arch])[0]
    code = sass.Code.of(compiled("wide_linear.cu", wide_macros(out, x, weight, config, **fused), arch))
    assert code.stack == 0, "registers are spilled"
    assert -(-code.registers // 8) * 8 * config.threads <= 1 << 16
    operations = [instruction.operation for instruction in code.instructions]
    loop = max(code.inner_loops, key=lambda loop: operations[loop.start : loop.stop].count("HMMA"))
    assert operations[loop.start : loop.stop].count("BAR") == wide_step(weight) // config.chunk, "a barrier each chunk"
    if arch == "sm_80":
        return  # has no early start
    wait, copies = operations.index("ACQBULK"), [place for place, name in enumerate(operations) if name == "LDGSTS"]
    assert operations.index("PREEXIT") < copies[0], "the next kernel may start late"
    ahead = -(-config.ahead // (wide_step(weight) // config.chunk))  # steps of the weight
    words = weight.words if isinstance(weight, WeightTiles) else weight
    pieces = words.shape[2] // 8 * (words.shape[0] * wide_step(weight) // columns(weight)) if words.ndim == 3 else 8
    assert sum(place < wait for place in copies) >= ahead * pieces, "weights are copied after the wait"
    assert wait < loop.start, "the loop waits"


@needs_nvrtc
@pytest.mark.parametrize(("kind", "product", "rows"), [("plain", "o", 16), ("plain", "gate_up", 64), ("Q4_0", "o", 64)])
def test_weights_are_copied_before_the_wait_and_nothing_is_spilled(kind: str, product: str, rows: int) -> None:
    check(kind, product, rows, "sm_90a")


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("kind", ["plain", *TILES])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_same_of_every_format_and_product(arch: str, kind: str, rows: int) -> None:
    for product in PRODUCTS:
        check(kind, product, rows, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["plain", *TILES])
def test_every_column_and_row_has_a_warp(kind: str, arch: str) -> None:
    for product in PRODUCTS:
        for rows in (9, 16, 33, 64):
            out, _, weight, fused = operands(kind, product, rows)
            configs = wide_configs(weight, rows, True, LIMITS[arch])
            assert configs
            for config in configs:
                parts = config.column_warps * config.splits
                part = -(-columns(weight) // wide_step(weight) // parts)
                assert part * parts * wide_step(weight) >= columns(weight)
                blocks = wide_blocks(out, config, fused["epilogue"]) // config.splits
                outputs = WARP_ROWS * config.row_warps // (2 if fused["epilogue"] == "silu" else 1)
                assert (blocks - 1) * outputs < out.shape[1] <= blocks * outputs
                assert config.splits == 1 or LIMITS[arch].has_clusters
                assert shared_bytes(weight, rows, config) <= LIMITS[arch].shared_of_block
                assert rows <= most_rows(rows) <= rows + 15


def test_an_operand_that_it_does_not_take_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_linear, "unavailable_reason", lambda: None)
    weight = torch.zeros(16, 128, dtype=BFLOAT16)
    assert wide_linear.unsupported_reason(torch.zeros(64, 128, dtype=BFLOAT16), weight) is None
    assert "65 rows" in str(wide_linear.unsupported_reason(torch.zeros(65, 128, dtype=BFLOAT16), weight))


def test_a_configuration_of_many_rows_is_that_of_this_kernel() -> None:
    config = SmallLinearConfig("skinny", 128, 64, 4, 8, 3, True, 64)
    assert config.skinny == wide_linear.WideConfig(4, 2, 4, 3, 64, True)
    assert config.counters(64, 4096) == 0  # its splits add up in distributed shared memory
    x, weight, out = torch.randn(65, 128).to(BFLOAT16), torch.randn(16, 128).to(BFLOAT16), torch.empty(65, 16)
    out = out.to(BFLOAT16)
    small_linear(out[:64], x[:64], weight, None, None, config)
    assert torch.equal(out[:64], x[:64] @ weight.T)
    with pytest.raises(ValueError, match="65 rows"):
        small_linear(out, x, weight, None, None, config)


def test_candidates_name_the_launches_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (small_linear_module, skinny_linear):
        monkeypatch.setattr(module, "unavailable_reason", lambda: None)
    monkeypatch.setattr(small_linear_module, "unknown_reason", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(GpuLimits, "of", lambda _: LIMITS["sm_90a"])
    x, weight = torch.zeros(40, 4096, dtype=BFLOAT16), torch.zeros(512, 4096, dtype=BFLOAT16)
    on_gpu: Any = SimpleNamespace(
        is_cuda=True, device=x.device, dtype=x.dtype, shape=x.shape, stride=x.stride, data_ptr=x.data_ptr
    )
    found = skinny_candidates(on_gpu, weight, True)
    assert [config.skinny for config in found] == wide_configs(weight, 40, True, LIMITS["sm_90a"])
    assert {(config.kind, config.block_m, config.counters(40, 512)) for config in found} == {("skinny", 48, 0)}
