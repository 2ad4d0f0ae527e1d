"""The tokenizer and the chat template that a GGUF file holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphdecode.models import ModelSourceError
from graphdecode.models.gguf.container import GgufFile
from graphdecode.models.gguf.vocabulary import CONTROL, USER_DEFINED
from graphdecode.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_PREFIX = "tokenizer.ggml."
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def load_gguf_tokenizer(path: Path) -> Any:
    """Return the file's tokenizer, as one of transformers.

    Raises:
        ModelSourceError: there is none, it is damaged, or of a kind that is not known.
        CheckpointError: the file is damaged.
    """
    fields = GgufFile(path).fields
    try:
        return _wrapped(fields)
    except ModelSourceError as error:
        raise ModelSourceError(f"{path}: {error}") from error


def _wrapped(fields: Mapping[str, Any]) -> Any:
    from transformers import (
        PreTrainedTokenizerFast,
    )  # here, for it takes a second, and a model's weights need none of it

    kind = fields.get(f"{_PREFIX}model")
    if kind != "gpt2":
        raise ModelSourceError(f"{_PREFIX}model {kind!r:.80} is not supported; supported are gpt2")
    tokens, kinds = _list(fields, "tokens", str), _list(fields, "token_type", int)
    pre = _pre_tokenizer(fields)
    tokenizer = _byte_level(tokens, _list(fields, "merges", str), pre)
    _add_special(tokenizer, tokens, kinds)
    named = {name: _token(fields, tokens, key) for name, key in _NAMED.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{name: token for name, token in named.items() if token is not None},
        add_bos_token=_flag(fields, "add_bos_token", pre.adds_bos),
        add_eos_token=_flag(fields, "add_eos_token", False),
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def _byte_level(tokens: list[str], merges: list[str], pre: PreTokenizer) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    model = models.BPE({token: index for index, token in enumerate(tokens)}, pairs, ignore_merges=pre.ignores_merges)
    tokenizer = Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in pre.expressions]
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_alone])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_special(tokenizer: Any, tokens: list[str], kinds: list[int]) -> None:
    """Let tokens that no text should be split into be found before all else."""
    from tokenizers import AddedToken

    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )


def _pre_tokenizer(fields: Mapping[str, Any]) -> PreTokenizer:
    name = fields.get(f"{_PREFIX}pre")
    found = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelSourceError(f"{_PREFIX}pre {name!r:.80} is not supported; supported are {known}")
    return found


def _flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    value = fields.get(f"{_PREFIX}{name}", default)
    if not isinstance(value, bool):
        raise ModelSourceError(f"{_PREFIX}{name} must be bool, got {value!r:.80}")
    return value


def _token(fields: Mapping[str, Any], tokens: list[str], name: str) -> str | None:
    index = fields.get(f"{_PREFIX}{name}_token_id")
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise ModelSourceError(f"{_PREFIX}{name}_token_id is {index!r:.80}; there are {len(tokens)} tokens")
    return tokens[index]


def _list(fields: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    value = fields.get(f"{_PREFIX}{name}")
    found = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(found, list) or not all(isinstance(each, kind) for each in found):
        raise ModelSourceError(f"{_PREFIX}{name} must be a list of {kind.__name__}, got {value!r:.80}")
    return found
