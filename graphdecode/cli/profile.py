"""`graphdecode profile`: measure the decode step, or compare two measurements."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphdecode.cli.options import ConfigOption, settings_of, table_of, wide_console, with_settings
from graphdecode.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console

    from graphdecode.profiling.comparison import PointChange


@with_settings("device", "dtype", "quantize", "model_impl")
def profile(
    overrides: dict[str, Any],
    model: Annotated[str, typer.Option(help="A folder, a repository id, demo, or shape:llama-3.1-8b.")] = "demo",
    config: ConfigOption = None,
    contexts: Annotated[str, typer.Option(help="Tokens in the cache of each row; separated by commas.")] = "32,128",
    steps: Annotated[int, typer.Option(help="Replays to time at each point.")] = 200,
    out: Annotated[Path, typer.Option(help="A folder for profile.json, pictures and report.html.")] = Path("profile"),
    trace: Annotated[bool, typer.Option("--trace", help="Also write a Chrome trace of ten steps.")] = False,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Compare two profile.json files instead: before, after.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="How much slower is tolerated, as a fraction.")] = 0.1,
) -> None:
    """Measure the decode step of each bucket at each context, and its floor by memory bandwidth."""
    console = wide_console()
    if compare is not None:
        raise typer.Exit(_print_comparison(console, *compare, tolerance))
    try:
        lengths = [int(part) for part in contexts.split(",")]
    except ValueError:
        raise ArgumentError(
            f"--contexts must be whole numbers separated by commas, such as 1,8,64; got {contexts!r}"
        ) from None
    if steps < 1:
        raise ArgumentError(f"--steps must be >= 1, got {steps}")
    if out.exists() and not out.is_dir():
        raise ArgumentError(f"--out must be a folder, or not exist, got {out}")
    settings = settings_of(config, **overrides)
    from graphdecode.engine.loading import load_runner
    from graphdecode.profiling.latency import STEPS_PER_STAGING, LatencyProfiler
    from graphdecode.profiling.report import MISSING, profile_tables, summary, write_report

    if config is None:  # a cache no larger than needed
        longest = max(*lengths, 1) + STEPS_PER_STAGING
        settings = settings.with_settings(max_sequence_length=longest)
    runner = load_runner(model, settings, prefix_cache=False, progress=True)
    runner.graphs.capture(progress=True, kinds=["steps"])
    profiler = LatencyProfiler(runner, steps=steps)
    result = profiler.profile(lengths, model=model)
    out.mkdir(parents=True, exist_ok=True)
    (out / "profile.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    for table in profile_tables(result, console.width):
        console.print(table)
    for line in summary(result):
        console.print(line, highlight=False, style="yellow" if line.startswith("too noisy") else None)
    can_draw = importlib.util.find_spec("matplotlib") is not None
    if not can_draw:
        console.print(f"the report has no pictures: {MISSING}", style="yellow", markup=False)
    written = [out / "profile.json", *write_report(result, out, draw=can_draw)]
    if trace:
        written.append(profiler.write_trace(out / "trace.json", lengths[0]))
    console.print("wrote " + ", ".join(str(path) for path in written), soft_wrap=True)
    runner.close()


def _print_comparison(console: Console, before: Path, after: Path, tolerance: float) -> int:
    if tolerance < 0:
        raise ArgumentError(f"--tolerance must be >= 0, got {tolerance}")
    from graphdecode.profiling.comparison import compare_profiles, read_profile

    comparison = compare_profiles(read_profile(before), read_profile(after))
    slower, unclear = comparison.slower(tolerance), comparison.unclear(tolerance)
    columns: dict[str, Callable[[PointChange], str]] = {
        "bucket": lambda change: str(change.bucket),
        "context": lambda change: str(change.context),
        "before ms": lambda change: f"{change.before_ms:.4f}",
        "after ms": lambda change: f"{change.after_ms:.4f}",
        "after/before": lambda change: f"{change.ratio:.3f}",
        "quickest rounds": lambda change: f"{change.quiet_ratio:.3f}",
        "noise": lambda change: f"{100 * change.noise:.1f}%",
        "": lambda change: "slower" if change in slower else "too noisy to tell" if change in unclear else "",
    }
    title = f"{before} -> {after}: median step, and that of the quickest round"
    console.print(table_of(comparison.changes, columns, left=[""], title=title))
    for difference in comparison.differences:
        console.print(f"not the same in both: {difference}", style="yellow", markup=False)
    console.print(
        f"overall {comparison.overall:.3f}, quickest rounds {comparison.overall_quiet:.3f}, "
        f"tolerated up to {1 + tolerance:.3f}; {len(slower)} of {len(comparison.changes)} points slower"
    )
    if unclear:
        console.print(
            f"too noisy to tell at {len(unclear)} of {len(comparison.changes)} points: repeat it on an idle machine",
            style="yellow",
        )
    return 1 if slower else 0
