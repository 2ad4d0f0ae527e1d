"""What a checkpoint of GPTQ or AWQ stands for as vLLM's functions unpack it, run by an interpreter that has vLLM.

    python tools/unpack_by_vllm.py MODEL OUT

OUT is a file of safetensors with each quantised weight in float32. It imports nothing of this project.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.quantization.auto_awq import _REVERSE_AWQ_PACK_ORDER
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.scalar_type import scalar_types


def main(model: str, out: str) -> None:
    """Write the weights."""
    settings = json.loads((Path(model) / "config.json").read_text())["quantization_config"]
    is_awq, bits = settings["quant_method"] == "awq", settings["bits"]
    kind = {4: scalar_types.uint4, 8: scalar_types.uint8}[bits]
    tensors = load_file(Path(model) / "model.safetensors")
    weights = {}
    for module in (name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")):
        stored, stored_zeros, scales = (tensors[f"{module}.{end}"] for end in ("qweight", "qzeros", "scales"))
        codes = unpack_quantized_values_into_int32(stored, kind, packed_dim=int(is_awq))
        zeros = unpack_quantized_values_into_int32(stored_zeros, kind, packed_dim=1)
        if is_awq:
            codes, zeros = (
                found.unflatten(1, (-1, 8))[..., _REVERSE_AWQ_PACK_ORDER].flatten(1) for found in (codes, zeros)
            )
            groups = torch.arange(len(codes)) // settings["group_size"]
        else:
            zeros = (zeros + (settings["checkpoint_format"] == "gptq")) % 2**bits
            groups = tensors[f"{module}.g_idx"].long()
        weights[f"{module}.weight"] = ((codes - zeros[groups]) * scales.float()[groups]).T.contiguous()
    save_file(weights, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
