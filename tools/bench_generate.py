"""Decode speed of this engine beside its peers: same checkpoint, same dtype, same threads, in one run.

    python tools/bench_generate.py                          the demo model, batch 1, 4 and 8
    python tools/bench_generate.py --model llama-100m --dtype bfloat16 --batch-sizes 1

Every figure stands next to its limit: the time that reading the weights once takes at the read bandwidth that is
measured between the engines' turns (A B A B ...). Medians are compared.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.models import resolve_model_path
from graphdecode.profiling import read_bandwidth
from graphdecode.profiling.environment import describe_environment

Generate = Callable[[list[list[int]], int], list[list[int]]]
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


def own_engine(path: Path, dtype: str, device: str, batch_sizes: list[int]) -> tuple[Generate, LLM]:
    """Load the checkpoint into this engine."""
    config = BucketConfig(max_batch_size=max(batch_sizes), max_sequence_length=512, batch_sizes=batch_sizes)
    llm = LLM(path, config=config, dtype=dtype, device=device, prefix_cache=False)

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    return generate, llm


def transformers_engine(path: Path, dtype: str, device: str, cache: str) -> Generate:
    """Load the checkpoint into transformers, with a dynamic or a static cache."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=device)
        with torch.no_grad():
            result = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                cache_implementation=None if cache == "dynamic" else cache,
            )
        return result[:, ids.shape[1] :].tolist()

    return generate


def seconds_per_step(generate: Generate, prompts: list[list[int]], new_tokens: int) -> float:
    """Return the time of one decode step: a long answer less a short one, so that prefill does not count."""
    began = time.perf_counter()
    generate(prompts, 1)
    middle = time.perf_counter()
    generate(prompts, new_tokens + 1)
    return (time.perf_counter() - middle - (middle - began)) / new_tokens


def shared_prefix(a: list[list[int]], b: list[list[int]]) -> float:
    """Return the share of tokens before the first difference; near-ties of logits may go either way."""
    pairs = zip(a, b, strict=True)
    equal = sum(next((i for i, (x, y) in enumerate(zip(p, q, strict=True)) if x != y), len(p)) for p, q in pairs)
    return equal / sum(map(len, a))


def main(
    model: Annotated[str, typer.Option(help="demo, llama-100m, or a checkpoint folder.")] = "demo",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    batch_sizes: Annotated[str, typer.Option(help="Separated by commas.")] = "1,4,8",
    new_tokens: Annotated[int, typer.Option(help="Decode steps of one measurement.")] = 64,
    repeats: Annotated[int, typer.Option(help="Measurements of each engine.")] = 5,
    threads: Annotated[int, typer.Option(help="0 leaves torch's default.")] = 0,
    peers: Annotated[
        str, typer.Option(help="transformers, transformers-static; separated by commas.")
    ] = "transformers",
    device: Annotated[str, typer.Option(help="cpu or cuda; auto takes what is there.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """Compare decode speed with peers on one checkpoint."""
    if threads:
        torch.set_num_threads(threads)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = [int(size) for size in batch_sizes.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        path = make_llama_100m(Path(scratch)) if model == "llama-100m" else resolve_model_path(model)
        engines: dict[str, Generate] = {}
        engines["graphdecode"], llm = own_engine(path, dtype, device, sizes)
        for peer in filter(None, peers.split(",")):
            cache = "static" if peer.endswith("-static") else "dynamic"
            engines[peer] = transformers_engine(path, dtype, device, cache)
        vocab_size, weight_bytes = llm.model.config.vocab_size, llm.model.weight_bytes
        rows = [measure(engines, size, new_tokens, repeats, device, weight_bytes, vocab_size) for size in sizes]
        print_table(rows, f"{model} {dtype} on {device}, {torch.get_num_threads()} threads")
        if out is not None:
            record = {"model": model, "dtype": dtype, "device": device, "threads": torch.get_num_threads()}
            record |= {"weight_bytes": weight_bytes, "environment": describe_environment(device), "rows": rows}
            out.write_text(json.dumps(record, indent=1))
        llm.close()


def measure(
    engines: dict[str, Generate],
    batch_size: int,
    new_tokens: int,
    repeats: int,
    device: str,
    weight_bytes: int,
    vocab_size: int,
) -> dict:
    """Time all engines in turn at one batch size, and the memory between them, whose speed is not the same for long."""
    generator = torch.Generator().manual_seed(batch_size)
    prompts = torch.randint(3, vocab_size, (batch_size, PROMPT_TOKENS), generator=generator).tolist()
    answers = {name: generate(prompts, new_tokens) for name, generate in engines.items()}  # warm-up, too
    times: dict[str, list[float]] = {name: [] for name in engines}
    bandwidths = []
    for _ in range(repeats):
        bandwidths.append(read_bandwidth(device, repeats=2))
        for name, generate in engines.items():
            times[name].append(seconds_per_step(generate, prompts, new_tokens))
    median = {name: statistics.median(values) for name, values in times.items()}
    own, bandwidth = median["graphdecode"], statistics.median(bandwidths)
    floor = weight_bytes / bandwidth
    return {
        "batch_size": batch_size,
        "read_bandwidth": bandwidth,
        "floor_ms": 1000 * floor,
        "ms_per_step": {name: 1000 * value for name, value in median.items()},
        "tokens_per_second": {name: batch_size / value for name, value in median.items()},
        "times_faster_than": {name: value / own for name, value in median.items()},
        "times_floor": {name: value / floor for name, value in median.items()},
        "same_tokens": {name: shared_prefix(answers["graphdecode"], answer) for name, answer in answers.items()},
    }


def print_table(rows: list[dict], title: str) -> None:
    """Show the figures, each next to its limit."""
    table = Table("batch", "engine", "ms/step", "tokens/s", "graphdecode is", "of floor", "same tokens", title=title)
    for row in rows:
        for name, ms in row["ms_per_step"].items():
            table.add_row(
                str(row["batch_size"]),
                name,
                f"{ms:.3f}",
                f"{row['tokens_per_second'][name]:.1f}",
                f"{row['times_faster_than'][name]:.2f}x",
                f"{row['times_floor'][name]:.2f}x",
                f"{100 * row['same_tokens'][name]:.0f}%",
            )
    console = Console()
    console.print(table)
    for row in rows:
        console.print(
            f"batch {row['batch_size']}: read bandwidth {row['read_bandwidth'] / 1e9:.1f} GB/s; "
            f"reading the weights once takes {row['floor_ms']:.3f} ms"
        )


if __name__ == "__main__":
    typer.run(main)
