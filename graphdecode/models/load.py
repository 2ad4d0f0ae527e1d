"""Loads a model from a source of weights."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from graphdecode.distributed import Collectives
from graphdecode.errors import ArgumentError
from graphdecode.memory import start_joining_pages, trim_heap
from graphdecode.models.adapters import AdapterSlots
from graphdecode.models.cache_scales import read_cache_scales
from graphdecode.models.compute import FormRequest, form_options
from graphdecode.models.config import ModelConfig, ModelShape
from graphdecode.models.decoder import Decoder
from graphdecode.models.family import HEAD, family_of
from graphdecode.models.fit import checked_weight_map, fitted_config, skipped_tensors, summary
from graphdecode.models.model import Model
from graphdecode.models.quantize_on_load import DEQUANTIZE, Dequantized, quantizing_source, unless_stored_so
from graphdecode.models.source import Source, adopted_folder, open_source
from graphdecode.models.split import SplitSource, split_config
from graphdecode.models.weight_map import WeightMap
from graphdecode.models.weights import Weights, can_adapt

log = logging.getLogger(__name__)
_TRIMMED_LAYERS = 4  # layers between two calls of `trim_heap`, which takes milliseconds


def load_model(
    model: str | Path,
    *,
    device: torch.device | str,
    dtype: str | torch.dtype = "auto",
    max_sequence_length: int | None = None,
    batch_sizes: tuple[int, ...] = (1, 8),
    quantize: str | None = None,
    quantize_group_size: int | None = None,
    batch_invariant: bool = False,
    model_impl: str = "auto",
    trust_remote_code: bool = False,
    progress: bool = False,
    shared: Collectives | None = None,
    max_adapters: int = 0,
    max_adapter_rank: int = 16,
    adapt_experts: bool = False,
    replaced: Mapping[str, Tensor] | None = None,
    ties: bool | None = None,
) -> Model:
    """Load a decoder; a ValueError says what cannot be used, and nothing stays loaded.

    Args:
        model: a folder, a `.gguf` file, a repository id, `"demo"`, or random weights: `"shape:llama-3.1-8b"`.
        device: where the weights go.
        dtype: dtype of weights and activations; see `resolve_dtype`.
        max_sequence_length: positions of the rotary table; None: the model's maximum.
        batch_sizes: decode batch sizes, for the choice of linear paths.
        quantize: None keeps quantized weights as stored (GGUF blocks only if there are kernels for them; `"gguf"`
            requires these); `"none"` dequantizes all; `"int8"`, `"int4"`, `"fp8"`, `"q8_0"` and `"q4_k"` quantize plain
            weights on load.
        quantize_group_size: columns that share a scale, for `"int4"` and `"int8"`; None: the default.
        batch_invariant: use only paths whose result for a row does not depend on the number of rows.
        model_impl: one of `MODEL_IMPLS`.
        trust_remote_code: whether transformers may run the Python code of a checkpoint.
        progress: show a bar on standard error.
        shared: the ranks' collectives, to load one rank's shard.
        max_adapters, max_adapter_rank, adapt_experts: adapter slots in each product (0: none), their largest rank, and
            whether experts' products have some, too.
        replaced: plain tensors that replace the model's, by name; the model is only copied from: no huge pages.
        ties: whether the output layer must be the embedding, or must not, as in the model that is copied to.
    """
    device = torch.device(device)
    source = open_source(model, replaced)
    quantize = quantize and unless_stored_so(quantize, source)
    dequantizes = quantize == DEQUANTIZE
    folder = adopted_folder(source, model_impl, trust_remote_code=trust_remote_code)
    stated = source.config() if folder is None else folder.config
    config = fitted_config(source, stated, ties=ties) if isinstance(stated, ModelConfig) else stated
    if folder is not None and shared is not None:
        split_config(config, shared.count)  # raises
    request = FormRequest(dtype, batch_sizes, None if dequantizes else quantize, quantize_group_size, batch_invariant)
    options = form_options(config, device, request)
    slots = (max_adapters, max_adapter_rank, adapt_experts)
    if folder is not None:
        if options.quantize != request.quantize:
            raise ArgumentError(f"quantize={quantize!r} is not available for a model that transformers runs")
        loaded: Model = folder.load(source, options, slots, progress=progress, replaced=replaced or {})
    else:
        assert isinstance(config, ModelConfig)
        family, weight_map = family_of(config.architecture), checked_weight_map(source, source.name, config)
        if replaced is None:
            _warn_of_differences(source, config, stated)
        quantizing = None
        if request.quantize or quantize_group_size is not None:
            quantizing = quantizing_source(source, config, options, request.quantize, quantize_group_size)
        whole_source = quantizing or (Dequantized(source) if dequantizes else source)
        rank_map = weight_map = weight_map if quantizing is None else quantizing.weight_map
        positions = min(max_sequence_length or config.max_position_embeddings, config.max_position_embeddings)
        scales = read_cache_scales(source, config.num_hidden_layers, config.num_key_value_heads)
        whole, layouts = config, family.layouts(config) if max_adapters else ()
        shard = None
        if shared is not None:
            shard = SplitSource(whole_source, weight_map, shared.rank, shared.count)
            config, rank_map = split_config(config, shared.count), shard.weight_map
        adapters = AdapterSlots(*slots, options.dtype, device, whole, layouts) if max_adapters else None
        weights = Weights(shard or whole_source, rank_map, options, positions, family.norm_offset, shared, adapters)
        loaded = _build(config, weights, scales, weight_map, progress)
    trim_heap()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the KV cache is sized by free memory, and tuning has allocated much
    elif device.type == "cpu" and replaced is None:
        start_joining_pages(loaded.constants)
    return loaded


def _warn_of_differences(source: Source, config: ModelConfig, stated: ModelShape) -> None:
    """Log what a configuration ties and the tensors do not, and which tensors are not read."""
    if config != stated and HEAD in source.tensors:
        log.warning("%s: %s has values of its own, and is used although tie_word_embeddings is true", source.name, HEAD)
    elif config != stated:
        log.warning(
            "%s: there is no %s: the model is for embeddings, and generates nothing of sense", source.name, HEAD
        )
    skipped = skipped_tensors(source, config)
    if skipped:
        log.warning("%s: %d tensors are skipped: %s", source.name, len(skipped), summary(skipped))


def _build(
    config: ModelConfig, weights: Weights, scales: list[tuple[float, float]], whole: WeightMap, progress: bool
) -> Decoder:
    """Build a model, or a rank's shard of it; `whole` is the whole model's weight map."""
    family = family_of(config.architecture)
    stem = family.stem(config, weights)
    layers = []
    numbers = range(config.num_hidden_layers)  # bars take a process-wide lock: make none without `progress`
    for index in tqdm(numbers, desc="loading", unit="layer", disable=None, leave=False) if progress else numbers:
        layers.append(family.layer(config, weights, index))
        if index % _TRIMMED_LAYERS == 0:
            trim_heap()
    head = family.head(config, weights, stem)
    decoder = Decoder(config, stem, layers, head, cache_scales=scales, adapters=weights.adapters)
    if weights.adapters is not None:
        weights.adapters.keep(decoder.constants)
        slots = weights.adapters.parts  # adapters are read whole, then split
        slots.update({name: whole[name] for name in slots if can_adapt(name) and slots[name][0].split is not None})
        if len(stem.embedding) == config.vocab_size:  # all of it, not quantized
            names = [layout["embedding"][0].name for layout in (whole, *weights.adapters.layouts)]
            names += [HEAD] * ("lm_head" not in whole)
            weights.adapters.bases.update({name.removesuffix(".weight"): stem.embedding for name in names})
    return decoder
