"""Decode speed of this engine beside its peers: same checkpoint, same dtype, same threads, in one run.

    python tools/bench_generate.py                          the demo model, batch 1, 4 and 8
    python tools/bench_generate.py --model llama-100m --dtype bfloat16 --batch-sizes 1 --peers all

A peer that is not installed, that fails, or whose tokens are wrong is listed with the reason. Every figure stands next
to its limit: the time that reading the weights once takes at the read bandwidth that is measured between the engines'
turns (A B A B ...). Medians are compared.
"""

import json
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from graphdecode.models import resolve_model_path
from graphdecode.profiling.environment import describe_environment
from peers import PEERS, Workload, compare_engines, contest_notes, contest_table, parse_peers

PROMPT_TOKENS = 32


def make_llama_100m(folder: Path) -> Path:
    """Write a 100M-parameter Llama with random weights."""
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
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    batch_sizes: Annotated[str, typer.Option(help="Separated by commas.")] = "1,4,8",
    new_tokens: Annotated[int, typer.Option(help="Decode steps of one measurement.")] = 64,
    repeats: Annotated[int, typer.Option(help="Turns of each engine.")] = 5,
    threads: Annotated[int, typer.Option(help="0 leaves torch's default.")] = 0,
    peers: Annotated[str, typer.Option(help=f"all, or of {', '.join(PEERS)}; by commas.")] = "transformers",
    device: Annotated[str, typer.Option(help="cpu or cuda; auto takes what is there.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.", dir_okay=False)] = None,
) -> None:
    """Compare decode speed with peers on one checkpoint."""
    try:
        chosen = parse_peers(peers)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--peers") from error
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)  # if it cannot be, better now than after the run
    disable_progress_bar()  # of loading weights
    if threads:
        torch.set_num_threads(threads)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = tuple(int(size) for size in batch_sizes.split(","))
    workload = Workload(device, dtype, sizes, PROMPT_TOKENS, new_tokens, torch.get_num_threads())
    facts = {"model": model, "dtype": dtype, "device": device, "threads": workload.threads}
    environment = describe_environment(device)  # the load is to be that of others
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_llama_100m(Path(scratch)) if model == "llama-100m" else resolve_model_path(model)
        record = compare_engines(chosen, folder, workload, repeats=repeats, progress=True)
    console = Console()
    console.print(contest_table(record, f"{model} {dtype} on {device}, threads: {workload.threads}"))
    for note in contest_notes(record, int(environment["cache_bytes"])):
        console.print(note, highlight=False, markup=False)
    if out is not None:
        out.write_text(json.dumps(facts | {"environment": environment} | record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
