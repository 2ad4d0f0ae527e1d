"""The command line."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from graphdecode.config import BucketConfig
from graphdecode.engine import LLM, RequestOutput, SamplingParams
from graphdecode.engine.capacity import plan_capacity
from graphdecode.engine.loading import load_runner
from graphdecode.engine.summary import RunSummary
from graphdecode.models import ModelConfig, resolve_model_path
from graphdecode.profiling.comparison import compare_profiles, overall_ratio
from graphdecode.profiling.latency import LatencyProfiler
from graphdecode.profiling.report import profile_table, write_report
from graphdecode.profiling.tuner import (
    StepCost,
    best_ladders,
    expected_step_ms,
    padding_share,
    read_batch_sizes,
    record_batch_sizes,
)
from graphdecode.step_commands import check, inspect

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A CUDA-graph-first decode runtime: capture once per bucket, replay every token.",
)
app.command()(check)
app.command()(inspect)
STDERR = Console(stderr=True)
ModelOption = Annotated[str, typer.Option(help="A checkpoint folder, a Hugging Face repository id, or demo.")]
ConfigOption = Annotated[Path | None, typer.Option(help="A bucket configuration file (TOML).")]


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback for errors; anywhere in the line.")] = False,
) -> None:
    """Take the option for the help; `main` looks for it."""


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[-]", help="- reads prompts from stdin.")] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")] = None,
    prompts_file: Annotated[Path | None, typer.Option(help="A file with one prompt a line.")] = None,
    model: ModelOption = "demo",
    config: ConfigOption = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most, for each prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most likely tokens; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the most likely tokens of this much mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an answer; may be repeated.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quantize: Annotated[str | None, typer.Option(help="int8: 8-bit weights on a CPU.")] = None,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="The same bits for a request in any company; slower prompts.")
    ] = False,
    no_prefix_cache: Annotated[bool, typer.Option("--no-prefix-cache", help="Do not share prompt prefixes.")] = False,
    record_batches: Annotated[Path | None, typer.Option(help="Add this run's batch sizes to a file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for each prompt.")] = False,
) -> None:
    """Generate text: answers go to stdout as they come, all else to stderr."""
    texts = _collect_prompts(prompts or [], prompt or [], prompts_file)
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_tokens=max_tokens, stop=stop
    )
    with LLM(
        model,
        config=config,
        device=device,
        dtype=dtype,
        seed=seed,
        prefix_cache=not no_prefix_cache,
        quantize=quantize,
        batch_invariant=batch_invariant,
        progress=True,
    ) as llm:
        summary = RunSummary(llm)
        outputs = _print_json(llm, texts, params) if as_json else _print_text(llm, texts, params)
        STDERR.print(summary.line(outputs), highlight=False, soft_wrap=True)
        if record_batches is not None:
            record_batch_sizes(record_batches, llm.stats.batch_sizes)
    refused = [output for output in outputs if output.error is not None]
    for output in refused:
        _print_error(f"{textwrap.shorten(repr(output.prompt), 60)}: {output.error}")
    if refused:
        raise typer.Exit(2)


def _collect_prompts(arguments: list[str], options: list[str], file: Path | None) -> list[str]:
    unknown = [argument for argument in arguments if argument != "-"]
    if unknown:
        raise ValueError(f"prompts are given with --prompt, --prompts-file or - (stdin), got {unknown[0]!r}")
    texts = list(options)
    if file is not None:
        try:
            texts += [line for line in file.read_text(encoding="utf-8").splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompts-file {file}: {error}") from error
    if arguments:
        texts += [line for line in sys.stdin.read().splitlines() if line]
    if not texts:
        raise ValueError("there is no prompt: give --prompt TEXT, --prompts-file FILE, or - to read stdin")
    return texts


def _print_text(llm: LLM, texts: list[str], params: SamplingParams) -> list[RequestOutput]:
    """Stream the answers in the order of their prompts; all of them are computed side by side."""
    streams = [llm.stream(text, params, refuse="return") for text in texts]
    hidden = len(texts) == 1 or sys.stdout.isatty()
    with tqdm(total=len(texts), desc="generating", unit="prompt", leave=False, disable=hidden or None) as bar:
        for text, stream in zip(texts, streams, strict=True):
            if len(texts) > 1:
                print(f">>> {text}")
            for piece in stream:
                print(piece, end="", flush=True)
            print(flush=True)
            bar.update()
    return [stream.request for stream in streams]


def _print_json(llm: LLM, texts: list[str], params: SamplingParams) -> list[RequestOutput]:
    outputs = llm.generate(texts, params)
    for output in outputs:
        record = asdict(output)
        record["metrics"]["time_to_first_token"] = output.metrics.time_to_first_token
        print(json.dumps(record, ensure_ascii=False))
    return outputs


class _FileByDefault(typer.core.TyperGroup):
    """A command group whose first word may be a file instead of a command: it is shown then."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["show", *args]
        return super().parse_args(ctx, args)


buckets = typer.Typer(cls=_FileByDefault, no_args_is_help=True, help="Show a bucket configuration file, or tune one.")
app.add_typer(buckets, name="buckets")


@buckets.command()
def show(
    file: Annotated[Path, typer.Argument(help="A bucket configuration file (TOML).")],
    model: ModelOption = "demo",
) -> None:
    """Print the ladder, which batch sizes go where, the worst padding, and the memory plan for a model."""
    config = BucketConfig.load(file)
    console = Console()
    console.print(_bucket_table(config))
    batch_size, share = config.ladder.worst_padding()
    console.print(f"worst padding: batch size {batch_size} wastes {100 * share:.0f}% of its bucket's rows")
    console.print(_memory_table(config, model))


def _bucket_table(config: BucketConfig) -> Table:
    table = Table("bucket", "batch sizes", "worst padding", title=f"{len(config.ladder)} buckets")
    below = 0
    for bucket in config.ladder:
        first = below + 1
        sizes = str(bucket) if first == bucket else f"{first}-{bucket}"
        table.add_row(str(bucket), sizes, f"{100 * (bucket - first) / bucket:.0f}%")
        below = bucket
    return table


def _memory_table(config: BucketConfig, model: str) -> Table:
    path = resolve_model_path(model)
    settings = ModelConfig.load(path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    capacity = plan_capacity(config, settings, settings.dtype, device)
    weights = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    cache = capacity.page_bytes * (capacity.total_num_pages + 1)
    rows = capacity.pages_per_row * config.max_batch_size
    table = Table("what", "MiB", "of what", title=f"memory for {model} in {settings.dtype} on {device.type}")
    table.add_row("weights", f"{weights / 2**20:.1f}", "the checkpoint's files")
    table.add_row(
        "key-value cache",
        f"{cache / 2**20:.1f}",
        f"{capacity.total_num_pages} pages of {config.page_size} tokens, {capacity.page_bytes / 2**10:.1f} KiB each, "
        f"{100 * min(capacity.total_num_pages / rows, 1.0):.0f}% of {config.max_batch_size} rows at full length",
    )
    return table


@buckets.command()
def tune(
    record: Annotated[Path, typer.Option(help="Batch sizes that `generate --record-batches` wrote.")],
    out: Annotated[Path, typer.Option(help="Where the tuned configuration goes.")],
    profile: Annotated[Path | None, typer.Option(help="A profile.json; without one, a linear cost model.")] = None,
    config: ConfigOption = None,
    max_graphs: Annotated[int, typer.Option(help="Graphs that the ladder may have.")] = 16,
) -> None:
    """Find the ladder of least expected step time for a recorded load, and write a configuration with it."""
    counts = read_batch_sizes(record)
    base = BucketConfig.load(config) if config else BucketConfig()
    base = base.with_limits(max_batch_size=max(base.max_batch_size, *counts), max_graphs=max_graphs)
    top = base.max_batch_size
    cost = StepCost.from_profile(profile, top) if profile else StepCost.linear(top)
    ladders = best_ladders(counts, cost, top, max_graphs)
    table = Table("ladder", "graphs", "expected ms", "padding", "sizes", title=f"{record}, {cost.source}")
    rows = [("today", base.ladder), *((f"best of {k}", ladder) for k, ladder in enumerate(ladders, 1))]
    for name, ladder in rows:
        sizes = " ".join(str(size) for size in ladder)
        expected, padding = expected_step_ms(ladder, counts, cost), padding_share(ladder, counts)
        table.add_row(name, str(len(ladder)), f"{expected:.4f}", f"{100 * padding:.1f}%", sizes)
    console = Console()
    console.print(table)
    out.write_text(base.with_limits(batch_sizes=list(ladders[-1])).to_toml(), encoding="utf-8")
    console.print(f"wrote {out}")


@app.command()
def profile(
    model: Annotated[str, typer.Option(help="A folder, a repository id, demo, or shape:llama-3.1-8b.")] = "demo",
    config: ConfigOption = None,
    contexts: Annotated[str, typer.Option(help="Tokens in the cache of each row; separated by commas.")] = "32,128",
    steps: Annotated[int, typer.Option(help="Replays to time at each point.")] = 200,
    out: Annotated[Path, typer.Option(help="A folder for profile.json, pictures and report.html.")] = Path("profile"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    trace: Annotated[bool, typer.Option("--trace", help="Also write a Chrome trace of ten steps.")] = False,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Compare two profile.json files instead: before, after.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="How much slower is too slow, as a fraction.")] = 0.1,
) -> None:
    """Measure the decode step of each bucket at each context, beside the floor that memory sets."""
    console = Console()
    if compare is not None:
        raise typer.Exit(_print_comparison(console, *compare, tolerance))
    settings = BucketConfig.load(config) if config else BucketConfig(max_batch_size=16)
    lengths = [int(context) for context in contexts.split(",")]
    runner = load_runner(model, settings, device=device, dtype=dtype, prefix_cache=False, progress=True)
    runner.graphs.capture(progress=True)
    profiler = LatencyProfiler(runner, steps=steps)
    result = profiler.profile(lengths)
    out.mkdir(parents=True, exist_ok=True)
    (out / "profile.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    console.print(profile_table(result))
    console.print(f"read bandwidth {result['read_bandwidth'] / 1e9:.1f} GB/s, measured in the same run")
    if any(row["noisy"] for row in result["rows"]):
        console.print("rows marked noisy: the machine was too busy for their figures to be trusted", style="yellow")
    written = [out / "profile.json", *write_report(result, out)]
    if trace:
        written.append(profiler.write_trace(out / "trace.json", lengths[0]))
    console.print("wrote " + ", ".join(str(path) for path in written), soft_wrap=True)
    runner.close()


def _print_comparison(console: Console, before: Path, after: Path, tolerance: float) -> int:
    changes = compare_profiles(*(json.loads(path.read_text(encoding="utf-8")) for path in (before, after)))
    table = Table("bucket", "context", "before ms", "after ms", "after/before", title=f"{before} -> {after}")
    for change in changes:
        note = " noisy" if change.noisy else ""
        times = (f"{change.before_ms:.4f}", f"{change.after_ms:.4f}", f"{change.ratio:.3f}{note}")
        table.add_row(str(change.bucket), str(change.context), *times)
    console.print(table)
    overall = overall_ratio(changes)
    console.print(f"overall {overall:.3f}, tolerated up to {1 + tolerance:.3f}")
    return 1 if overall > 1 + tolerance else 0


def _print_error(message: str) -> None:
    STDERR.print(f"error: {message}", style="red", highlight=False, soft_wrap=True, markup=False)


def main() -> None:
    """Run the command line; an error is one line and exit code 2, with `--debug` a traceback."""
    try:
        arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
        sys.exit(app(arguments, standalone_mode=False))  # what `typer.Exit` says, or None
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        if message:  # a command that shows its help says nothing more
            _print_error(" ".join(message.split()))
        sys.exit(2)
