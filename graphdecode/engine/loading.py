"""Loads a model and builds its runner and engine from a configuration."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graphdecode.buckets import MOST_DRAFTS
from graphdecode.cache import Checkpoints, PagedKVCache, untouched_zeros
from graphdecode.config import BucketConfig, EngineConfig
from graphdecode.distributed import Follower, Leader, Ranks
from graphdecode.distributed.started import LaunchedRank, start_ranks
from graphdecode.engine.capacity import draft_states_of, kv_format_of, plan_checked_capacity
from graphdecode.engine.engine import Engine
from graphdecode.engine.ranks import Command, LeadingRunner, run
from graphdecode.engine.runner import SLEEP_TAGS, Runner
from graphdecode.engine.steps import DecodeStep, SpeculativeStep, Step, StepSetting
from graphdecode.engine.steps.speculative import DraftSource, ModelDrafts, NgramDrafts
from graphdecode.engine.steps.step import should_mix, step_maker
from graphdecode.errors import ArgumentError
from graphdecode.extensions import load_modules, version_of
from graphdecode.graphs import CaptureError
from graphdecode.kernels.cache.kv_format import format_named
from graphdecode.kernels.native.instructions import instructions
from graphdecode.linear.linear_choice import ChoiceCache
from graphdecode.memory import ReservedMemory, check_can_reserve, collector_paused
from graphdecode.models import (
    Model,
    ModelShape,
    describe_model,
    load_model,
    resolve_device,
    resolve_dtype,
    resolve_model_path,
)
from graphdecode.models.source import open_source
from graphdecode.models.split import split_config
from graphdecode.models.updates import (
    NamedTensors,
    as_named_tensors,
    check_config,
    check_layout,
    check_stored,
)

log = logging.getLogger(__name__)


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
    runner = make_runner(decoder, settings, draft=draft, ranks=ranks)
    options["dtype"] = str(decoder.dtype).removeprefix("torch.")
    runner.reload = WeightReload(model, decoder, partial(load, **options), settings)
    if settings.dtype != "auto" or decoder.dtype != torch.float16 or device.type != "cpu":
        return runner
    known, key = ChoiceCache(), _finite_key(model, settings)
    is_known = known.get(key) is not None
    is_finite = is_known or runner.prompts.has_finite_logits()
    if is_finite if ranks is None else ranks.least(is_finite):
        if not is_known:
            known.put(key, True)
        return runner
    Runner.close(runner)  # only this rank: the others do the same
    del runner, decoder, draft
    why = f"{model}: activations exceed 65504, the largest number in float16, so it is computed in float32"
    warnings.warn(f"{why}; dtype='float32' avoids this warning", RuntimeWarning, stacklevel=2)
    settings = settings.with_settings(dtype="float32")
    return load_runner(model, settings, progress=progress, ranks=ranks)


def _finite_key(model: str | Path, settings: EngineConfig) -> str:
    """Return the key under which it is remembered that a checkpoint's logits are finite in float16."""
    path = resolve_model_path(model)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    stored = "".join(f", {file.name} {found.st_size} {found.st_mtime_ns}" for file in files if (found := file.stat()))
    weights = f"{settings.quantize} {settings.quantize_group_size}, {instructions().name}, {version_of('graphdecode')}"
    return f"finite in float16: {path}, {weights}{stored}"


@dataclass(frozen=True)
class WeightReload:
    """Loads new values of a model's weights, with the options that it was loaded with.

    Attributes:
        name: the model's name, for `open_source`.
        model: the model to update; it is not changed here.
        load: `load_model` with its options.
        settings: the engine's settings.
        given: names of tensors that were given in memory.
    """

    name: str | Path
    model: Model
    load: Callable[..., Model]
    settings: EngineConfig
    given: frozenset[str] = frozenset()

    def __call__(self, weights: str | Path | NamedTensors) -> tuple[Model, WeightReload]:
        """Return a model of the same layout with the new values, and the next reload."""
        name, given = self.name, {}
        if isinstance(weights, (str, Path)):
            name = resolve_model_path(weights)
        else:
            given = as_named_tensors(weights)
            if missing := self.given - given.keys():
                raise ArgumentError(
                    f"weights: {min(missing)} was given before and is in no file: name it again, or give a folder"
                )
        check_config(self.model.config, describe_shard(name, self.settings))
        if self.settings.quantize != "none":
            check_stored(open_source(self.name), open_source(name, given))
        loaded = self.load(name, replaced=given, ties=getattr(self.model.config, "tie_word_embeddings", None))
        check_layout(self.model, loaded)
        return loaded, replace(self, name=name, given=frozenset(given))


def _load_outside(settings: EngineConfig) -> None:
    load_modules(settings.load_modules)
    if settings.step_kind is not None:
        step_maker(settings.step_kind)


def describe_shard(model: str | Path, settings: EngineConfig) -> ModelShape:
    """Return the shape of one rank's shard of a model; raise ArgumentError if it cannot be loaded or split."""
    shape = describe_model(model, model_impl=settings.model_impl, trust_remote_code=settings.trust_remote_code)
    draft = settings.draft_model if settings.speculation == "model" else None
    _check_draft(settings, None if draft is None else describe_model(draft))
    count = settings.tensor_parallel_size
    if count == 1:
        return shape
    if settings.speculation == "model":
        raise ArgumentError(f"tensor_parallel_size={count} goes with the speculation method ngram, not with model")
    return split_config(shape, count)


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
    count, how = config.tensor_parallel_size, (resolve_device(config.device).type, config.collectives)
    launched = LaunchedRank.here(count)
    if launched is None:
        return start_ranks(count, *how, config.rank_limit_seconds, "graphdecode.engine.rank_process")
    met = launched.meet(*how, config.rank_limit_seconds)
    if isinstance(met, Follower):
        raise SystemExit(run(met, captured_runner))
    return met


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


def step_of(settings: EngineConfig, draft: Model | None = None) -> Callable[[StepSetting], Step]:
    """Return the constructor of the step that the settings ask for; `draft`: the draft model, if any."""
    if settings.step_kind is not None:
        return step_maker(settings.step_kind)
    if settings.speculation == "off":
        return DecodeStep
    most = MOST_DRAFTS if isinstance(settings.num_tokens, str) else settings.num_tokens

    def source(setting: StepSetting) -> DraftSource:
        if settings.speculation == "ngram":
            return NgramDrafts(settings.ngram_min, settings.ngram_max)
        if draft is None:
            raise ArgumentError("speculation with a model needs the model: make_runner(..., draft=...)")
        return ModelDrafts(setting, draft, most)

    return partial(SpeculativeStep, source=source, num_drafts=most, adapts=isinstance(settings.num_tokens, str))


def _check_draft(settings: EngineConfig, draft: ModelShape | None) -> None:
    """Raise ArgumentError if a draft model has recurrent states, or latent keys of 8 bits."""
    if draft is None:
        return
    kv_format_of(settings, draft, draft.dtype)
    if draft.recurrent:
        raise ArgumentError(
            f"speculation={settings.speculation!r} needs the states before each draft; a draft model has no recurrent "
            "states"
        )


def make_runner(
    decoder: Model,
    config: EngineConfig | BucketConfig,
    *,
    step: Callable[[StepSetting], Step] | None = None,
    draft: Model | None = None,
    ranks: Ranks | None = None,
    **keywords: Any,
) -> Runner:
    """Allocate a loaded model's cache and buffers; see `load_runner`.

    `step` overrides the settings' kind of step. The cache of the draft model `draft` has as many pages.
    """
    settings, device = EngineConfig.of(config, **keywords), decoder.device
    reserved = reserved_memory(settings, device)
    if reserved:
        reserved["weights"].take(decoder.constants)
    share = 1.0  # share of the memory; the rest is for the draft model's cache, and other ranks on this CPU
    if draft is not None:
        target, small = (
            sum(keys.entries * keys.head_dim for keys in each.config.kept_keys if keys is not None)
            for each in (decoder, draft)
        )
        share = target / (target + small)
    if ranks is not None and device.type == "cpu":
        share /= ranks.count
    if share < 1.0:
        settings = settings.with_settings(memory_fraction=settings.buckets.memory_fraction * share)
    may_roll = decoder.takes_rolling_pages and step is None
    plan = partial(plan_checked_capacity, model=decoder.config, dtype=decoder.dtype, device=device, may_roll=may_roll)
    capacity, mixes = plan(settings), should_mix(decoder)
    if ranks is not None:  # they differ slightly: take the least
        settings = settings.with_settings(total_num_pages=ranks.least(capacity.total_num_pages))
        capacity, mixes = plan(settings), bool(ranks.least(mixes))
    buckets, recurrent = settings.buckets, decoder.config.recurrent
    _check_draft(settings, None if draft is None else draft.config)
    has_states = any(kept is not None and kept.shapes for kept in recurrent)
    shares, checkpoints = settings.prefix_cache, None
    if has_states and shares and not settings.state_checkpoints:
        log.info("prefixes are not shared: the model has recurrent states, and state_checkpoints is 0")
        shares = False
    elif has_states and shares:
        interval = -(-settings.state_checkpoint_tokens // buckets.page_size)
        checkpoints = Checkpoints(settings.state_checkpoints, interval)
    cache = PagedKVCache(
        num_layers=decoder.num_layers,
        total_num_pages=capacity.total_num_pages,
        page_size=buckets.page_size,
        max_pages_per_row=capacity.pages_per_row,
        num_kv_heads=decoder.config.num_key_value_heads,
        head_dim=decoder.config.head_dim,
        dtype=format_named(settings.kv_cache_dtype, decoder.dtype).dtype,
        device=device,
        prefix_caching=shares,
        scales=decoder.cache_scales,
        recurrent=recurrent,
        layer_keys=decoder.config.layer_keys,
        state_rows=buckets.max_batch_size if recurrent or capacity.rolling is not None else 0,
        rolling=capacity.rolling,
        checkpoints=checkpoints,
        draft_states=draft_states_of(settings) if recurrent else 0,
        zeros=reserved["kv_cache"].zeros if reserved else untouched_zeros,
    )
    runner_class: Callable[..., Runner] = partial(LeadingRunner, leader=ranks) if isinstance(ranks, Leader) else Runner
    setting = StepSetting(
        decoder,
        cache.layers,
        cache.null_page,
        cache.dtype,
        buckets.page_size,
        capacity.pages_per_row,
        buckets,
        settings.batch_invariant,
        min(settings.prefill_tokens(device.type), decoder.most_prompt_tokens),
        mixes,
        cache.null_state_row,
        cache.rolling,
        cache.draft_state_row,
    )
    around = (lambda _: nullcontext()) if ranks is None else ranks.collectives.captured
    runner = runner_class(setting, cache, capacity, step=step or step_of(settings, draft), around=around)
    runner.reserved = reserved
    return runner


def reserved_memory(settings: EngineConfig, device: torch.device) -> dict[str, ReservedMemory]:
    """Return memory of a GPU that can be unmapped, by vLLM's tags; none if nobody wants to sleep."""
    wanted = SLEEP_TAGS if settings.enable_sleep_mode and device.type == "cuda" else ()
    return {tag: ReservedMemory(device) for tag in wanted}
