"""The originals' signatures of today, parameter by parameter: the same name and default, or a line that says why not.

`signatures.json` is data: `tools/make signatures` makes it anew from the originals' wheels.
"""

import inspect
import json
from pathlib import Path

import pytest

import graphdecode
from graphdecode import decode, mla

SIGNATURES = json.loads(Path(__file__).with_name("signatures.json").read_text())
_TRAINING = "of training, or of several devices: a decode runtime has neither"

# function -> why it is not here
NOT_OFFERED = {
    "BatchDecodeWithPagedKVCacheWrapper.use_tensor_cores": "an attribute",
    "BatchDecodeWithPagedKVCacheWrapper.is_cuda_graph_enabled": "an attribute",
    "BatchDecodeWithPagedKVCacheWrapper.resolved_backend": "there are no backends to choose from",
    "BatchDecodeWithPagedKVCacheWrapper.prewarm_paged_kv_stride_variant": "strides are arguments of the kernels",
    "MultiLevelCascadeAttentionWrapper.is_cuda_graph_enabled": "an attribute",
    "MultiLevelCascadeAttentionWrapper.prewarm_paged_kv_stride_variant": "strides are arguments of the kernels",
    "PagedKVCacheManager.allocate_page": "pages follow from `pre_step` alone",
    "PagedKVCacheManager.allocate_sequence": "pages follow from `pre_step` alone",
    "PagedKVCacheManager.deallocate_sequence": "pages follow from `pre_step` alone",
    "DotProductAttention.set_context_parallel_group": _TRAINING,
    "DotProductAttention.init_fp8_metadata": _TRAINING,
    "DotProductAttention.get_qkv_quantization_capabilities": _TRAINING,
    "DotProductAttention.set_meta_tensor": _TRAINING,
    "DotProductAttention.get_quantizer_roles": _TRAINING,
    "MultiheadAttention.fast_setattr": "attributes are set as those of any module",
    "MultiheadAttention.set_tensor_parallel_group": _TRAINING,
    "MultiheadAttention.set_context_parallel_group": _TRAINING,
    "TransformerLayer.fast_setattr": "attributes are set as those of any module",
    "TransformerLayer.set_tensor_parallel_group": _TRAINING,
    "TransformerLayer.reset_fp8_meta_tensors": _TRAINING,
    "TransformerLayer.set_context_parallel_group": _TRAINING,
}
# (function, parameter) -> why it has another default
OTHER_DEFAULTS = {
    ("BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer", "int_workspace_buffer"): "it has no effect",
    ("InferenceParams.step", "qkv_format"): "that of the constructor is the default",
    ("SlotKVCacheManager.from_config", "actual_num_key_value_heads"): "the published num_kv_head may stand in for it",
    ("MultiheadAttention.__init__", "device"): "None is CUDA where there is one, else the CPU",
    ("TransformerLayer.__init__", "device"): "None is CUDA where there is one, else the CPU",
}
OURS = {  # theirs -> ours, where the names differ
    "BatchDecodeWithPagedKVCacheWrapper._plan_impl": "BatchDecodeWithPagedKVCacheWrapper.plan",
    "optimum_neuron KVCacheManager.__init__": "SlotKVCacheManager.from_config",
}


def _rows():
    for package, functions in SIGNATURES.items():
        for name, parameters in functions.items():
            is_slots = package.startswith("optimum_neuron")
            default = name.replace("KVCacheManager", "SlotKVCacheManager") if is_slots else name
            ours = OURS.get(f"optimum_neuron {name}" if is_slots else name, default)
            yield pytest.param(ours, parameters, id=f"{package.split()[0]} {name}")


def _found(name):
    """Return what a name means here; None: nothing."""
    owner, _, method = name.partition(".")
    places = (graphdecode, decode, mla)
    found = next((getattr(place, owner) for place in places if hasattr(place, owner)), None)
    if found is None or not method:
        return found
    found = inspect.getattr_static(found, method, None)
    return getattr(found, "__func__", found)


@pytest.mark.parametrize(("name", "parameters"), list(_rows()))
def test_each_parameter_of_the_original_is_here_with_its_default(name, parameters):
    found = _found(name)
    if found is None or not callable(found):
        assert name in NOT_OFFERED, f"{name} is missing, and no line says why"
        return
    assert name not in NOT_OFFERED, f"{name} is here: its line can go"
    ours = inspect.signature(found).parameters
    for text in parameters:
        parameter, _, default = text.partition("=")
        if parameter.startswith("*"):
            continue
        assert parameter in ours, f"{name} has no {parameter}"
        same = (
            ours[parameter].default is inspect.Parameter.empty
            if not default
            else (repr(ours[parameter].default) == default)
        )
        assert same != ((name, parameter) in OTHER_DEFAULTS), f"{parameter} of {name}"


def test_each_line_is_about_a_function_of_an_original():
    known = {name for functions in SIGNATURES.values() for name in functions} | set(OURS.values())
    assert set(NOT_OFFERED) | {name for name, _ in OTHER_DEFAULTS} <= known
