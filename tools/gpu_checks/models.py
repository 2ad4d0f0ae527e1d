"""Shapes with fewer layers, the runner of a shape, and models with other products over the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from graphdecode.config import BucketConfig
from graphdecode.engine.loading import load_runner
from graphdecode.engine.runner import Runner
from graphdecode.hub.model_path import SHAPE_PREFIX
from graphdecode.linear.composite import LinearWrapper, MergedLinear
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.unquantized import UnquantizedLinear
from graphdecode.linear.weight_form import WeightForm
from graphdecode.models import Decoder
from graphdecode.models.blocks import Block
from graphdecode.models.shapes import SHAPES
from graphdecode.profiling.latency import STEPS_PER_STAGING

SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "prefix_cache": False, "model_impl": "native"}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "num_attention_heads": 4}


def shape_of(name: str, *, layers: int | None = None, is_small: bool = False) -> str:
    """Return the name of a shape with another number of layers; small ones are for rehearsals on a CPU."""
    changed: dict[str, Any] = SHAPES[name] | ({} if layers is None else {"num_hidden_layers": layers})
    if is_small:
        changed |= SMALL | {"num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 1}
    own = f"{name}-{'small' if is_small else layers or 'whole'}"
    SHAPES[own] = changed
    return SHAPE_PREFIX + own


def runner_of(
    shape: str, batch_sizes: Sequence[int], context: int, device: str, quantize: str | None = None, **options: Any
) -> Runner:
    """Return a runner in bf16 for a batch size and context, not captured yet."""
    longest = context + 2 * STEPS_PER_STAGING
    config = BucketConfig(
        max_batch_size=max(batch_sizes),
        max_sequence_length=longest,
        batch_sizes=sorted(set(batch_sizes)),
        total_num_pages=max(batch_sizes) * (-(-longest // 16) + 1),
    )
    return load_runner(shape, config, quantize=quantize, device=device, **SETTINGS, **options)


def prompt_runner_of(shape: str, longest: int, device: str, quantize: str | None = None) -> Runner:
    """Return a runner in bf16 for one prompt, not captured yet."""
    config = BucketConfig(max_batch_size=1, max_sequence_length=longest + 16)
    return load_runner(shape, config, quantize=quantize, device=device, **SETTINGS)


def with_choices(part: Any, change: Callable[[LinearChoice], LinearChoice | None]) -> Any:
    """Return a block or weight whose plain products use other kernels; a `change` to None is cuBLAS."""
    if isinstance(part, UnquantizedLinear):
        changed = {rows: change(choice) for rows, choice in part.choices.items()}
        return replace(part, choices={rows: choice for rows, choice in changed.items() if choice is not None})
    if isinstance(part, MergedLinear):
        return replace(part, forms=tuple(with_choices(form, change) for form in part.forms))
    if not isinstance(part, (Block, LinearWrapper)):
        return part
    inner = {name: value for name, value in vars(part).items() if isinstance(value, (Block, WeightForm))}
    return replace(part, **{name: with_choices(value, change) for name, value in inner.items()})  # type: ignore[type-var]


def decoder_with(model: Decoder, change: Callable[[LinearChoice], LinearChoice | None]) -> Decoder:
    """Return a decoder over the same weights; see `with_choices`."""
    layers, head = [with_choices(layer, change) for layer in model.layers], with_choices(model.head, change)
    return Decoder(model.config, model.stem, layers, head, model.cache_scales, model.adapters)


def variant(runner: Runner, change: Callable[[LinearChoice], LinearChoice | None]) -> Runner:
    """Return a captured runner with other products over the same weights and cache."""
    model = decoder_with(cast(Decoder, runner.model), change)
    found = Runner(replace(runner.setting, model=model), runner.cache, runner.capacity)
    found.graphs.capture(progress=False)
    return found
