"""A decode step of 8 rows, each with an adapter of its own, compared with steps without adapters, and with PEFT.

Engines run in turn in one process. The adapters are random, of rank 16, and change all products of the layers. PEFT
computes the same step unmerged, with an adapter for each row.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

from graphdecode import LLM, BucketConfig, LoRARequest, SamplingParams
from graphdecode.errors import ArgumentError
from graphdecode.models import resolve_model_path
from harness import Dtype, Model, Out, Rounds, alternated, record, show, step_seconds, write

_ROWS, _RANK = 8, 16
_NEW_TOKENS = {"peft": 20}  # of a turn; 64 of the others
_PROMPTS = [[3 + (7 * at + row) % 1000 for at in range(16)] for row in range(_ROWS)]


def save_adapter(folder: Path, llm: LLM, seed: int) -> int:
    """Save random matrices as PEFT does; return their bytes in the slots."""
    slots = llm.model.adapters
    assert slots is not None
    drawn, tensors = torch.Generator().manual_seed(seed), {}
    of_layers = (parts for place, parts in slots.parts.items() if place not in ("embedding", "lm_head"))
    for part in chain.from_iterable(of_layers):
        module, (outputs, inputs) = part.name.removesuffix(".weight"), part.shape
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(_RANK, inputs, generator=drawn) / inputs**0.5
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, _RANK, generator=drawn) * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in tensors})
    settings = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return sum(tensor.numel() for tensor in tensors.values()) * slots.dtype.itemsize


def answer(llm: LLM, adapters: list[LoRARequest] | None, new_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    llm.generate(_PROMPTS, params, use_tqdm=False, lora_request=adapters)


def by_peft(path: Path, folders: list[Path], dtype: torch.dtype) -> Callable[[int], None]:
    """Return what generates with PEFT's unmerged model, an adapter a row."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ArgumentError("--peft needs peft: pip install peft") from error
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model = PeftModel.from_pretrained(model, folders[0], adapter_name=folders[0].name)
    for folder in folders[1:]:
        model.load_adapter(folder, adapter_name=folder.name)
    model = model.eval().to(dtype)
    ids, names = torch.tensor(_PROMPTS), [folder.name for folder in folders]
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "adapter_names": names, "pad_token_id": 0}

    def generate(new_tokens: int) -> None:
        model.generate(input_ids=ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **options)

    return generate


def main(
    model: Model,
    dtype: Dtype = "bfloat16",
    peft: Annotated[bool, typer.Option("--peft", help="Measure PEFT's unmerged model, too.")] = False,
    rounds: Rounds = 7,
    out: Out = None,
) -> None:
    path = resolve_model_path(model)
    buckets = BucketConfig(max_batch_size=_ROWS, batch_sizes=[_ROWS], max_sequence_length=128)
    of_path = partial(LLM, path, config=buckets, dtype=dtype, skip_tokenizer_init=True, prefix_cache=False)
    with ExitStack() as stack:
        plain = stack.enter_context(of_path())
        room = stack.enter_context(of_path(max_adapters=_ROWS, max_adapter_rank=_RANK))
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) / f"a{row}" for row in range(_ROWS)]
        nbytes = sum(save_adapter(folder, room, row) for row, folder in enumerate(folders))
        adapters = [LoRARequest(folder.name, row + 1, folder) for row, folder in enumerate(folders)]
        answers: dict[str, Callable[[int], None]] = {
            "no room for adapters": partial(answer, plain, None),
            "room, and none used": partial(answer, room, None),
            "an adapter a row": partial(answer, room, adapters),
        }
        if peft:
            answers["peft"] = by_peft(path, folders, plain.model.dtype)
        calls = {name: partial(step_seconds, call, _NEW_TOKENS.get(name, 64)) for name, call in answers.items()}
        turns = alternated(calls, rounds, warm=1)
        weights = plain.model.weight_bytes
    first = turns["no room for adapters"]
    rows = [
        {
            "step": name,
            "ms": 1e3 * statistics.median(seconds),
            "times_plain": statistics.median(each / one for each, one in zip(seconds, first, strict=True)),
            "turns_ms": [1e3 * each for each in seconds],
        }
        for name, seconds in turns.items()
    ]
    show({"step": "{step}", "ms": "{ms:.2f}", "times a plain step": "{times_plain:.3f}"}, rows)
    print(f"bytes read with adapters {(weights + nbytes) / weights:.3f} times those without")
    write(out, record(schema=1, model=path.name, dtype=dtype, rows=rows, times_bytes=(weights + nbytes) / weights))
