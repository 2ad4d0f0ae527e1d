"""Adapters in PEFT's folders: `adapter_config.json`, and matrices in safetensors; never a pickle."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graphdecode.errors import shown
from graphdecode.hub.model_path import refuse_link_outside
from graphdecode.models.low_rank import AdapterError, LowRank, Stack
from graphdecode.models.peft.fields import ADAPTER_FILE, read_settings

ADAPTER_WEIGHTS = "adapter_model.safetensors"
HoldingWeights: TypeAlias = Callable[[], AbstractContextManager[None]]
_MOST_ALPHA = 1e30
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>embedding_[AB]|[AB]\.weight)")
# PEFT saves what is below an adapted embedding or output layer, too: the base model has it
_BASE_WEIGHT = re.compile(
    r"base_model\.model\.(?P<module>(.+\.)?(embed_tokens|embeddings|lm_head))\.base_layer\.weight"
)
_TEXT = re.compile(r"\blanguage_model\.")  # the decoder of a multimodal model
# what training kept beside A and B, and nothing else reads
_OF_TRAINING = re.compile(r"base_model\.model\..+\.lora_(velora_embed|monteclora_sampler\..+)")
_LEAST_HALF, _CHUNK_ROWS = 2.0**-24, 4096  # the smallest float16; rows of a table that are compared at once
_MATCHING_S = 1.0  # seconds that all expressions of an adapter may take: some take years


def read_peft(
    folder: Path,
    weight_names: Container[str],
    stacks: Mapping[str, Stack],
    bases: Mapping[str, Tensor],
    holding_weights: HoldingWeights,
) -> Iterator[tuple[str, LowRank]]:
    """Yield what an adapter adds, by the names of weights; raise AdapterError if it cannot be used.

    Args:
        folder: as PEFT saves it.
        weight_names: names of weights; of others nothing is checked.
        stacks: of experts, by name, in the order of their module.
        bases: by module, plain weights of which the file may have a copy, which must be the same.
        holding_weights: returns a context in which these are in memory and do not change.
    """
    settings = read_settings(folder)
    matrices = _matrices(folder, bases, holding_weights)
    until, targets = time.monotonic() + _MATCHING_S, settings.get("target_parameters") or []
    rank_of, alpha_of = (_pattern(folder, settings, name, until) for name in ("rank_pattern", "alpha_pattern"))
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise AdapterError(f"{folder / ADAPTER_FILE}: target_parameters is {shown(targets)}, and no list of names")
    for wrapper, pair in matrices.items():
        weight, text = _weight_of(wrapper, targets, stacks), None
        if weight not in weight_names:
            weight, text = _weight_of(_of_text(wrapper), targets, stacks), _TEXT.search(wrapper)
        module, version = weight.removesuffix(".weight"), settings.get("peft_version")
        low_rank = stacks[weight].oriented(pair, version) if weight in stacks else pair
        if low_rank is None:
            raise AdapterError(f"{folder}: {module} is of square weights, and PEFT {shown(version)} may transpose them")
        if weight not in weight_names:
            yield weight, low_rank
            continue
        rank, name = low_rank.rank, weight if _is_target(weight, targets) else module  # what PEFT matches
        if text is not None:
            name = name[: text.start()] + text[0] + name[text.start() :]
        stated = rank_of(name, settings.get("r"))
        if stated != rank:
            raise AdapterError(f"{folder}: {module} has rank {rank}, and {ADAPTER_FILE} says {shown(stated)}")
        alpha = alpha_of(name, settings.get("lora_alpha"))
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not abs(alpha) <= _MOST_ALPHA:
            raise AdapterError(f"{folder}: lora_alpha of {module} is {shown(alpha)}, and not a number")
        # with rsLoRA (Kalajdzievski, 2023) alpha / sqrt(rank)
        divisor = math.sqrt(rank) if settings.get("use_rslora") else rank
        yield weight, low_rank._replace(scale=alpha / (divisor or 1))


def _of_text(module: str) -> str:
    """Return the name that a module of a multimodal model's decoder has in the decoder alone."""
    return _TEXT.sub("", module, count=1)


def _is_target(weight: str, targets: Iterable[Any]) -> bool:
    return any(f".{weight}".endswith(f".{target}") for target in targets)


def _weight_of(wrapper: str, targets: Iterable[Any], stacks: Iterable[str]) -> str:
    """Return the weight that a module of PEFT's model changes.

    PEFT wraps the stacks of a module one after another: the first one's wrapper is the `base_layer` of the second's.
    """
    module = wrapper
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
    depth = (len(wrapper) - len(module)) // len(".base_layer")
    wrapped = [name for name in stacks if name.rpartition(".")[0] == module and _is_target(name, targets)]
    return wrapped[-1 - depth] if depth < len(wrapped) else f"{wrapper}.weight"


def _matrices(folder: Path, bases: Mapping[str, Tensor], holding_weights: HoldingWeights) -> dict[str, LowRank]:
    """Return the matrices by module, not scaled yet."""
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        raise AdapterError(f"{folder} holds no {ADAPTER_WEIGHTS}; pickles are not read")
    refuse_link_outside(folder, ADAPTER_WEIGHTS, AdapterError)
    halves: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (not a mapping)
                match, base = _NAME.fullmatch(name), _BASE_WEIGHT.fullmatch(name)
                if match is not None:
                    halves.setdefault(match["module"], {})[match["half"]] = reader.get_tensor(name)
                elif base is None and _OF_TRAINING.fullmatch(name) is None:
                    raise AdapterError(f"{file}: {name} is not the A or B of a product")
                elif base is not None and _of_text(base["module"]) in bases:
                    with holding_weights():
                        is_same = _is_same(bases[_of_text(base["module"])], reader.get_tensor(name))
                    if not is_same:
                        raise AdapterError(f"{file}: {name} is not the base model's: it is of another, or was trained")
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{file}: {error}") from error
    if not halves:
        raise AdapterError(f"{file}: it is empty")
    for module, pair in halves.items():
        if len(pair) > 2:
            raise AdapterError(f"{file}: {module} has matrices of an embedding, and of another product")
        if pair.keys() not in ({"A.weight", "B.weight"}, {"embedding_A", "embedding_B"}):
            raise AdapterError(f"{file}: {module} has only one of A and B")
    return {
        module: LowRank(pair[first], pair[second], 1.0, first == "embedding_A")
        for module, pair in halves.items()
        for first, second in [sorted(pair)]
    }


def _is_same(base: Tensor, saved: Tensor) -> bool:
    """Whether two copies of a weight differ by no more than the rounding to their types."""
    if base.shape != saved.shape or not saved.is_floating_point():
        return False
    is_exact = base.dtype == saved.dtype
    relative = 0.0 if is_exact else max(torch.finfo(each.dtype).eps for each in (base, saved))
    return all(
        torch.allclose(one.float(), other.to(one.device).float(), rtol=relative, atol=0.0 if is_exact else _LEAST_HALF)
        for one, other in zip(base.split(_CHUNK_ROWS), saved.split(_CHUNK_ROWS), strict=True)
    )


def _pattern(folder: Path, settings: Mapping[str, Any], field: str, until: float) -> Callable[[str, Any], Any]:
    """Return what the expressions of a field say of a module; of one that none matches, the second argument."""
    import regex  # only patterns need it

    patterns, file, expressions = settings.get(field) or {}, folder / ADAPTER_FILE, []
    if not isinstance(patterns, dict):
        raise AdapterError(f"{file}: {field} is {shown(patterns)}, and no object")
    for key, value in patterns.items():
        try:
            expressions.append((regex.compile(rf"(.*\.)?({key})$"), value))  # as PEFT matches
        except (regex.error, RecursionError) as error:
            raise AdapterError(f"{file}: {field} has {shown(key)}: {error}") from error

    def value_of(name: str, otherwise: Any) -> Any:
        try:
            for expression, value in expressions:
                if expression.match(name, timeout=max(until - time.monotonic(), 1e-3), concurrent=True):
                    return value
        except TimeoutError as error:
            raise AdapterError(f"{file}: {field} takes longer than {_MATCHING_S} s to match") from error
        return otherwise

    return value_of
