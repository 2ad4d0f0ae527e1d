"""SmolLM2 in fp16, in GGUF blocks, and in Hugging Face's quantized formats, compared with the dequantized checkpoint.

    tools/check forms compare FOLDER --out FILE --transformers PYTHON --vllm PYTHON
    tools/check forms unpack FOLDER --out FILE --vllm PYTHON    GPTQ's and AWQ's weights as vLLM has them

FOLDER keeps the plain checkpoint in bf16 and one in each form, rounded to the nearest values. Each is dequantized to
float32 from its definition (`tests/models/quantized_checkpoints.py`), or by compressed-tensors or bitsandbytes. The
PYTHONs have transformers with these packages, and vLLM's CPU build, which read the same checkpoints.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from quantized_checkpoints import DYNAMIC, FORMS, Form, awq, compressed, gptq, packed_tensors
from safetensors.torch import load_file, save_file

from benchmarks.quantized import AS_IT_COMES, PLAIN, PROMPTS, TEXT_TOKENS, TEXTS, expand
from graphdecode.models.checkpoint import Checkpoint
from graphdecode.text import load_tokenizer
from harness import ROOT, command_of, elsewhere, json_of, read, record, replaced, write

MODEL_FILE, FP16, UNDONE = "model.safetensors", "fp16", "undone"
BY_BITSANDBYTES = {"nf4": False, "nf4 nested": True}  # whether the scales are quantized too
READ_BY_VLLM = ("int4 by 128", "gptq asym", "awq")
READ_BY_TRANSFORMERS = ("int4 with zeros", "int8", "fp8", "fp8 blocks", *BY_BITSANDBYTES)
app = typer.Typer(add_completion=False)


def int4_by_128() -> Form:
    """Return compressed-tensors' int4 in groups of 128 columns, or 64 if 128 does not divide them."""
    wide, narrow = (compressed("pack-quantized", num_bits=4, strategy="group", group_size=size) for size in (128, 64))
    groups = {
        f"group_{place}": form.settings["config_groups"]["group_0"] | {"targets": [targets]}
        for place, (form, targets) in enumerate([(wide, r"re:.*down_proj$"), (narrow, r"re:.*(q|k|v|o|gate|up)_proj$")])
    }
    settings = wide.settings | {"config_groups": groups}
    return Form(settings, lambda weight: (narrow if weight.shape[1] % 128 else wide).write(weight))


WRITTEN = {
    "int4 by 128": int4_by_128(),
    "int4 with zeros": compressed("pack-quantized", num_bits=4, strategy="group", group_size=64, symmetric=False),
    "int8": FORMS["int8 channel"],
    "fp8": FORMS["fp8 channel"],
    "fp8 blocks": compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128], activations=DYNAMIC
    ),
    "fp8 128x128": FORMS["fp8 128x128"],
    "gptq": gptq(4, 64, is_symmetric=True),
    "gptq asym": gptq(4, 64, is_symmetric=False),
    "gptq desc_act": gptq(4, 64, is_symmetric=False, desc_act=True),
    "gptq 8 bits": gptq(8, 64, is_symmetric=True, version="gptq_v2"),
    "awq": awq(64),
}


def write_pair(plain: Path, folder: Path, undone: Path, form: Form) -> None:
    """Write a quantized checkpoint, and its dequantized weights in float32."""
    stored, meant = packed_tensors(form, load_file(plain / MODEL_FILE))
    for out, tensors in ((folder, stored), (undone, meant)):
        shutil.copytree(plain, out, ignore=shutil.ignore_patterns(MODEL_FILE))
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, out / MODEL_FILE, metadata={"format": "pt"})
    settings = json.loads((plain / "config.json").read_text()) | {"quantization_config": form.settings}
    (folder / "config.json").write_text(json.dumps(settings))


def measured(model: str, dtype: str, *options: str) -> Any:
    command = command_of("bench", "quantized", "one", model, "--dtype", dtype, "--no-times", "--answers", *options)
    found = json_of(command)
    return {name: found[name] for name in ("weight_bytes", "perplexity", "answers")}


def beside(form: str, stored: dict[str, Any], of_undone: dict[str, Any]) -> dict[str, Any]:
    """Return a row: perplexities of both, and how long their outputs agree."""
    pairs = list(zip(PROMPTS, stored.pop("answers"), of_undone["answers"], strict=True))
    return stored | {
        "form": form,
        "perplexity": stored["perplexity"] | {UNDONE: of_undone["perplexity"]},
        "same_answers": sum(one["token_ids"] == other["token_ids"] for _, one, other in pairs),
        "answers": [parted(prompt, one["token_ids"], other) for prompt, one, other in pairs],
    }


def parted(prompt: str, token_ids: list[int], other: dict[str, Any]) -> dict[str, Any]:
    """Return how many tokens two outputs share, and the logit gap of the two best tokens where they diverge."""
    pairs = enumerate(zip(token_ids, other["token_ids"], strict=True))
    place = next((place for place, (ours, theirs) in pairs if ours != theirs), None)
    row: dict[str, Any] = {"prompt": prompt, "tokens": len(token_ids)}
    if place is None:
        return row | {"same_tokens": len(token_ids)}
    return row | {"same_tokens": place, "margin_where_they_part": other["margins"][place]}


def stored_and_undone(folder: Path, form: str, readers: dict[str, Path]) -> dict[str, Any]:
    """Return the row of a Hugging Face format."""
    plain, packed = folder / PLAIN, folder / form
    shutil.rmtree(packed, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        undone = Path(scratch) / UNDONE
        if form in BY_BITSANDBYTES:
            nested = ["nested"] * BY_BITSANDBYTES[form]
            command = elsewhere(readers["transformers"], "write-nf4", plain, packed, undone, *nested)
            subprocess.run(command, check=True)
        else:
            write_pair(plain, packed, undone, WRITTEN[form])
        of_undone = measured(str(undone), "float32")
        by_others = read_by_others(form, packed, undone, readers)
    wide, narrow = measured(str(packed), "float32"), measured(str(packed), "bfloat16")
    wide["perplexity"] = {"float32": wide["perplexity"], "bfloat16": narrow["perplexity"]}
    row = beside(form, wide, of_undone)
    row["weight_bytes"] = narrow["weight_bytes"]
    row["perplexity"] |= by_others
    return row


def read_by_others(form: str, packed: Path, undone: Path, readers: dict[str, Path]) -> dict[str, Any]:
    """Return the perplexities that other libraries find; vLLM computes both checkpoints in bf16."""
    found = {}
    if form in READ_BY_TRANSFORMERS and "transformers" in readers:
        found["transformers"] = perplexities_by(readers["transformers"], "transformers", packed, "float32")
    if form in READ_BY_VLLM and "vllm" in readers:
        for name, folder in (("vllm, bfloat16", packed), ("vllm, bfloat16, undone", undone)):
            found[name] = perplexities_by(readers["vllm"], "vllm", folder, "bfloat16")
    return found


def perplexities_by(python: Path, reader: str, model: Path, dtype: str) -> Any:
    tokenizer = load_tokenizer(model)
    ids = {name: tokenizer((ROOT / name).read_text(), verbose=False).input_ids[:TEXT_TOKENS] for name in TEXTS}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(ids, file)
        file.flush()
        return json_of(elsewhere(python, "perplexity", reader, model, dtype, file.name))


def half_and_whole(folder: Path, readers: dict[str, Path]) -> dict[str, Any]:
    """Return the row of fp16 and of the same values in float32."""
    plain = folder / PLAIN
    narrow, wide = measured(str(plain), "float16"), measured(str(plain), "float32")
    narrow["perplexity"] = {"float16": narrow["perplexity"]}
    row = beside(FP16, narrow, wide)
    if "transformers" in readers:
        for dtype in ("float16", "float32"):
            found = perplexities_by(readers["transformers"], "transformers", plain, dtype)
            row["perplexity"][f"transformers, {dtype}"] = found
    return row


def as_it_comes() -> dict[str, Any]:
    stored, plain = (measured("smollm2", "float32", "--quantize", each) for each in ("gguf", "none"))
    stored["perplexity"] = {"float32": stored["perplexity"]}
    return beside(AS_IT_COMES, stored, plain)


@app.command()
def compare(
    folder: Path,
    out: Annotated[Path, typer.Option(help="Where to put the rows.")],
    transformers: Annotated[Path | None, typer.Option(help="An interpreter with transformers.")] = None,
    vllm: Annotated[Path | None, typer.Option(help="An interpreter with vLLM for CPUs.")] = None,
    only: Annotated[str | None, typer.Option(help="Forms, with commas between; left out: what FILE has not.")] = None,
) -> None:
    """Compare each format with its dequantized weights, and write FILE after each."""
    result = {"beside_undone": []} | read(out, schema=1)
    done = {row["form"] for row in result["beside_undone"]}
    if not (folder / PLAIN).exists():
        expand(folder / PLAIN)
    readers = {name: path for name, path in (("transformers", transformers), ("vllm", vllm)) if path is not None}
    there = [FP16, AS_IT_COMES, *WRITTEN, *(BY_BITSANDBYTES if transformers else ())]
    for form in only.split(",") if only else [form for form in there if form not in done]:
        if form == FP16:
            row = half_and_whole(folder, readers)
        else:
            row = as_it_comes() if form == AS_IT_COMES else stored_and_undone(folder, form, readers)
        result |= record(beside_undone=replaced(result["beside_undone"], row, "form"))
        write(out, result)
        print(f"{form}: {row['same_answers']} of {len(PROMPTS)} answers the same; {row['perplexity']}", flush=True)


@app.command()
def unpack(
    folder: Path,
    out: Annotated[Path, typer.Option(help="Whose rows to complete.")],
    vllm: Annotated[Path, typer.Option(help="An interpreter with vLLM for CPUs.")],
) -> None:
    """Add the differences of `compare`'s weights from those that vLLM's functions unpack."""
    result = json.loads(out.read_text())
    for row in result["beside_undone"]:
        if not row["form"].startswith(("gptq", "awq")):
            continue
        model, largest = folder / row["form"], 0.0
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / MODEL_FILE
            subprocess.run(elsewhere(vllm, "unpack", model, file), check=True)
            weights = load_file(file)
        source = Checkpoint(model)
        for name, theirs in weights.items():
            ours = torch.full_like(theirs, torch.nan)
            source.read(name, ours)
            largest = max(largest, float((ours - theirs).abs().max()))
        row |= {"unpacked_weights": len(weights), "largest_difference": largest}
        print(f"{row['form']}: {len(weights)} weights, the largest difference is {largest}", flush=True)
    write(out, result)
