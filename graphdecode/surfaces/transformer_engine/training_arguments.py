"""What TransformerEngine's modules take besides: arguments that only training and sharding need."""

from collections.abc import Mapping

_WITHOUT_EFFECT = {  # weights are loaded, and nothing is trained
    "init_method",
    "output_layer_init_method",
    "get_rng_state_tracker",
    "seq_length",
    "micro_batch_size",
    "fuse_wgrad_accumulation",
    "qkv_weight_interleaved",
    "name",
}
_ONLY = {  # what would change the result, or the shape of a weight
    "tp_size": 1,
    "tp_group": None,
    "cp_group": None,
    "attention_type": "self",
    "layer_type": "encoder",
    "drop_path_rate": 0.0,
    "sequence_parallel": False,
    "set_parallel_mode": False,
    "fuse_qkv_params": False,
    "return_bias": False,
    "return_layernorm_output": False,
    "apply_residual_connection_post_layernorm": False,
    "output_layernorm": False,
    "parallel_attention_mlp": False,
}


def check_training_arguments(module: str, given: Mapping[str, object]) -> None:
    """Let pass what changes nothing for inference on one device.

    Raises:
        TypeError: there is no such argument.
        ValueError: an argument asks for something that is not done here.
    """
    for name, value in given.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name not in _ONLY:
            raise TypeError(f"{module} got an unexpected keyword argument {name!r}")
        if value != _ONLY[name]:
            raise ValueError(f"{name} must be {_ONLY[name]!r}, {module} does nothing else here, got {value!r}")
