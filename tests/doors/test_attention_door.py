"""A variant of attention touches six files: the configuration, a family, the record, and what computes with it."""

from pathlib import Path

import pytest
from changed_copy import changed_copy, run_copy

# a toy: a number is added to the logits of keys, but to no sink; file -> what stands there once, and what it becomes
TOY = {
    "graphdecode/models/config.py": [
        ("    attention_soft_cap: float = 0.0  #", "    lift: float = 0.0\n    attention_soft_cap: float = 0.0  #"),
        ("is_chunked=is_chunked)\n", "is_chunked=is_chunked, lift=self.lift)\n"),
    ],
    "graphdecode/models/families/llama.py": [
        ('fields["windows"] =', 'fields["lift"] = settings.get("lift", 0.0)\n        fields["windows"] =')
    ],
    "kernels/attention/attention_records.py": [
        ("    sinks: Float32 | None = None\n", "    sinks: Float32 | None = None\n    lift: float = 0.0\n"),
        ("    HAS_CAP: bool  # whether", "    HAS_LIFT: bool\n    HAS_CAP: bool  # whether"),
        ("        HAS_CAP=", "        HAS_LIFT=options.lift != 0.0,\n        HAS_CAP="),
    ],
    "kernels/attention/attention_tile.py": [
        (
            "    return scores\n",
            "    return scores + logits.options.lift * 1.4426950408889634 if META.HAS_LIFT else scores\n",
        )
    ],
    "kernels/attention/attention_torch.py": [
        ("options.logits_soft_cap <= 0.0 and ", "options.logits_soft_cap <= 0.0 and options.lift == 0.0 and "),
        (
            '    if positions.position_mode == "ALIBI":\n',
            '    logits += options.lift\n    if positions.position_mode == "ALIBI":\n',
        ),
    ],
    "kernels/attention/attention_pages.h": [
        (
            "    float scale, cap;\n    int64_t window, is_chunked;\n",
            "    float scale, cap;\n    int64_t window, is_chunked;\n    float lift;\n",
        ),
        ("options->is_chunked};", "options->is_chunked, (float)options->lift};"),
        ("return of.cap > 0.0f || ", "return of.cap > 0.0f || of.lift != 0.0f || "),
        ("return products * of.scale;", "return products * of.scale + of.lift;"),
        ("(of.scale / of.cap));", "(of.scale / of.cap)) + of.lift;"),
    ],
}
CHECK = """
import torch
from graphdecode.kernels.attention import append_attention, extend_attention
from graphdecode.kernels.native.registration import versions
from graphdecode.models.families.llama import Llama

settings = dict(vocab_size=9, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, max_position_embeddings=64, head_dim=32)
for lift in (0.0, 3.0):
    options = Llama().config(settings | {"lift": lift}).attention_options(0).scaled(32)
    for cap, dtype in ((0.0, torch.float32), (2.0, torch.float32), (0.0, torch.bfloat16), (2.0, torch.bfloat16)):
        sinks, cache = torch.tensor([1.0, -1.0]), torch.randn(3, 16, 1, 32).to(dtype)
        given = options._replace(logits_soft_cap=cap, sinks=sinks)
        q = torch.randn(20, 2, 32).to(dtype)
        logits = torch.einsum("qhd,kd->hqk", q.double(), cache[:2].double().view(32, 32)[:20]) * options.sm_scale
        logits = (cap * torch.tanh(logits / cap) if cap else logits) + lift
        logits = logits.masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
        weights = torch.cat([logits, sinks.double().view(2, 1, 1).expand(2, 20, 1)], -1).softmax(-1)[..., :-1]
        expected = torch.einsum("hqk,kd->qhd", weights, cache[:2].double().view(32, 32)[:20])
        ends, table = torch.tensor([0, 20], dtype=torch.int32), torch.tensor([[0, 1]], dtype=torch.int32)
        extend, append = (versions(f"{name}_attention") for name in ("extend", "append"))
        plan = torch.tensor([1, 0, 0, 0, 0, 0, 1, 20], dtype=torch.int32)
        turn = torch.stack([torch.ones(64, 4), torch.zeros(64, 4)], 1)
        qkv = torch.cat([q[-1].flatten(), *cache[1, 3], *cache[1, 3]]).unsqueeze(0)
        workspace = torch.zeros(1, 1, 2, 32), torch.zeros(1, 1, 2), torch.zeros(2, dtype=torch.int32)
        for run in ("torch", "native", *(["triton"] if dtype == torch.float32 else [])):  # as it is interpreted
            many, one = torch.zeros_like(q), torch.zeros_like(q[-1:])
            many_given = (many, None, q, cache, cache, ends, ends, table, *given, 1.0, None, None)
            caches = (cache.clone(), cache.clone())
            one_given = (one, *caches, qkv, table, ends[1:], plan, *workspace, turn, None, None, 0.0, 1, *given)
            for version, arguments in ((extend, many_given), (append, (*one_given, 1.0, 1.0, None, None))):
                call = getattr(version, run)(*arguments)
                call and call()
            close = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(many.double(), expected, atol=close, rtol=close)
            torch.testing.assert_close(one.double(), expected[-1:], atol=close, rtol=close)
"""


@pytest.mark.slow
def test_a_variant_of_attention_touches_six_files(tmp_path: Path) -> None:
    changed_copy(tmp_path, TOY)
    run_copy(tmp_path, "-c", CHECK, GRAPHDECODE_CACHE_DIR=str(tmp_path / "cache"), TRITON_INTERPRET="1")
