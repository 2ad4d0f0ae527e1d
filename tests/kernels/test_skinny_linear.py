"""The CUDA C++ products of few rows: which launches there are, and their machine code, of GPUs that are not here."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from products_of_8b import ARCHITECTURES, BFLOAT16, PRODUCTS, TILES, needs_nvrtc, operands
from torch import Tensor

from graphdecode.kernels.cuda import nvrtc
from graphdecode.kernels.cuda.nvrtc import compiled
from graphdecode.kernels.linear import skinny_linear, wide_linear
from graphdecode.kernels.linear import small_linear as small_linear_module
from graphdecode.kernels.linear.skinny_linear import (
    ProductArguments,
    SkinnyConfig,
    columns,
    even_bytes,
    grid_and_shared_bytes,
    macros,
    skinny_configs,
    step_of,
)
from graphdecode.kernels.linear.small_linear import SmallLinearConfig, skinny_candidates, small_linear
from graphdecode.kernels.linear.wide_linear import WideConfig, launch_product
from step_code.empty_tiles import empty_tiles


def code_of(kind: str, product: str, rows: int, arch: str) -> tuple[Any, SkinnyConfig, bool]:
    """The machine code of the likeliest launch, and whether a warp has all its weights in flight before the wait."""
    sass = pytest.importorskip("step_code.sass")
    out, x, weight, fused = operands(kind, product, rows)
    config = skinny_configs(weight, rows, True)[0]
    code = sass.Code.of(compiled("skinny_linear.cu", macros(out, x, weight, config, **fused), arch))
    has_all = config.ahead * config.warps * step_of(weight) >= columns(weight)
    return code, config, has_all


def check(kind: str, product: str, rows: int, arch: str) -> None:
    code, config, has_all = code_of(kind, product, rows, arch)
    assert code.stack == 0, "registers are spilled"
    assert code.registers * config.threads <= 1 << 16
    operations = [instruction.operation for instruction in code.instructions]
    assert operations.count("BAR") == 1
    if arch == "sm_80":
        return  # has no early start
    wait = operations.index("ACQBULK")
    assert operations.index("PREEXIT") < operations.index("LDG"), "the next kernel may start late"
    loads = [
        (place < wait, instruction.name)
        for place, instruction in enumerate(code.instructions)
        if "LDG" in operations[place]
    ]
    early = sum(is_early for is_early, name in loads if "128" in name or "64" in name)
    assert early >= config.ahead, "weights are loaded after the wait"
    if has_all:  # of constants, a bias alone, of 16 bits, and the scale of a whole row are read behind the wait
        assert not [name for is_early, name in loads if ".NA" in name and "128" in name and not is_early]
    loaded: set[str] = set()
    for instruction in code.instructions[:wait]:
        sources = set(re.findall(r"\bR\d+\b", " ".join(instruction.operands[instruction.operation != "STG" :])))
        assert instruction.operation == "LDG" or not sources & loaded, "a value is used before the wait for x"
        if instruction.operation == "LDG":
            first = int(instruction.operands[0].removeprefix("R"))
            loaded |= {f"R{first + word}" for word in range(max(instruction.width // 4, 1))}


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_weights_are_in_flight_before_the_wait_and_nothing_is_spilled(arch: str) -> None:
    check("plain", "qkv", 1, arch)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("kind", ["plain", *TILES])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_same_of_every_format_and_product(arch: str, kind: str, rows: int) -> None:
    for product in PRODUCTS:
        check(kind, product, rows, arch)


@needs_nvrtc
@pytest.mark.parametrize(("kind", "product"), [("int4", "gate_up"), ("Q6_K", "down")])
def test_weights_of_few_bits_are_in_flight_before_the_wait(kind: str, product: str) -> None:
    check(kind, product, 1, "sm_90a")


@needs_nvrtc
def test_eight_blocks_of_a_one_row_product_fit_a_multiprocessor() -> None:
    out, x, weight, fused = operands("plain", "qkv", 1)
    sass = pytest.importorskip("step_code.sass")
    config = SkinnyConfig(4, 1, 2, True)
    weight, x = weight[:, :1024], x[:, :1024]  # type: ignore[index]
    code = sass.Code.of(compiled("skinny_linear.cu", macros(out, x, weight, config, **fused), "sm_90a"))
    assert code.registers * config.threads * 8 <= 1 << 16
    assert grid_and_shared_bytes(out, x, weight, config, **fused)[1] * 8 <= 200 << 10


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("kind", ["plain", *TILES])
def test_every_column_and_row_has_a_warp(kind: str, product: str) -> None:
    for rows in (1, 3, 8):
        out, x, weight, fused = operands(kind, product, rows)
        for config in skinny_configs(weight, rows, True):
            steps = -(-columns(weight) // step_of(weight))
            assert config.ahead >= 1
            assert config.ahead * config.warps <= steps + config.warps - 1
            blocks, shared_bytes = grid_and_shared_bytes(out, x, weight, config, **fused)
            of_block = 8 * config.tiles // (2 if fused["epilogue"] == "silu" else 1)
            assert (blocks - 1) * of_block < out.shape[1] <= blocks * of_block
            assert shared_bytes <= 227 << 10


def test_few_blocks_ask_for_memory_so_that_a_multiprocessor_holds_its_share_twice_and_no_more() -> None:
    units, memory = 132, 228 << 10
    for blocks in (128, 132, 256, 384, 512, 768, 900):
        share, asked = -(-blocks // units), even_bytes(blocks, 9000, units, memory) + 1024
        assert memory // asked == 2 * share
    assert even_bytes(8 * units, 9000, units, memory) == 9000  # so many lie evenly by themselves
    assert even_bytes(128, 200_000, units, memory) == 200_000


def test_an_operand_that_it_does_not_take_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_linear, "unavailable_reason", lambda: None)
    weight = torch.zeros(16, 128, dtype=BFLOAT16)
    assert skinny_linear.unsupported_reason(torch.zeros(8, 128, dtype=BFLOAT16), weight) is None
    for x, said in (
        (torch.zeros(9, 128, dtype=BFLOAT16), "9 rows"),
        (torch.zeros(1, 128), "float32"),
        (torch.zeros(1, 96, dtype=BFLOAT16), "96 columns"),
        (torch.zeros(2, 129, dtype=BFLOAT16)[:, 1:], "16 bytes"),
    ):
        assert said in str(skinny_linear.unsupported_reason(x, weight))
    monkeypatch.setattr(skinny_linear, "unavailable_reason", lambda: "no NVRTC")
    assert skinny_linear.unsupported_reason(torch.zeros(8, 128, dtype=BFLOAT16), weight) == "no NVRTC"


@pytest.mark.parametrize(
    ("source", "rows", "config", "blocks"),
    [("skinny_linear", 2, SkinnyConfig(4, 1, 1, True), 8), ("wide_linear", 9, WideConfig(1, 4, 2, 1, 64, True), 4)],
)
def test_a_launch_has_the_arguments_that_the_kernel_declares(
    monkeypatch: pytest.MonkeyPatch, source: str, rows: int, config: SkinnyConfig | WideConfig, blocks: int
) -> None:
    launches: list[tuple[Any, ...]] = []

    class Recorder:
        def launch(self, *arguments: Any, **options: Any) -> None:
            launches.append((*arguments, options))

    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_multiprocessor=228 << 10)
    monkeypatch.setattr(skinny_linear, "unavailable_reason", lambda: None)
    for module in (skinny_linear, wide_linear):
        monkeypatch.setattr(module, "loaded", lambda file, *_: Recorder() if file == f"{source}.cu" else None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    tiles = empty_tiles(TILES["Q5_1"], 64, 512, "cpu")
    x, out = torch.zeros(rows, 520, dtype=BFLOAT16)[:, :512], torch.zeros(rows, 32, dtype=BFLOAT16)
    bias, gain = torch.zeros(64, dtype=BFLOAT16), torch.zeros(512)
    launch_product(out, x, tiles, ProductArguments(bias, gain, 1e-5, "silu", 0.5), config)
    ((grid, threads, given, options),) = launches
    text = (nvrtc.FOLDER / f"{source}.cu").read_text()
    declared = re.search(rf"\n{source}\(([^)]*)\)", text)[1]  # type: ignore[index]
    names = [re.search(r"(\w+)$", parameter.strip())[1] for parameter in declared.split(",")]  # type: ignore[index]
    by_name = {"out": out, "x": x, "bias": bias, "gain": gain, **dict(zip(tiles._fields[:4], tiles[:4], strict=True))}
    by_name |= {"rows": rows, "x_stride": 520, "out_stride": 32, "eps": 1e-5, "factor": 0.5}
    for name, value in zip(names, given, strict=True):
        assert by_name[name] is value if isinstance(value, Tensor) else by_name[name] == value, name
    assert (grid, threads, options["starts_early"]) == ((blocks,), 128, True)
    assert options.get("cluster", 1) == getattr(config, "splits", 1)


def test_on_a_cpu_the_configuration_changes_nothing() -> None:
    x, weight = torch.randn(3, 128).to(BFLOAT16), torch.randn(16, 128).to(BFLOAT16)
    assert skinny_candidates(x, weight, True) == []
    outs = [torch.empty(3, 16, dtype=BFLOAT16) for _ in range(2)]
    for out, kind in zip(outs, ("dot", "skinny"), strict=True):
        small_linear(out, x, weight, None, None, SmallLinearConfig(kind, 8, 128, 1, 4, 2, block_m=8))
    assert torch.equal(*outs)
    with pytest.raises(ValueError, match="9 rows"):
        small_linear(
            torch.empty(9, 16, dtype=BFLOAT16), x.repeat(3, 1), weight, None, None,
            SmallLinearConfig("skinny", 8, 128, 1, 4, 2, block_m=8),
        )  # fmt: skip


def test_without_nvrtc_there_is_a_line_and_triton_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (small_linear_module, skinny_linear):
        monkeypatch.setattr(module, "unavailable_reason", lambda: "no such library")
    nvrtc.say.cache_clear()
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    assert [skinny_candidates(on_gpu, torch.zeros(16, 128), True) for _ in range(2)] == [[], []]
    assert capsys.readouterr().err.count("no such library") == 1


def test_for_an_unknown_gpu_there_is_a_line_and_no_candidate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (small_linear_module, skinny_linear):
        monkeypatch.setattr(module, "unavailable_reason", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    nvrtc.say.cache_clear()
    x = torch.zeros(1, 128, dtype=BFLOAT16)
    on_gpu: Any = SimpleNamespace(
        is_cuda=True, device=x.device, dtype=x.dtype, shape=x.shape, stride=x.stride, data_ptr=x.data_ptr
    )
    assert [skinny_candidates(on_gpu, torch.zeros(16, 128, dtype=BFLOAT16), True) for _ in range(2)] == [[], []]
    assert capsys.readouterr().err.count("sm_75") == 1


@pytest.mark.gpu
@needs_nvrtc
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 40, 64])  # above 8 those of `wide_linear`
@pytest.mark.parametrize("epilogue", ["store", "add", "silu"])
def test_results_on_a_gpu_are_those_of_the_oracle_and_replays_give_their_bits(rows: int, epilogue: str) -> None:
    draw = torch.Generator("cuda").manual_seed(rows)
    x, weight = (torch.randn(n, 4096, device="cuda", generator=draw).to(BFLOAT16) for n in (rows, 2048))
    gain = torch.rand(4096, device="cuda", generator=draw)
    width = 1024 if epilogue == "silu" else 2048
    old = torch.randn(rows, width, device="cuda", generator=draw).to(BFLOAT16)
    expected = old.cpu()
    config = SmallLinearConfig("dot", 64, 64, 1, 4, 4)
    small_linear(expected, x.cpu(), weight.cpu(), None, None, config, gain=gain.cpu(), eps=1e-5, epilogue=epilogue)
    candidates = skinny_candidates(x, weight, torch.cuda.get_device_capability()[0] >= 9)
    assert candidates
    for candidate in candidates:
        outs = [old.clone() for _ in range(4)]
        small_linear(outs[0], x, weight, None, None, candidate, gain=gain, eps=1e-5, epilogue=epilogue)
        torch.testing.assert_close(outs[0].cpu(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for out in outs[1:]:
                small_linear(out, x, weight, None, None, candidate, gain=gain, eps=1e-5, epilogue=epilogue)
        for _ in range(3):
            for out in outs[1:]:
                out.copy_(old)
            graph.replay()
            assert all(torch.equal(out, outs[0]) for out in outs[1:])
