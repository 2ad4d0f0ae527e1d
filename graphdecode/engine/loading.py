"""Loads a model, and its engine, from a configuration."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from graphdecode.config import BucketConfig, EngineConfig
from graphdecode.distributed import Follower, Leader, Ranks
from graphdecode.distributed.started import LaunchedRank, start_ranks
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.capacity import plan_checked_capacity
from graphdecode.engine.engine import Engine
from graphdecode.engine.float16 import fits_float16
from graphdecode.engine.ranks import Command, LeadingRunner, run
from graphdecode.engine.reload import WeightReload, damaged_tensor
from graphdecode.engine.runner import Runner
from graphdecode.engine.shard import describe_shard
from graphdecode.engine.steps.step import step_maker
from graphdecode.errors import ArgumentError
from graphdecode.extensions import load_modules
from graphdecode.graphs import CaptureError
from graphdecode.memory import check_can_reserve, collector_paused
from graphdecode.models import load_model, resolve_device, resolve_dtype
from graphdecode.models.sentence_transformers import sentence_files_of


def load_runner(
    model: str | Path,
    config: EngineConfig | BucketConfig | str | Path | None = None,
    *,
    progress: bool = False,
    ranks: Ranks | None = None,
    **keywords: Any,
) -> Runner:
    """Load a model, and allocate its cache and buffers; nothing is captured yet.

    Args:
        model: a checkpoint folder, a repository id, `"demo"`, or a shape such as `"shape:llama-3.1-8b"`.
        config: all settings, only those of the buckets, or the path of a file.
        progress: show a bar on standard error while loading.
        ranks: the ranks that share the model; each of them calls this.
        keywords: settings that override those of `config`; see `EngineConfig`.
    """
    settings = EngineConfig.of(config, **keywords)
    _load_outside(settings)
    if ranks is None and settings.tensor_parallel_size > 1:
        raise ArgumentError(f"tensor_parallel_size is {settings.tensor_parallel_size}, and one process runs one rank")
    device = resolve_device(settings.device) if ranks is None else ranks.device
    if settings.enable_sleep_mode and device.type == "cuda":
        check_can_reserve()
    shape = describe_shard(model, settings)
    plan_checked_capacity(
        settings,
        shape,
        resolve_dtype(settings.dtype, shape.dtype, device, integer_quantized=shape.integer_quantized),
        device,
    )
    load = partial(
        load_model,
        device=device,
        max_sequence_length=settings.buckets.max_sequence_length,
        batch_sizes=settings.buckets.ladder.sizes,
        trust_remote_code=settings.trust_remote_code,
        progress=progress,
    )
    names = ("dtype", "quantize", "quantize_group_size", "batch_invariant", "model_impl")
    options = {name: getattr(settings, name) for name in (*names, "max_adapters", "max_adapter_rank", "adapt_experts")}
    options["shared"] = None if ranks is None else ranks.collectives
    decoder = load(model, **options)
    draft = None
    if settings.speculation == "model" and settings.draft_model is not None:
        draft = load(settings.draft_model, dtype=str(decoder.dtype).removeprefix("torch."))
    files = sentence_files_of(model)
    if settings.pooling == "auto":
        settings = settings.with_settings(pooling=files.pooling)
    runner = make_runner(decoder, settings, draft=draft, ranks=ranks)
    if files.label_ids is not None:
        runner.keep_labels(files.label_ids)
    runner.damaged_tensor = partial(damaged_tensor, model)
    options["dtype"] = str(decoder.dtype).removeprefix("torch.")
    runner.reload = WeightReload(model, decoder, partial(load, **options), settings)
    if settings.dtype != "auto" or fits_float16(runner, model, settings, ranks):
        return runner
    Runner.close(runner)  # only this rank: the others do the same
    del runner, decoder, draft
    reason = f"{model}: activations exceed 65504, the largest number in float16, so it is computed in float32"
    warnings.warn(f"{reason}; dtype='float32' avoids this warning", RuntimeWarning, stacklevel=2)
    settings = settings.with_settings(dtype="float32")
    return load_runner(model, settings, progress=progress, ranks=ranks)


def _load_outside(settings: EngineConfig) -> None:
    load_modules(settings.load_modules)
    if settings.step_kind is not None:
        step_maker(settings.step_kind)


def load_engine(
    model: str | Path,
    config: EngineConfig,
    *,
    progress: bool = False,
    ranks: Leader | None = None,
    eos_token_id: int | None = None,
) -> Engine:
    """Load a model, warm up and capture the graphs; see `load_runner`.

    `ranks` share the model and outlive the engine; None: they are started if the settings ask for them, and end with
    the engine. `eos_token_id`: see `Engine`. Raises RankError if one fails.
    """
    _load_outside(config)
    if config.tensor_parallel_size == 1:
        runner = captured_runner(model, config, progress=progress)
    else:
        describe_shard(model, config)  # refuse before any process is started
        leader = start_ranks_of(config) if ranks is None else ranks
        try:
            leader.send(Command.LOAD, payload=json.dumps({"model": str(model), "config": config.to_toml()}).encode())
            runner = captured_runner(model, config, progress=progress, ranks=leader)
            assert isinstance(runner, LeadingRunner)
            runner.lead(ends_ranks=ranks is None)
        except BaseException as error:
            try:
                leader.explain(error)
            finally:
                leader.close()
            raise
    return Engine(runner, seed=config.seed, target_itl_ms=config.target_itl_ms, eos_token_id=eos_token_id)


def start_ranks_of(config: EngineConfig) -> Leader:
    """Start the other ranks' processes, or join those that torchrun has started.

    In torchrun's processes other than rank 0, this runs until rank 0 ends the group, and exits.
    """
    count, group_options = config.tensor_parallel_size, (resolve_device(config.device).type, config.collectives)
    launched = LaunchedRank.from_environment(count)
    if launched is None:
        return start_ranks(count, *group_options, config.rank_limit_seconds, "graphdecode.engine.rank_process")
    group = launched.join(*group_options, config.rank_limit_seconds)
    if isinstance(group, Follower):
        raise SystemExit(run(group, captured_runner))
    return group


@collector_paused()
def captured_runner(
    model: str | Path, config: EngineConfig, ranks: Ranks | None = None, *, progress: bool = False
) -> Runner:
    """Return a runner whose graphs are captured; see `load_engine`. All ranks call it."""
    runner = load_runner(model, config, progress=progress, ranks=ranks)
    if runner.model.device.type == "cuda":  # a CPU compiles nothing while it serves
        runner.warm_up()
    try:
        runner.graphs.capture(progress)
    except CaptureError as error:
        instead = "the model can still be run without graphs: backend='eager' ([capture] in a file)"
        error.args = (f"{error}; {instead}",)
        raise
    runner.buffers.freeze()
    return runner
