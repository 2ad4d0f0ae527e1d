"""Write a checkpoint in nf4 by bitsandbytes, and what that stands for, run by an interpreter that has it.

    python tools/write_nf4.py PLAIN OUT UNDONE [--nested]

UNDONE has in float32 what bitsandbytes' own functions undo the weights to. It imports nothing of this project.
"""

import json
import shutil
import sys
from pathlib import Path

import bitsandbytes
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

MODEL_FILE = "model.safetensors"


def main(plain: str, out: str, undone: str, is_nested: bool) -> None:
    """Write both folders."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=is_nested)
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, dtype=torch.bfloat16)
    rest = shutil.ignore_patterns(MODEL_FILE)
    shutil.copytree(plain, out, ignore=rest)
    model.save_pretrained(out)
    shutil.copytree(plain, undone, ignore=rest)
    tensors = load_file(Path(plain) / MODEL_FILE)
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            state.dtype = torch.float32  # else what is undone is rounded once more
            tensors[f"{name}.weight"] = bitsandbytes.functional.dequantize_4bit(module.weight.data, state)
    save_file(tensors, Path(undone) / MODEL_FILE, metadata={"format": "pt"})
    print(json.dumps({"out": out, "undone": undone}))


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "--nested"]
    main(*given, is_nested="--nested" in sys.argv)
