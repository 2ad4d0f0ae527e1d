"""Whether a model's activations fit float16, which `dtype="auto"` computes in where weights are quantized integers."""

from pathlib import Path

import torch

from graphdecode.config import EngineConfig
from graphdecode.distributed import Ranks
from graphdecode.engine.runner import Runner
from graphdecode.extensions import version_of
from graphdecode.kernels.native.instructions import instructions
from graphdecode.linear.linear_choice import ChoiceCache
from graphdecode.models import resolve_model_path


def fits_float16(runner: Runner, model: str | Path, settings: EngineConfig, ranks: Ranks | None) -> bool:
    """Return False if a model that a CPU computes in float16 has other logits than finite ones; all ranks call it."""
    if runner.model.dtype != torch.float16 or not runner.is_cpu:
        return True
    cache, key = ChoiceCache(), _key(model, settings)
    is_cached = cache.get(key) is not None
    is_finite = is_cached or runner.prompts.has_finite_logits()
    if ranks is not None:
        is_finite = bool(ranks.least(is_finite))
    if is_finite and not is_cached:
        cache.put(key, True)
    return is_finite


def _key(model: str | Path, settings: EngineConfig) -> str:
    """Return the key under which it is remembered that a checkpoint's logits are finite in float16."""
    path = resolve_model_path(model)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    stored = "".join(
        f", {file.name} {status.st_size} {status.st_mtime_ns}" for file in files if (status := file.stat())
    )
    weights = f"{settings.quantize} {settings.quantize_group_size}, {instructions().name}, {version_of('graphdecode')}"
    return f"finite in float16: {path}, {weights}{stored}"
