"""The published examples, with the import line and the device changed and nothing else."""

import pytest

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
