"""Decode speed of this engine beside its peers: same checkpoint, same dtype, same threads, in one run.

A peer that is not installed, that fails, or whose tokens are wrong is listed with the reason. Every figure stands next
to its limit: the time that reading the weights once takes at the read bandwidth that is measured between the engines'
turns (A B A B ...). Medians are compared.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from graphdecode.models import resolve_device, resolve_model_path
from harness import Device, Dtype, Out, Rounds, Sizes, numbers, record, write
from peers.contest import PEERS, compare_engines, contest_notes, contest_table, parse_peers
from peers.peer import Workload

PROMPT_TOKENS = 32


def make_llama_100m(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    # any tokenizer will do: prompts are given as token ids
    demo = resolve_model_path("demo")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo / name).read_bytes())
    return folder


def main(
    model: Annotated[str, typer.Option(help="demo, llama-100m, or a checkpoint folder.")] = "demo",
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
        out.parent.mkdir(parents=True, exist_ok=True)  # if it cannot be, better now than after the run
    disable_progress_bar()  # of loading weights
    if threads:
        torch.set_num_threads(threads)
    place = resolve_device(device).type
    workload = Workload(place, dtype, tuple(numbers(batch_sizes)), PROMPT_TOKENS, new_tokens, torch.get_num_threads())
    found = record(place, model=model, dtype=dtype, device=place, threads=workload.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_llama_100m(Path(scratch)) if model == "llama-100m" else resolve_model_path(model)
        found |= compare_engines(chosen, folder, workload, repeats=repeats, progress=True)
    console = Console()
    console.print(contest_table(found, f"{model} {dtype} on {place}, threads: {workload.threads}"))
    for note in contest_notes(found, int(found["environment"]["cache_bytes"])):
        console.print(note, highlight=False, markup=False)
    write(out, found)
