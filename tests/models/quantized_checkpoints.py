"""Small checkpoints in each quantized form, and the plain ones that they stand for, from the definitions of the forms.

What stands for what is computed here in float64 and rounded once to float32; nothing of the package is used for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from family_checkpoints import edit_config, save_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

PRODUCTS = ("proj.weight", "w1.weight", "w2.weight", "w3.weight")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs of eight, from an int32's lowest bits on
NF4 = (
    "-1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334 "
    "-0.09105003625154495 0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224 "
    "0.44070982933044434 0.5626170039176941 0.7229568362236023 1"
)


class Written(NamedTuple):
    """One weight: its tensors in the quantized form by what their names end with, and what it stands for in float64."""

    tensors: dict[str, Tensor]
    stands_for: Tensor


class Form(NamedTuple):
    """A form of checkpoints."""

    settings: dict[str, Any]  # of quantization_config
    write: Callable[[Tensor], Written]


def packed_words(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Return codes in int32, the first in the lowest bits, along a dimension."""
    codes = codes.long().movedim(dim, -1)
    words = codes.unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    return words.sum(-1).to(torch.uint32).view(torch.int32).movedim(-1, dim).contiguous()


def affine(weight: Tensor, bits: int, size: int, *, is_symmetric: bool, groups: Tensor | None = None) -> tuple:
    """Return codes [out, in], float16 scales and zeros [out, groups], and what they stand for."""
    groups = torch.arange(weight.shape[1]) // size if groups is None else groups
    count = int(groups.max()) + 1
    low = torch.stack([weight[:, groups == group].amin(1) for group in range(count)], 1).clamp(max=0)
    high = torch.stack([weight[:, groups == group].amax(1) for group in range(count)], 1).clamp(min=0)
    if is_symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / (2**bits - 1)).clamp(min=1e-4).half()
    zeros = torch.full_like(scales, 2 ** (bits - 1)) if is_symmetric else (-low / scales.float()).round()
    zeros = zeros.clamp(0, 2**bits - 1).double()
    codes = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, 2**bits - 1)
    return codes.long(), scales, zeros.long(), (codes - zeros[:, groups]) * scales.double()[:, groups]


def gptq(bits: int, size: int, *, is_symmetric: bool, desc_act: bool = False, version: str = "gptq") -> Form:
    """Return what AutoGPTQ writes; in its first version zero points are stored less one."""

    def write(weight: Tensor) -> Written:
        columns = weight.shape[1]
        groups = torch.arange(columns) // size
        if desc_act:
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        codes, scales, zeros, meant = affine(weight, bits, size, is_symmetric=is_symmetric, groups=groups)
        stored = (zeros - 1) % 2**bits if version == "gptq" else zeros
        tensors = {"qweight": packed_words(codes.T, bits, 0), "qzeros": packed_words(stored.T, bits, 1)}
        tensors |= {"scales": scales.T.contiguous(), "g_idx": groups.int()}
        return Written(tensors | {"bias": torch.zeros(len(weight), dtype=torch.float16)}, meant)

    settings = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": desc_act, "sym": is_symmetric}
    return Form(settings | {"checkpoint_format": version}, write)


def awq(size: int) -> Form:
    """Return what AutoAWQ writes."""

    def interleaved(codes: Tensor) -> Tensor:
        return packed_words(codes.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4, 1)

    def write(weight: Tensor) -> Written:
        codes, scales, zeros, meant = affine(weight, 4, size, is_symmetric=False)
        tensors = {"qweight": interleaved(codes.T), "qzeros": interleaved(zeros.T), "scales": scales.T.contiguous()}
        return Written(tensors, meant)

    settings = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    return Form(settings, write)


def compressed(format_name: str, *, activations: dict[str, Any] | None = None, **weights: Any) -> Form:
    """Return what compressed-tensors' own compressor writes, and what its own decompressor makes of that."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    args, compressor = scheme.weights, BaseCompressor.get_value_from_registry(format_name)

    def write(weight: Tensor) -> Written:
        rows, columns = weight.shape
        height, width = {
            "tensor": (rows, columns),
            "channel": (1, columns),
            "group": (1, args.group_size or 0),
            "block": args.block_structure or (0, 0),
        }[args.strategy]
        blocks = math.ceil(rows / height), math.ceil(columns / width)
        parts = [part.split(width, 1) for part in weight.split(height)]
        most = 448.0 if args.type == "float" else 2.0 ** (args.num_bits - 1) - 1
        low = torch.tensor([[float(part.min()) for part in row] for row in parts]).clamp(max=0.0)
        high = torch.tensor([[float(part.max()) for part in row] for row in parts]).clamp(min=0.0)
        zeros = torch.zeros(blocks, dtype=torch.float8_e4m3fn if args.type == "float" else torch.int8)
        if args.symmetric:
            scale = torch.maximum(-low, high) / most
        else:
            scale = (high - low) / (2 * most + 1)
            zeros = (-low / scale - most - 1).round().clamp(-most - 1, most).to(torch.int8)
        scale = scale.bfloat16().float()
        flat = args.strategy == "tensor"
        state = {"weight": weight, "weight_scale": scale.view(1) if flat else scale}
        state["weight_zero_point"] = zeros.view(1) if flat else zeros
        tensors = compressor.compress(state, scheme)
        meant = compressor.decompress(dict(tensors), scheme)["weight"]
        tensors["weight_scale"] = tensors["weight_scale"].bfloat16()
        if activations is not None:
            tensors["input_scale"] = torch.ones(1)
        return Written(tensors, meant.double())

    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": format_name}
    settings = {"quant_method": "compressed-tensors", "format": format_name, "config_groups": {"group_0": group}}
    return Form(settings | {"ignore": ["lm_head"], "quantization_status": "compressed"}, write)


def float8(block: tuple[int, int] | None) -> Form:
    """Return DeepSeek's and Qwen's fp8, or that with one scale for each weight."""

    def write(weight: Tensor) -> Written:
        rows, columns = weight.shape
        height, width = block or (rows, columns)
        parts = [part.split(width, 1) for part in weight.split(height)]
        scales = torch.tensor([[float(part.abs().max()) for part in row] for row in parts]) / 448
        wide = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
        codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, "weight_scale_inv": scales} if block else {}
        if block is None:
            tensors = {"weight": codes, "weight_scale": scales.view(()), "input_scale": torch.ones(())}
        return Written(tensors, codes.double() * wide.double())

    settings: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic" if block else "static"}
    return Form(settings | {"weight_block_size": list(block) if block else None}, write)


def nf4(size: int, *, nested: bool) -> Form:
    """Return what bitsandbytes writes."""
    table = torch.tensor([float(value) for value in NF4.split()])

    def write(weight: Tensor) -> Written:
        blocks = weight.reshape(-1, size)
        scales = blocks.abs().amax(1)
        tensors = {"quant_map": table.clone()}
        state = {"shape": list(weight.shape), "blocksize": size, "quant_type": "nf4"}
        if nested:
            offset, each = float(scales.mean()), 16
            state |= {"nested_blocksize": each, "nested_offset": offset, "nested_dtype": "float32"}
            quant_map = torch.linspace(-1, 1, 256)
            moved = torch.nn.functional.pad(scales - offset, (0, -len(scales) % each)).view(-1, each)
            absmax = moved.abs().amax(1)
            steps = ((moved / absmax[:, None])[..., None] - quant_map).abs().argmin(-1).flatten()[: len(scales)]
            scales = quant_map[steps].double() * absmax.repeat_interleave(each)[: len(scales)].double() + offset
            tensors |= {
                "absmax": steps.to(torch.uint8),
                "nested_absmax": absmax,
                "nested_quant_map": quant_map.clone(),
            }
        else:
            tensors |= {"absmax": scales}
        codes = ((blocks / scales[:, None])[..., None] - table).abs().argmin(-1)
        halves = codes.view(-1, 2)
        packed = (halves[:, 0] << 4 | halves[:, 1]).to(torch.uint8)[:, None]
        name = "quant_state.bitsandbytes__nf4"
        tensors = {f"weight.{end}": tensor for end, tensor in tensors.items()} | {"weight": packed}
        tensors[f"weight.{name}"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return Written(tensors, (table.double()[codes] * scales.double()[:, None]).view(weight.shape))

    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    return Form(settings | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": nested}, write)


DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
FORMS = {
    "int4 group": compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "int4 group with zeros": compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
    "int4 channel": compressed("pack-quantized", num_bits=4, strategy="channel"),
    "int8 packed": compressed("pack-quantized", num_bits=8, strategy="channel"),
    "int8 packed with zeros": compressed("pack-quantized", num_bits=8, strategy="channel", symmetric=False),
    "int8 channel": compressed("int-quantized", num_bits=8, strategy="channel", activations=DYNAMIC | {"type": "int"}),
    "fp8 tensor": compressed("float-quantized", num_bits=8, type="float", strategy="tensor", activations=DYNAMIC),
    "fp8 channel": compressed("float-quantized", num_bits=8, type="float", strategy="channel", activations=DYNAMIC),
    "fp8 block": compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[48, 48], activations=DYNAMIC
    ),
    "gptq": gptq(4, 32, is_symmetric=True),
    "gptq asym": gptq(4, 32, is_symmetric=False),
    "gptq desc_act": gptq(4, 32, is_symmetric=False, desc_act=True),
    "gptq with tails": gptq(4, 48, is_symmetric=False, desc_act=True),
    "gptq v2 int8": gptq(8, 16, is_symmetric=False, version="gptq_v2"),
    "awq": awq(32),
    "fp8 128x128": float8((128, 128)),
    "fp8 blocks with tails": float8((48, 48)),
    "fp8 scalar": float8(None),
    "nf4": nf4(32, nested=False),
    "nf4 nested": nf4(32, nested=True),
}


def packed_tensors(form: Form, tensors: dict[str, Tensor], left_plain: str = "lm_head") -> tuple[dict, dict]:
    """Return a checkpoint's tensors in a form, and what they stand for; those with `left_plain` in their names stay."""
    stored, meant = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if not name.endswith(PRODUCTS) or left_plain in name:
            continue
        written = form.write(weight.float())
        meant[name] = written.stands_for.float()
        del stored[name]
        module = name.removesuffix("weight")
        stored |= {f"{module}{end}": tensor for end, tensor in written.tensors.items()}
    return stored, meant


def write_pair(
    form: Form, folder: Path, family: str = "llama-2", left_plain: str = "layers.1.mlp"
) -> tuple[Path, Path]:
    """Write a checkpoint in a form, and the plain one that it stands for; some products are plain in both."""
    packed, plain = (save_checkpoint(family, folder / name) for name in ("packed", "plain"))
    tensors = load_file(plain / "model.safetensors")
    stored, meant = packed_tensors(form, tensors, left_plain)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, packed / "model.safetensors")
    save_file(meant, plain / "model.safetensors")
    edit_config(packed, lambda settings: settings.update(quantization_config=form.settings))
    return packed, plain
