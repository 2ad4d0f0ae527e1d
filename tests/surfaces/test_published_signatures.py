"""Calls as older versions and published examples make them, and an example of each public name in the document."""

import inspect
import re
from pathlib import Path

import pytest

import graphdecode
from graphdecode import BatchDecodeWithPagedKVCacheWrapper, InferenceParams, SlotKVCacheManager
from graphdecode.surfaces import flashinfer, optimum_neuron, transformer_engine

Wrapper = graphdecode.BatchDecodeWithPagedKVCacheWrapper

# positional parameters of older versions, or of methods that those of today make of others: with a default where `=` is
OLDER = {
    Wrapper.plan: (
        "indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode=, "
        "window_left=, logits_soft_cap=, q_data_type=, kv_data_type=, data_type=, sm_scale=, rope_scale=, rope_theta=, "
        "non_blocking="
    ),
    Wrapper.run: "q, paged_kv_cache, q_scale=, k_scale=, v_scale=, return_lse=",
    Wrapper.run_return_lse: "q, paged_kv_cache, q_scale=, k_scale=, v_scale=",
    SlotKVCacheManager.update_cache: (
        "is_for_context_encoding, seq_ids, position_ids, new_key_values, seq_len, scatter_index=, active_mask=, "
        "kvcache_buffer="
    ),
}


@pytest.mark.parametrize("function", OLDER, ids=lambda function: function.__name__)
def test_a_call_with_positional_arguments_of_older_versions_means_the_same_here(function):
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    order = [f"{each.name}{'' if each.default is each.empty else '='}" for each in parameters]
    published = OLDER[function].split(", ")
    assert order[: len(published)] == published
    assert all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters[: len(published)])


def test_the_decode_module_has_its_path():
    from graphdecode import decode
    from graphdecode.decode import BatchDecodeWithPagedKVCacheWrapper

    assert graphdecode.decode is decode
    assert BatchDecodeWithPagedKVCacheWrapper is Wrapper
    assert decode.single_decode_with_kv_cache is graphdecode.single_decode_with_kv_cache
    assert issubclass(decode.CUDAGraphBatchDecodeWithPagedKVCacheWrapper, Wrapper)


DECODE_WRAPPER = """
num_layers = 32
num_qo_heads = 64
num_kv_heads = 8
head_dim = 128
max_num_pages = 128
page_size = 16
# allocate 128MB workspace buffer
workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device="cuda:0")
decode_wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
    workspace_buffer, "NHD"
)
batch_size = 7
kv_page_indices = torch.arange(max_num_pages).int().to("cuda:0")
kv_page_indptr = torch.tensor(
    [0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32, device="cuda:0"
)
# 1 <= kv_last_page_len <= page_size
kv_last_page_len = torch.tensor(
    [1, 7, 14, 4, 3, 1, 16], dtype=torch.int32, device="cuda:0"
)
kv_cache_at_layer = [
    torch.randn(
        max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16, device="cuda:0"
    ) for _ in range(num_layers)
]
# create auxiliary data structures for batch decode attention
decode_wrapper.plan(
    kv_page_indptr,
    kv_page_indices,
    kv_last_page_len,
    num_qo_heads,
    num_kv_heads,
    head_dim,
    page_size,
    pos_encoding_mode="NONE",
    data_type=torch.float16
)
outputs = []
for i in range(num_layers):
    q = torch.randn(batch_size, num_qo_heads, head_dim).half().to("cuda:0")
    kv_cache = kv_cache_at_layer[i]
    # compute batch decode attention, reuse auxiliary data structures for all layers
    o = decode_wrapper.run(q, kv_cache)
    outputs.append(o)
"""

CACHED_LAYER = """
inference_params = InferenceParams(
    max_batch_size=2, max_sequence_length=32, num_heads_kv=2, head_dim_k=16, dtype=torch.float32, qkv_format="thd",
    max_ctx_len=8, is_paged=True, page_size=8, total_num_pages=8,
)
for step_dict in (OrderedDict([(0, 5), (1, 3)]), OrderedDict([(0, 1), (1, 1)]), OrderedDict([(1, 1)])):
    inference_params.pre_step(step_dict)
    tokens = sum(step_dict.values())
    new_k, new_v = torch.randn(2, tokens, 2, 16)
    for layer_number in (1, 2):
        if layer_number not in inference_params.cache_manager.cache:
            inference_params.allocate_memory(layer_number)
        k_cache, v_cache, cu_seqlens_q, cu_seqlens_kv, max_sequence_length, qkv_format = inference_params.step(
            layer_number, new_k, new_v, "thd"
        )
"""


@pytest.mark.parametrize("line", ["import graphdecode as flashinfer", "from graphdecode import decode as flashinfer"])
def test_the_decode_wrappers_example(line, device):
    layers = 32 if device == "cuda" else 2
    text = DECODE_WRAPPER.replace("cuda:0", device).replace("num_layers = 32", f"num_layers = {layers}")
    scope = {}
    exec(f"import torch\n{line}\n{text}", scope)
    assert len(scope["outputs"]) == layers
    assert scope["outputs"][0].shape == (7, 64, 128)
    assert all(out.isfinite().all() for out in scope["outputs"])


@pytest.mark.parametrize("module", ["graphdecode", "graphdecode.surfaces.transformer_engine"])
def test_the_pattern_of_pre_step_and_step(module):
    scope = {}
    line = f"import torch\nfrom collections import OrderedDict\nfrom {module} import InferenceParams\n"
    exec(line + CACHED_LAYER, scope)
    assert scope["qkv_format"] == "thd_2bshd"
    assert scope["cu_seqlens_kv"].tolist() == [0, 5, 5]


TEXT = (Path(__file__).parents[2] / "docs" / "surfaces.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_each_public_name_has_an_example():
    names = {*flashinfer.__all__, *optimum_neuron.__all__, *transformer_engine.__all__}
    names |= {"append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"}
    names |= {"merge_state", "merge_state_in_place", "merge_states"}
    names -= {"NonPagedKVCacheManager", "PagedKVCacheManager"}  # `InferenceParams` makes them
    for surface in (InferenceParams, SlotKVCacheManager, BatchDecodeWithPagedKVCacheWrapper):
        names |= {name for name, verb in vars(surface).items() if callable(verb) and not name.startswith("_")}
    assert not [name for name in sorted(names) if not any(name in text for text in EXAMPLES)]
