"""Attention of a step by clusters in CUDA C++: when it serves, what it is launched with, and its machine code."""

from typing import Any

import pytest
import torch
from fibers import needs_compiler
from test_append_attention import Problem
from test_cluster_attention import CASES, OnFibers

from graphdecode.kernels.attention.append_attention import append_attention_triton
from graphdecode.kernels.attention.attention_records import AttentionOptions, QKNormRope
from graphdecode.kernels.cuda import decode_attention as by_clusters
from graphdecode.kernels.cuda.decode_attention import Limits, macros_of, served_sizes
from graphdecode.kernels.cuda.nvrtc import compiled, unavailable_reason

needs_nvrtc = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
H200, RTX_5090 = Limits(132, 232448), Limits(170, 101376)
BFLOAT16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def step(rows: int, heads: int, kv_heads: int, head_dim: int, kv_dtype: torch.dtype = BFLOAT16) -> dict[str, Any]:
    """A step's tensors, without memory."""
    cache = torch.empty(4, 16, kv_heads, head_dim, dtype=kv_dtype, device="meta")
    return {
        "out": torch.empty(rows, heads, head_dim, dtype=BFLOAT16, device="meta"), "k_cache": cache, "v_cache": cache,
        "qkv": torch.empty(rows, (heads + 2 * kv_heads) * head_dim, dtype=BFLOAT16, device="meta"),
        "rope": QKNormRope(torch.empty(9, 2, head_dim // 2, device="meta")),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "limits", "sizes"),
    [
        (step(1, 32, 8, 128), H200, (8, 3)),  # Llama 8B: 64 blocks on 132 multiprocessors
        (step(8, 32, 8, 128), H200, (2, 3)),
        (step(8, 16, 8, 128), RTX_5090, (2, 2)),
        (step(64, 32, 8, 128), H200, (1, 3)),
        (step(1, 8, 4, 256), RTX_5090, (8, 1)),
    ],
)
def test_blocks_fill_the_device_and_tiles_the_shared_memory(tensors: Any, limits: Limits, sizes: Any) -> None:
    found = served_sizes(**tensors, limits=limits)
    assert found is not None
    assert (found.cluster, found.stages) == sizes
    assert found.shared_bytes <= limits.shared_bytes


@pytest.mark.parametrize(
    "changed",
    [
        step(1, 4, 2, 512),
        step(1, 4, 2, 72),
        step(1, 34, 2, 64),
        step(1, 4, 2, 64, torch.int8),
        {"out": torch.empty(1, 4, 64, device="meta"), "k_cache": torch.empty(4, 16, 2, 64, device="meta")},
        {"k_cache": torch.empty(4, 2, 16, 64, dtype=BFLOAT16, device="meta").transpose(1, 2)},
        {"rope": QKNormRope(*(torch.empty(n, device="meta") for n in (0, 256, 128)))},
    ],
    ids=["wide", "uneven", "17 heads", "int8", "float32", "not adjacent", "norm of all heads"],
)
def test_other_steps_are_left_to_triton(changed: dict[str, Any]) -> None:
    assert served_sizes(**step(1, 4, 2, 64), limits=H200) is not None
    assert served_sizes(**(step(1, 4, 2, 64) | changed), limits=H200) is None


@needs_compiler
@pytest.mark.parametrize("is_served", [True, False])
def test_the_operator_launches_it_where_it_is_chosen_and_serves(
    is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["one key"] if is_served else CASES["one key"] | {"dtype": "fp32"}
    fibers, launches = OnFibers(case, 0), []
    monkeypatch.setattr(by_clusters, "is_chosen", lambda device: True)
    monkeypatch.setattr(by_clusters, "limits_of", lambda device: H200)

    def launch(*given: Any) -> None:
        launches.append(given)
        fibers.launch_over(*given)

    monkeypatch.setattr(by_clusters, "launch_decode_attention", launch)
    Problem(case, "cpu", 1).check(append_attention_triton)
    assert len(launches) == is_served
    assert fibers.outcome.faults == []


def test_no_device_takes_it_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_clusters, "has_clusters", lambda device: True)
    assert not by_clusters.is_chosen(torch.device("cuda"))
    monkeypatch.setenv(by_clusters.SWITCH, "1")
    assert by_clusters.is_chosen(torch.device("cuda"))
    monkeypatch.setattr(by_clusters, "has_clusters", lambda device: False)
    assert not by_clusters.is_chosen(torch.device("cuda"))


@needs_nvrtc
@pytest.mark.parametrize(
    ("tensors", "most", "arch"),
    [
        pytest.param(tensors, most, arch, id=f"{name}-{arch}", marks=[pytest.mark.slow] * (name + arch != "128sm_90a"))
        for name, tensors, most in (
            ("128", step(1, 32, 8, 128), 168),
            ("128-e4m3", step(1, 32, 4, 128, E4M3), 168),
            ("256", step(1, 8, 4, 256), 255),
        )
        for arch in ("sm_90a", "sm_100", "sm_120")
    ],
)
def test_old_keys_are_copied_before_the_wait_and_nothing_is_spilled(tensors: Any, most: int, arch: str) -> None:
    sass = pytest.importorskip("step_code.sass")
    out, k_cache, qkv, rope = (tensors[name] for name in ("out", "k_cache", "qkv", "rope"))
    norms = rope._replace(q_norm=rope.cos_sin, k_norm=rope.cos_sin)
    macros = macros_of(out, k_cache, qkv, norms, AttentionOptions(sinks=rope.cos_sin), stages=1)
    code = sass.Code.of(compiled("decode_attention.cu", macros, arch))
    assert code.stack == 0
    assert code.registers <= most
    early = {code.instructions[place].operation for place in code.reached("ACQBULK")}
    assert "UBLKCP" in early
    operations = [instruction.operation for instruction in code.instructions]
    assert {"ACQBULK", "PREEXIT", "HMMA", "LDSM"} <= set(operations)
    assert operations.index("ACQBULK") < operations.index("PREEXIT")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_agrees_with_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(by_clusters.SWITCH, "1")
    if not by_clusters.is_chosen(torch.device("cuda", 0)):
        pytest.skip("needs a GPU with clusters, and NVRTC")
    Problem(CASES[name], "cuda", 1).check(append_attention_triton)
