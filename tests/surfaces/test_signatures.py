"""The originals' signatures of today: the same names, order and defaults, or a line that says why not.

`signatures.ini` is data: `tools/make signatures` makes it anew from the originals' wheels.
"""

import ast
import inspect
from configparser import ConfigParser
from pathlib import Path

import pytest

import graphdecode
from graphdecode import decode, mla

SIGNATURES = ConfigParser(delimiters=(":",), interpolation=None)
SIGNATURES.optionxform = str
SIGNATURES.read(Path(__file__).with_name("signatures.ini"))
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
OTHER_ORDER = {"SlotKVCacheManager.update_cache": "that of an older version, where scatter_index is sixth"}
OURS = {  # theirs -> ours, where the names differ
    "BatchDecodeWithPagedKVCacheWrapper._plan_impl": "BatchDecodeWithPagedKVCacheWrapper.plan",
    "optimum_neuron KVCacheManager.__init__": "SlotKVCacheManager.from_config",
}


def _rows():
    for package in SIGNATURES.sections():
        for name, parameters in SIGNATURES[package].items():
            is_slots = package.startswith("optimum_neuron")
            default = name.replace("KVCacheManager", "SlotKVCacheManager") if is_slots else name
            ours = OURS.get(f"optimum_neuron {name}" if is_slots else name, default)
            yield pytest.param(ours, parameters, id=f"{package.split()[0]} {name}")


def _function_of(name):
    """Return what a name means here; None: nothing."""
    owner, _, method = name.partition(".")
    owner = next((getattr(module, owner) for module in (graphdecode, decode, mla) if hasattr(module, owner)), None)
    if owner is None or not method:
        return owner
    function = inspect.getattr_static(owner, method, None)
    return getattr(function, "__func__", function)


def _parameters_of(text):
    """Return the positional parameters of a published signature, and all of them with their defaults' text."""
    arguments = ast.parse(f"def published({text}): pass").body[0].args
    positional = [each.arg for each in arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults + arguments.kw_defaults
    names = [*positional, *(each.arg for each in arguments.kwonlyargs)]
    return positional, {name: default and ast.unparse(default) for name, default in zip(names, defaults, strict=True)}


@pytest.mark.parametrize(("name", "text"), list(_rows()))
def test_each_parameter_of_the_original_is_here_in_its_order_with_its_default(name, text):
    function = _function_of(name)
    if function is None or not callable(function):
        assert name in NOT_OFFERED, f"{name} is missing, and no line says why"
        return
    assert name not in NOT_OFFERED, f"{name} is here: its line can go"
    ours = inspect.signature(function).parameters
    positional, defaults = _parameters_of(text)
    for parameter, default in defaults.items():
        assert parameter in ours, f"{name} has no {parameter}"
        empty = ours[parameter].default is inspect.Parameter.empty
        same = empty if default is None else repr(ours[parameter].default) == default
        assert same != ((name, parameter) in OTHER_DEFAULTS), f"{parameter} of {name}"
    order = [each.name for each in ours.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    if "self" not in positional:
        order = [each for each in order if each not in ("self", "cls")]
    assert (order[: len(positional)] == positional) != (name in OTHER_ORDER), f"positional parameters of {name}"
    more = [each for each in ours.values() if each.name not in {*defaults, "self", "cls"}]
    assert all(each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in more)


def test_each_line_is_about_a_function_of_an_original():
    published = {name for package in SIGNATURES.sections() for name in SIGNATURES[package]} | set(OURS.values())
    assert set(NOT_OFFERED) | {name for name, _ in OTHER_DEFAULTS} <= published
