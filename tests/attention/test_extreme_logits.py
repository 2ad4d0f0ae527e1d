"""Attention of logits of up to a million: exact where the largest are equal, and weights that sum to one.

Keys hold the digits of their logits, which queries put together, so that products are exact in every element type.
"""

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from attention_oracle import Options, attend
from compiled_kernels import compiled

from graphdecode import merge_state, single_decode_with_kv_cache
from graphdecode.kernels.attention.append_attention import append_attention_triton
from graphdecode.kernels.attention.attention_plan import PlanSizes, plan_size, work_items
from graphdecode.kernels.attention.attention_plan import paged_attention_plan_triton as plan_triton
from graphdecode.kernels.attention.attention_records import AttentionOptions, QKNormRope
from graphdecode.kernels.attention.decode_attention import decode_attention_triton
from graphdecode.kernels.attention.extend_attention import extend_attention_triton
from graphdecode.kernels.attention.work_item import SplitPlan
from graphdecode.kernels.cache.kv_format import PageScales
from graphdecode.kernels.native.instructions import available, instructions
from graphdecode.kernels.native.registration import versions

DIM, PAGE, GROUP = 32, 16, 2
UNITS = torch.tensor([1.0, 16.0, 256.0, 4096.0, 16384.0, 32768.0])  # of queries
STEPS = torch.tensor([1.0, 1.0, 1.0, 1.0, 4.0, 32.0])  # of keys: all of them fit into 7 bits and a sign
KINDS = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "bf16-int8": (torch.bfloat16, torch.int8),
    "fp32-int8": (torch.float32, torch.int8),
    "fp16-e4m3": (torch.float16, torch.float8_e4m3fn),
}
# of weights, where these have the elements' type in products, and of outputs
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-18}
WINDOW = 70
OPTIONS = {
    "plain": Options(0.25),
    "sinks": Options(0.25, sinks=torch.zeros(GROUP)),  # as large as the largest logit
    "window": Options(0.25, window_left=WINDOW - 1),
    "chunks": Options(0.25, window_left=WINDOW - 1, is_chunked=True),
    "cap": Options(0.25, soft_cap=1.5e6),
    "negative scale": Options(-0.25),
}
LARGEST = (46341, -1_000_000, -46341, 1_000_000)
INTERPRETED = ("bf16", "fp32-int8")


def keys_of(products: torch.Tensor) -> torch.Tensor:
    """Return keys [n, DIM] of integer products [n] with `QUERY`."""
    digits = (products.abs().long()[:, None] >> 4 * torch.arange(6)) % 16
    return torch.nn.functional.pad(digits * products.sign()[:, None] * STEPS, (0, DIM - 6))


QUERY = torch.nn.functional.pad(UNITS, (0, DIM - 6))


class Row:
    """One row of pages in a shuffled order: logits [n], values [n, DIM]."""

    def __init__(self, logits, values, kind, options, device="cpu"):
        self.q_dtype, kv_dtype = KINDS[kind]
        self.length, self.options, self.device = len(logits), options, device
        count = -(-self.length // PAGE)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.length)).to(torch.int32)
        caches = []
        self.keys, self.values = keys_of((logits / options.sm_scale).round()), values.float()
        for entries in (self.keys, self.values):
            cache = torch.zeros(count + 1, PAGE, 1, DIM)
            for page in range(count):
                part = entries[page * PAGE : (page + 1) * PAGE]
                cache[order[page], : len(part), 0] = part
            caches.append(cache.to(kv_dtype).to(device))
        self.caches, self.table = caches, order[None].to(device)
        ones = [torch.ones(count + 1, 1, PAGE, dtype=torch.bfloat16, device=device) for _ in range(2)]
        self.scales = PageScales(*ones) if kv_dtype == torch.int8 else None

    def expected(self, queries=1):
        q = QUERY.expand(queries, GROUP, DIM)
        return attend(q, self.keys[:, None], self.values[:, None], self.options)[0]

    def options_for(self, is_triton):
        o = self.options
        sinks = None if o.sinks is None else o.sinks.to(self.device)
        arguments = (o.sm_scale, o.window_left, o.soft_cap, sinks, o.is_chunked)
        return (AttentionOptions(*arguments),) if is_triton else arguments

    def of_scales(self, is_triton):
        return (self.scales,) if is_triton else self.scales or (None, None)

    def work(self, is_triton, q_len=1, before=0):
        """Return a plan of splits of 64 keys, and its workspace."""
        items = work_items(1, 6, -(-self.length // 64))
        kv_lens = torch.tensor([self.length], dtype=torch.int32, device=self.device)
        plan = torch.zeros(plan_size(items), dtype=torch.int32, device=self.device)
        if is_triton:
            indptr = torch.tensor([0, self.table.shape[1]], dtype=torch.int32, device=self.device)
            last = torch.tensor([(self.length - 1) % PAGE + 1], dtype=torch.int32, device=self.device)
            plan_triton(kv_lens, plan, indptr, last, PlanSizes(6, 64, self.options.window_left, PAGE, q_len))
        work = (
            kv_lens, plan, torch.full((items, q_len, GROUP, DIM), math.nan, device=self.device),
            torch.full((items, q_len, GROUP, 2), math.nan, device=self.device),
            torch.zeros(q_len * GROUP, dtype=torch.int32, device=self.device),
        )  # fmt: skip
        return items, (SplitPlan(*work),) if is_triton else work


def launch(name, version, *arguments):
    """Call one version of an operator."""
    if version == "triton":
        triton = {"decode": decode_attention_triton, "extend": extend_attention_triton}
        triton.get(name, append_attention_triton)(*arguments)
        return
    done = getattr(versions(f"{name}_attention"), version)(*arguments)
    if version == "native":
        done()


def attended(path, version, row, queries):
    """Return what a version of an operator makes of a row's newest queries, which are all the same."""
    is_triton = version == "triton"
    q = QUERY.expand(queries, GROUP, DIM).to(row.q_dtype).to(row.device).contiguous()
    out = torch.full_like(q, math.nan)
    options, scales = row.options_for(is_triton), row.of_scales(is_triton)
    if path == "extend":
        cumulative = [torch.tensor([0, n], dtype=torch.int32, device=row.device) for n in (queries, row.length)]
        launch(path, version, out, None, q, *row.caches, *cumulative, row.table, *options, 1.0, *scales)
        return out
    items, work = row.work(is_triton, queries)
    if path == "decode":
        positions = ("NONE", 1.0, 1e4)
        positions = (positions,) if is_triton else positions
        launch(
            path, version, out, None, q, *row.caches, row.table, None, *work, queries, items, *options, 1.0,
            *positions, *scales,
        )  # fmt: skip
        return out
    qkv = torch.cat([QUERY.repeat(GROUP), row.keys[-1], row.values[-1]])[None].to(row.q_dtype).to(row.device)
    cos_sin = torch.tensor([1.0, 0.0], device=row.device).expand(row.length, 2)[..., None].contiguous()
    rope = QKNormRope(cos_sin)
    rope = (rope,) if is_triton else rope
    launch(path, version, out, *row.caches, qkv, row.table, *work, *rope, items, *options, 1.0, 1.0, *scales)
    return out


def equal_largest(largest, length, queries, kind, options, device):
    """Return a row of which every query sees as many equal logits as are a power of 2, with the sink; others are far
    below, or larger and behind the window."""
    draw = torch.Generator().manual_seed(length)
    options = replace(options, sinks=None if options.sinks is None else torch.full((GROUP,), float(largest)))
    count = (4 if length > 8 else 2) - (options.sinks is not None)
    logits = torch.full((length,), largest - 2000.0)
    begin = (length - 1) // WINDOW * WINDOW if options.window_left >= 0 else 0
    if begin:
        logits[: min(begin, length - queries - WINDOW + 1)] = largest + 1000.0
    logits[begin + torch.randperm(length - queries + 1 - begin, generator=draw)[:count]] = float(largest)
    return Row(logits, torch.randint(0, 4, (length, DIM), generator=draw), kind, options, device)


def near_largest(largest, length, kind, options, device):
    """Return a row of logits next to the largest; the first channel of the values is 1."""
    draw = torch.Generator().manual_seed(length)
    logits = largest - torch.randint(0, 24, (length,), generator=draw) / 4
    values = torch.randint(0, 2, (length, DIM), generator=draw)
    values[:, 0] = 1
    return Row(logits, values, kind, options, device)


def cases():
    """Every version of every operator with every option and element type, of which Triton's interpreter takes two."""
    for path in ("decode", "extend", "append"):
        for version in ("torch", "triton", "native"):
            for kind in KINDS:
                # new keys of 8 bits are rounded; decode attention has those that are not
                if path == "append" and KINDS[kind][1].itemsize == 1:
                    continue
                if version == "triton" and kind not in INTERPRETED:
                    continue
                marks = [compiled] if version == "native" else []
                yield pytest.param(path, version, kind, marks=marks, id=f"{path}-{version}-{kind}")


CASES = list(cases())


@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize(("path", "version", "kind"), CASES)
def test_equal_largest_logits_have_equal_weights(path, version, kind, options, device):
    shapes = ((140, 3),) if version == "triton" else ((2, 1), (40, 1), (140, 3), (1100, 20), (1100, 1))
    for largest in LARGEST if version == "native" else LARGEST[-2:]:
        for length, queries in shapes:
            queries = 1 if path == "append" else queries
            where = device if version == "triton" else "cpu"
            row = equal_largest(largest, length, queries, kind, OPTIONS[options], where)
            out = attended(path, version, row, queries)
            expected = row.expected(queries)
            close = 2.0**-20 if row.q_dtype == torch.float32 else 0.0  # of a division
            torch.testing.assert_close(out.double().cpu(), expected, atol=close, rtol=close)


@pytest.mark.parametrize("options", ["plain", "sinks", "cap", "negative scale"])
@pytest.mark.parametrize(("path", "version", "kind"), CASES)
def test_weights_are_those_of_rounded_logits_and_sum_to_one(path, version, kind, options, device):
    for largest in (1e6,) if version == "triton" else LARGEST:
        length = 70 if version == "triton" else 600
        row = near_largest(largest, length, kind, OPTIONS[options], device if version == "triton" else "cpu")
        out, expected = attended(path, version, row, 1).double().cpu(), row.expected()
        rounding = ROUNDING[row.q_dtype] + (2.0**-10 if KINDS[kind][1].itemsize == 1 else 0.0)
        of_logits = math.expm1(8 * 2.0**-24 * abs(largest))  # of a logit, and of the largest: two each
        torch.testing.assert_close(out, expected, atol=rounding + of_logits, rtol=0.0)
        if row.options.sinks is None:
            torch.testing.assert_close(out[..., 0], torch.ones_like(out[..., 0]), atol=rounding, rtol=0.0)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
def test_a_mean_of_ones_is_one(kind):
    dtype = KINDS[kind][0]
    keys = keys_of(torch.full((2,), -46341.0 * 4)).to(dtype)[:, None]
    out, lse = single_decode_with_kv_cache(
        QUERY.expand(GROUP, DIM).to(dtype), keys, torch.ones_like(keys), sm_scale=0.25, return_lse=True
    )
    assert torch.equal(out, torch.ones_like(out))
    torch.testing.assert_close(lse, torch.full((GROUP,), -46341 / math.log(2.0) + 1), rtol=2.0**-23, atol=0.0)


@pytest.mark.parametrize("largest", LARGEST)
def test_states_of_equal_log_sums_are_merged_by_halves(largest):
    v, s = torch.tensor([[[1.0, 3.0]], [[2.0, 0.0]]]), torch.full((2, 1), float(largest))
    out, log_sum = merge_state(v[:1], s[:1], v[1:], s[1:])
    assert torch.equal(out, torch.tensor([[[1.5, 1.5]]]))
    torch.testing.assert_close(log_sum, s[:1] + 1)


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("name", [name for name in available() if name != instructions().name])
def test_so_it_is_with_every_set_of_instructions(name):
    if "GRAPHDECODE_ISA" in os.environ:
        pytest.skip("one set was chosen")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "native", __file__],
        env={**os.environ, "GRAPHDECODE_ISA": name}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
