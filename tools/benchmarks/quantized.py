"""A model with each kind of quantized weights on a CPU: perplexity, resident memory, and the time of a step.

    tools/bench quantized prepare FOLDER --llama-python PYTHON   SmolLM2 in bf16, and a copy in each form
    tools/bench quantized measure FOLDER --out FILE              each in a process of its own, one after another

Perplexity is that of two committed texts, in bf16. GGUF's types are written by llama.cpp.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.convert import quantized_copy
from graphdecode.models import resolve_model_path
from graphdecode.models.gguf.source import Gguf
from graphdecode.profiling.environment import read_bandwidth
from graphdecode.text import load_tokenizer
from harness import (
    ROOT,
    Dtype,
    LlamaPython,
    Out,
    command_of,
    elsewhere,
    json_of,
    medians,
    perplexity,
    read,
    record,
    replaced,
    show,
    step_seconds,
    write,
)

TEXTS = ("LICENSE", "docs/graphs.md")
TEXT_TOKENS = 768  # of each
BATCH_SIZES = (1, 8)
NEW_TOKENS, TURNS = 32, 3
PLAIN = "bf16"
ROUNDED = {  # written by this package: what is asked for, and the columns of a group
    "int8": ("int8", None),
    "int8 by 64": ("int8", 64),
    "int4 by 64": ("int4", 64),
    "int4 by 32": ("int4", 32),
    "fp8": ("fp8", None),
    "q8_0.gguf": ("q8_0", None),
    "q4_k.gguf": ("q4_k", None),
}
LLAMA_TYPES = {"Q2_K": "Q2_K", "Q3_K": "Q3_K_S", "Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S", "MXFP4": "MXFP4_MOE"} | {
    name: name for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K", "Q8_0", "IQ4_NL", "IQ4_XS")
}
AS_IT_COMES = "Q4_1 as it comes"
ANSWER_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "A hash table is a data structure that",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "In the beginning",
    "To make a good cup of tea,",
    "The speed of light is about",
    "Dear Sir or Madam,\n",
    "1, 2, 3, 4, 5,",
    "Water boils at",
    "Shakespeare wrote",
)
CONFIG = BucketConfig(max_batch_size=8, batch_sizes=list(BATCH_SIZES), max_sequence_length=1024)
app = typer.Typer(add_completion=False)


def expand(folder: Path) -> None:
    """Write SmolLM2, which comes in blocks, as a plain checkpoint in bf16."""
    path = resolve_model_path("smollm2")
    source, tokenizer = Gguf(path), load_tokenizer(path)
    tensors = {name: torch.empty(stored.shape, dtype=torch.bfloat16) for name, stored in source.tensors.items()}
    for name, out in tensors.items():
        source.read(name, out)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(source.settings | {"model_type": "llama"}))
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    named = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    settings = named | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@app.command()
def prepare(folder: Path, llama_python: LlamaPython = None) -> None:
    """Write the model in bf16, and its copies; what exists stays."""
    if not (folder / PLAIN).exists():
        expand(folder / PLAIN)
    for name, (quantize, group_size) in ROUNDED.items():
        if not (folder / name).exists():
            quantized_copy(folder / PLAIN, folder / name, quantize, group_size=group_size, progress=True)
    for name, kind in LLAMA_TYPES.items():
        if llama_python is not None and not (folder / f"{name}.gguf").exists():
            file = resolve_model_path("smollm2")
            command = elsewhere(llama_python, "llama-quantize", file, folder / f"{name}.gguf", kind)
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def perplexities(llm: LLM) -> dict[str, float]:
    ids = {name: llm.tokenizer((ROOT / name).read_text(), verbose=False).input_ids for name in TEXTS}
    return {name: perplexity(llm, each[:TEXT_TOKENS]) for name, each in ids.items()}


def step_ms(llm: LLM, batch_size: int) -> list[float]:
    prompts = [[100 + row] * 16 for row in range(batch_size)]

    def answer(count: int) -> None:
        llm.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0), use_tqdm=False)

    return [1000 * step_seconds(answer, NEW_TOKENS) for _ in range(TURNS)]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def margin(entry: dict[int, Any]) -> float:
    """Return the gap of log-probability between the two best tokens."""
    best, second = sorted((found.logprob for found in entry.values()), reverse=True)[:2]
    return float(best - second)


def answers_of(llm: LLM) -> list[dict[str, Any]]:
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=2)
    outputs = [output.outputs[0] for output in llm.generate(list(PROMPTS), params, use_tqdm=False)]
    return [
        {"token_ids": list(output.token_ids), "margins": [margin(entry) for entry in output.logprobs or ()]}
        for output in outputs
    ]


@app.command()
def one(
    model: Path,
    dtype: Dtype = "bfloat16",
    quantize: Annotated[str | None, typer.Option(help="As LLM's keyword.")] = None,
    times: Annotated[bool, typer.Option(help="Time steps, too, on an idle machine.")] = True,
    answers: Annotated[bool, typer.Option(help="Give greedy answers, too, with the margins of their tokens.")] = False,
) -> None:
    """Print a JSON line for one model, in a process of its own, whose memory is that model's."""
    before = resident_bytes()
    began = time.perf_counter()
    with LLM(model, quantize=quantize, dtype=dtype, config=CONFIG) as llm:
        found: dict[str, Any] = {"load_seconds": time.perf_counter() - began, "weight_bytes": llm.model.weight_bytes}
        turns = {str(size): step_ms(llm, size) for size in BATCH_SIZES if times}
        found |= {"resident_bytes": resident_bytes() - before, "turns_ms": turns, "ms_per_step": medians(turns)}
        found |= {"perplexity": perplexities(llm)} | ({"answers": answers_of(llm)} if answers else {})
    print(json.dumps(found))


@app.command()
def measure(
    folder: Path,
    out: Out = None,
    only: Annotated[str | None, typer.Option(help="Forms, with commas between; left out: what FILE has not.")] = None,
    times: Annotated[bool, typer.Option(help="Time steps, too, which wants a quiet machine.")] = True,
) -> None:
    """Measure each form in a process of its own, write FILE after each, and print a table."""
    result = {"rows": []} | read(out, schema=1)
    there = [PLAIN, AS_IT_COMES, *sorted(path.name for path in folder.iterdir() if path.name != PLAIN)]
    done = {row["form"] for row in result["rows"]}
    bandwidth = read_bandwidth("cpu") if times else None
    for form in only.split(",") if only else [form for form in there if form not in done]:
        model = resolve_model_path("smollm2") if form == AS_IT_COMES else folder / form
        options = ["--quantize", "gguf"] * (model.suffix == ".gguf") + ["--no-times"] * (not times)
        row = {"form": form} | json_of(command_of("bench", "quantized", "one", model, *options))
        result |= record(read_bandwidth=bandwidth, rows=replaced(result["rows"], row, "form"))
        print(f"{form}: {row['perplexity']}", flush=True)
        write(out, result)
    columns = {"form": "{form}", "weights MiB": "{weights:.0f}", "resident MiB": "{resident:.0f}"}
    columns |= {"ms at 1": "{one:.2f}", "x floor": "{floors:.2f}", "ms at 8": "{eight:.2f}"}
    columns |= {text: f"{{perplexity[{text}]:.3f}}" for text in TEXTS}
    show(columns, [shown(row, result.get("read_bandwidth")) for row in result["rows"]])


def shown(row: dict[str, Any], bandwidth: float | None) -> dict[str, Any]:
    """Return a row with the table's columns."""
    times, nbytes = row["ms_per_step"], row["weight_bytes"]
    found = row | {"weights": nbytes / 2**20, "resident": row["resident_bytes"] / 2**20}
    if times and bandwidth:
        found |= {"one": times["1"], "eight": times["8"], "floors": times["1"] * bandwidth / nbytes / 1000}
    return found
