"""Decode speed compared with peers: same checkpoint, dtype and threads, in one run.

    tools/bench generate --model llama-100m --dtype bfloat16 --peers all
    tools/bench generate --model random:gpt2        an architecture that runs as transformers' module in our graphs

A peer that is not installed, fails, or gives wrong tokens is listed with the reason. Engines alternate (A B A B ...),
and medians are compared. Every figure stands next to its floor: the time to read the weights once. Ratios to the floor
that are over 5% above the committed ones, for the same processor and instruction set, are named.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import LlamaConfig
from transformers.utils.logging import disable_progress_bar

from adopted_models import ADOPTED, SMALL, save_random
from graphdecode.models import resolve_device, resolve_model_path
from harness import Device, Dtype, Out, Rounds, Sizes, numbers, record, warn_if_slower, write
from peers.contest import PEERS, compare_engines, contest_notes, contest_table, parse_peers
from peers.peer import Workload

PROMPT_TOKENS = 32
LLAMA_100M = LlamaConfig(
    vocab_size=32000,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)


def checkpoint_of(model: str, scratch: Path) -> Path:
    """Return a model's folder; llama-100m and random:NAME (an architecture of `adopted_models`) are written first."""
    name = model.removeprefix("random:")
    if model == "llama-100m":
        return save_random(LLAMA_100M, scratch)
    return save_random(ADOPTED[name](SMALL), scratch) if name in ADOPTED else resolve_model_path(model)


def figures_of(result: Any) -> dict[str, float]:
    return {f"batch {row['batch_size']}": row["times_floor"]["graphdecode"] for row in result["rows"]}


def main(
    model: Annotated[str, typer.Option(help="demo, llama-100m, random:ARCHITECTURE, or a checkpoint folder.")] = "demo",
    dtype: Dtype = "float32",
    batch_sizes: Sizes = "1,4,8",
    new_tokens: Annotated[int, typer.Option(help="Decode steps of one measurement.")] = 64,
    repeats: Rounds = 5,
    threads: Annotated[int, typer.Option(help="0 leaves torch's default.")] = 0,
    peers: Annotated[str, typer.Option(help=f"all, or of {', '.join(PEERS)}; by commas.")] = "transformers",
    device: Device = "auto",
    out: Out = None,
) -> None:
    chosen = parse_peers(peers)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)  # fails before the run
    disable_progress_bar()  # of loading weights
    if threads:
        torch.set_num_threads(threads)
    place = resolve_device(device).type
    workload = Workload(place, dtype, tuple(numbers(batch_sizes)), PROMPT_TOKENS, new_tokens, torch.get_num_threads())
    found = record(place, model=model, dtype=dtype, device=place, threads=workload.threads)
    with tempfile.TemporaryDirectory() as scratch:
        found |= compare_engines(chosen, checkpoint_of(model, Path(scratch)), workload, repeats=repeats, progress=True)
    console = Console()
    console.print(contest_table(found, f"{model} {dtype} on {place}, threads: {workload.threads}"))
    for note in contest_notes(found, int(found["environment"]["cache_bytes"])):
        console.print(note, highlight=False, markup=False)
    warn_if_slower(f"generate-{Path(model).name}-{dtype}.json", found, figures_of)
    write(out, found)
