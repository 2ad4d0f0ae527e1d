"""Builds the runner of a loaded model: its cache, buffers and step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from graphdecode.buckets import MOST_DRAFTS
from graphdecode.cache import Checkpoints, PagedKVCache, untouched_zeros
from graphdecode.config import BucketConfig, EngineConfig
from graphdecode.distributed import Leader, Ranks
from graphdecode.engine.capacity import draft_states_of, plan_checked_capacity
from graphdecode.engine.ranks import LeadingRunner
from graphdecode.engine.runner import SLEEP_TAGS, Runner
from graphdecode.engine.shard import check_draft
from graphdecode.engine.steps import DecodeStep, SpeculativeStep, Step, StepSetting
from graphdecode.engine.steps.speculative import DraftSource, ModelDrafts, NgramDrafts
from graphdecode.engine.steps.step import should_mix, step_maker
from graphdecode.errors import ArgumentError
from graphdecode.kernels.cache.kv_format import format_named
from graphdecode.memory import ReservedMemory
from graphdecode.models import Model

log = logging.getLogger(__name__)


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
            sum(keys.entries * keys.head_dim for keys in each.config.cached_keys if keys is not None)
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
    check_draft(settings, None if draft is None else draft.config)
    has_states = any(state is not None and state.shapes for state in recurrent)
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
        "mean" if settings.pooling == "mean" else "last",
    )
    around = (lambda _: nullcontext()) if ranks is None else ranks.collectives.captured
    runner = runner_class(setting, cache, capacity, step=step or step_of(settings, draft), around=around)
    runner.reserved = reserved
    return runner


def reserved_memory(settings: EngineConfig, device: torch.device) -> dict[str, ReservedMemory]:
    """Return memory of a GPU that can be unmapped, by vLLM's tags; none if nobody wants to sleep."""
    tags = SLEEP_TAGS if settings.enable_sleep_mode and device.type == "cuda" else ()
    return {tag: ReservedMemory(device) for tag in tags}
