"""The files of sentence-transformers in a checkpoint folder: how its embeddings are pooled, and pairs are scored.

`modules.json` lists the parts behind the decoder, `config_sentence_transformers.json` the texts in front of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphdecode.models.fields import UnsupportedModelError, read_json, read_json_value

MODULES_FILE = "modules.json"  # lists the parts behind the decoder
_MODES = {"lasttoken": "last", "mean": "mean"}  # names of `pooling_mode` -> ours
_FLAGS = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}  # of older files
# Qwen's folders have no `modules.json`: the tokens "yes" and "no" of Qwen3's vocabulary (its model card)
_QWEN_RERANKER, _QWEN_LABELS = "qwen3-reranker", (9693, 2152)


@dataclass(frozen=True)
class SentenceFiles:
    """How a model's embeddings are made of its hidden states; the default is for models that say nothing.

    Attributes:
        pooling: "last" or "mean".
        normalize: whether embeddings have length 1.
        prompts: texts in front of inputs, by name.
        default_prompt: the name of the one that inputs get; None: none.
        label_ids: the tokens whose logits score a pair: relevant, and irrelevant or none; None: embeddings do.
        unsupported: why embeddings cannot be had; None: they can.
    """

    pooling: str = "last"
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    label_ids: tuple[int, ...] | None = None
    unsupported: str | None = None


def sentence_files_of(model: str | Path) -> SentenceFiles:
    """Return what the files of a model say, or the default; raises `UnsupportedModelError` for files that are no JSON.

    `model`: a folder, a GGUF file or a shape, whose files are not looked for.
    """
    path = Path(model)
    if not path.is_dir():
        return SentenceFiles()
    is_qwen = _QWEN_RERANKER in str(path).lower()
    modules, named = path / MODULES_FILE, path / "config_sentence_transformers.json"
    settings = read_json(named) if named.is_file() else {}
    texts, default = settings.get("prompts"), settings.get("default_prompt_name")
    prompts = {name: text for name, text in texts.items() if isinstance(text, str)} if isinstance(texts, dict) else {}
    chosen = default if isinstance(default, str) and default in prompts else None
    if not modules.is_file():
        return SentenceFiles(prompts=prompts, default_prompt=chosen, label_ids=_QWEN_LABELS if is_qwen else None)
    pooling, labels, reason, normalize = "last", None, None, False
    for kind, module in _modules(modules):
        config = read_json(module / "config.json") if (module / "config.json").is_file() else {}
        if kind == "Pooling":
            pooling, reason = _pooling(config, reason)
        elif kind == "Normalize":
            normalize = True
        elif kind == "LogitScore":
            ids = (config.get("true_token_id"), config.get("false_token_id"))
            labels = tuple(token for token in ids if isinstance(token, int))
            reason = reason if labels else f"{module}/config.json names no true_token_id"
        elif kind != "Transformer":
            reason = reason or f"{modules} has a module {kind}, and only Pooling and Normalize are supported"
    return SentenceFiles(pooling, normalize, prompts, chosen, labels or None, reason)


def _modules(file: Path) -> list[tuple[str, Path]]:
    """Return kind and folder of each module."""
    entries = read_json_value(file)
    if not isinstance(entries, list) or not all(
        isinstance(each, dict) and isinstance(each.get("type"), str) for each in entries
    ):
        raise UnsupportedModelError(f"{file} must list modules, each with its type")
    return [(each["type"].rpartition(".")[2], file.parent / str(each.get("path", ""))) for each in entries]


def _pooling(config: Mapping[str, Any], reason: str | None) -> tuple[str, str | None]:
    """Return a module's pooling, and why it is not supported."""
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else mode if isinstance(mode, list) else None
    if modes is None:
        set_flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
        poolings = [_FLAGS.get(name) for name in set_flags]
    else:
        set_flags, poolings = modes, [_MODES.get(name) for name in modes]
    if len(poolings) != 1 or poolings[0] is None:
        return "last", reason or f"pooling by {' and '.join(map(str, set_flags)) or 'nothing'} is not supported"
    if poolings[0] == "mean" and config.get("include_prompt") is False:
        return "mean", reason or "pooling that leaves out the prompt is not supported (include_prompt)"
    return poolings[0], reason
