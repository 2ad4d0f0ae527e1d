"""Arguments of any type at the surfaces: refused in plain words before anything changed, and layouts of any strides."""

from collections import OrderedDict
from typing import Any

import pytest
import torch

from graphdecode import (
    BatchDecodeWithPagedKVCacheWrapper,
    InferenceParams,
    SlotKVCacheManager,
    append_paged_kv_cache,
    merge_states,
    single_decode_with_kv_cache,
)

HOSTILE: list[Any] = ["a", 1.5, [0], {"a": 1}, object()]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_pages_of_one_token_are_read_by_head_whatever_their_stride_of_a_token() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 3, 2, 1, 16)  # HND: as an NHD view the stride of a token is that of a head
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 16), "HND")
    wrapper.plan(int32(0, 3), int32(0, 1, 2), int32(1), 2, 2, 16, 1, q_data_type=torch.float32)
    q = torch.randn(1, 2, 16)
    weights = (keys[:, :, 0] * q).sum(-1).div(4).softmax(0)  # [tokens, heads]
    torch.testing.assert_close(wrapper.run(q, (keys, values))[0], (weights[..., None] * values[:, :, 0]).sum(0))


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("name", ["seq_ids", "position_ids", "new_key_values", "active_mask", "kvcache_buffer"])
def test_the_slot_cache_refuses_other_types(name: str, value: Any) -> None:
    cache = SlotKVCacheManager(1, 2, 1, 4, 2, torch.float32, device="cpu")
    good: dict[str, Any] = {
        "is_for_context_encoding": False, "seq_ids": int32(0), "position_ids": int32(1)[None], "seq_len": 4,
        "new_key_values": [[torch.ones(1, 1, 1, 2)] * 2],
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"{name} must"):
        cache.update_cache(**good | {name: value})
    assert not any(tensor.any() for tensor in cache.past_key_values)


def test_the_slot_cache_refuses_indices_on_another_device() -> None:
    cache = SlotKVCacheManager(1, 2, 1, 4, 2, torch.float32, device="cpu")
    new = [[torch.ones(1, 1, 1, 2)] * 2]
    with pytest.raises(ValueError, match="seq_ids must be on cpu"):
        cache.update_cache(False, int32(0).to("meta"), int32(1)[None], new, 4)


@pytest.mark.parametrize("value", HOSTILE)
def test_transformer_engines_cache_refuses_other_types(value: Any) -> None:
    params = InferenceParams(2, 8, 1, 2, torch.float32, is_paged=True, total_num_pages=4, page_size=2, device="cpu")
    params.allocate_memory(1)
    params.pre_step(OrderedDict(a=1))
    keys = torch.ones(1, 1, 1, 2)
    for name in ("layer_number", "new_k", "new_v", "qkv_format"):
        arguments = {"layer_number": 1, "new_k": keys, "new_v": keys, "qkv_format": "bshd", name: value}
        with pytest.raises(ValueError, match="must|no memory"):
            params.step(**arguments)
    with pytest.raises(ValueError, match="must"):
        params.pre_step(value if not isinstance(value, dict) else {"a": value})
    with pytest.raises(ValueError, match="must|no memory"):
        params.convert_paged_to_nonpaged(value)
    assert params.sequences == {"a": 1}


@pytest.mark.parametrize("value", HOSTILE)
def test_flashinfers_surface_refuses_other_types(value: Any) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 16))
    plan: dict[str, Any] = {
        "indptr": int32(0, 1), "indices": int32(0), "last_page_len": int32(1), "num_qo_heads": 1, "num_kv_heads": 1,
        "head_dim": 16, "page_size": 1, "q_data_type": torch.float32,
    }  # fmt: skip
    for name in (*plan, "window_left", "logits_soft_cap", "sm_scale", "rope_scale", "q_len_per_req"):
        if not (value == 1.5 and name in ("logits_soft_cap", "sm_scale", "rope_scale")):
            with pytest.raises(ValueError, match="must"):
                wrapper.plan(**plan | {name: value})
    wrapper.plan(**plan)
    q, cache = torch.ones(1, 1, 16), torch.ones(1, 1, 1, 16)
    run: dict[str, Any] = {"q": q, "paged_kv_cache": (cache, cache)}
    for name in ("q", "paged_kv_cache", "out", "lse"):
        with pytest.raises(ValueError, match="must"):
            wrapper.run(**run | {name: value})
    with pytest.raises(ValueError, match="must"):
        single_decode_with_kv_cache(q[0], value, cache[0])
    with pytest.raises(ValueError, match="must"):
        merge_states(value, torch.ones(1, 1, 1))
    with pytest.raises(ValueError, match="must"):
        append_paged_kv_cache(value, q, int32(0), int32(0), (cache, cache), int32(0), int32(0, 1), int32(1))


def test_pages_that_there_are_not_are_neither_written_nor_read() -> None:
    q, cache = torch.ones(1, 1, 16), torch.zeros(2, 1, 1, 16)
    for pages in (int32(-1), int32(2), int32()):
        append_paged_kv_cache(q, q, int32(0), int32(0), (cache, cache), pages, int32(0, 1), int32(1))
        assert not cache.any()
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 16))
    for pages in (int32(-1, 0), int32(7, 0), int32(0, 2)):
        wrapper.plan(int32(0, 2), pages, int32(1), 1, 1, 16, 1, q_data_type=torch.float32)
        with pytest.raises(ValueError, match=r"pages must be in 0\.\.1"):
            wrapper.run(q, (cache, cache))
