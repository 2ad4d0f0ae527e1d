"""The tokenizer and the chat template that a GGUF file holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphdecode.models import ModelSourceError
from graphdecode.models.gguf.container import GgufFile
from graphdecode.models.gguf.metadata import CONTROL, NORMAL, USER_DEFINED
from graphdecode.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_PREFIX = "tokenizer.ggml."
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SPACE = "\u2581"  # SentencePiece's mark for a space
# of Phi-3, whose other tokens of that kind swallow the spaces behind them
_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")


def load_gguf_tokenizer(path: Path, *, replaceable: bool = True) -> Any:
    """Return the file's tokenizer, as one of transformers.

    Args:
        path: of the file.
        replaceable: errors say how to give another one.

    Raises:
        ModelSourceError: there is none, it is damaged, or of a kind that is not known.
        CheckpointError: the file is damaged.
    """
    vocabulary = _Vocabulary(path, GgufFile(path).fields, replaceable)
    kind = vocabulary.fields.get(f"{_PREFIX}model")
    if not isinstance(kind, str):  # of numbers it may be an array, which compares like one
        raise vocabulary.fault(f"model must be str, got {kind!r:.80}")
    if kind == "gpt2":
        pre = vocabulary.pre_tokenizer()
        return _wrapped(vocabulary, _byte_level(vocabulary, pre), adds_bos=pre.adds_bos)
    if kind == "llama":
        return _wrapped(vocabulary, _sentencepiece(vocabulary), adds_bos=True)
    raise vocabulary.fault(f"model {kind!r:.80} is not supported; supported are gpt2 and llama")


class _Vocabulary:
    """What a file says of its tokens; a field that is wrong is named with the file."""

    def __init__(self, path: Path, fields: Mapping[str, Any], replaceable: bool) -> None:
        self._path = path
        self._instead = "; give another tokenizer (--tokenizer, `tokenizer=`)" if replaceable else ""
        self.fields = fields
        self.tokens: list[str] = self.array("tokens", str)
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.ids[token] != index)
            raise self.fault(f"tokens has {twice!r:.80} twice")
        self.kinds: list[int] = self.array("token_type", int)
        if len(self.kinds) != len(self.tokens):
            raise self.fault(f"token_type has {len(self.kinds)} entries, and there are {len(self.tokens)} tokens")

    def has(self, name: str) -> bool:
        """Whether the file says anything of a field."""
        return f"{_PREFIX}{name}" in self.fields

    def array(self, name: str, *kinds: type) -> list[Any]:
        """Return a list of texts or of numbers."""
        value = self.fields.get(f"{_PREFIX}{name}")
        found = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(found, list) or not all(isinstance(each, kinds) for each in found):
            raise self.fault(f"{name} must be a list of {kinds[-1].__name__}, got {value!r:.80}")
        return found

    def flag(self, name: str, default: bool) -> bool:
        """Return yes or no."""
        value = self.fields.get(f"{_PREFIX}{name}", default)
        if not isinstance(value, bool):
            raise self.fault(f"{name} must be bool, got {value!r:.80}")
        return value

    def token(self, name: str) -> str | None:
        """Return the token of a use, such as "eos"; None: there is none."""
        index = self.fields.get(f"{_PREFIX}{name}_token_id")
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise self.fault(f"{name}_token_id is {index!r:.80}; there are {len(self.tokens)} tokens")
        return self.tokens[index]

    def pre_tokenizer(self) -> PreTokenizer:
        """Return how texts are cut."""
        name = self.fields.get(f"{_PREFIX}pre")
        found = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
        if found is None:
            raise self.fault(f"pre {name!r:.80} is not supported; supported are {', '.join(PRE_TOKENIZERS)}")
        return found

    def template(self) -> str | None:
        """Return the chat template; None: there is none."""
        value = self.fields.get("tokenizer.chat_template")
        return value if isinstance(value, str) else None

    def fault(self, wrong: str) -> ModelSourceError:
        """Return the error for a field, whose name begins what is wrong."""
        return ModelSourceError(f"{self._path}: {_PREFIX}{wrong}{self._instead}")


class _Uncopied:
    """A tokenizer whose deep copy is itself: the copy that transformers makes takes seconds for a large vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._tokenizer


def _wrapped(vocabulary: _Vocabulary, tokenizer: Any, *, adds_bos: bool) -> Any:
    from transformers import PreTrainedTokenizerFast  # here, for it takes a second

    _add_whole(vocabulary, tokenizer)
    named = {name: vocabulary.token(use) for name, use in _NAMED.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=_Uncopied(tokenizer),
        **{name: token for name, token in named.items() if token is not None},
        add_bos_token=vocabulary.flag("add_bos_token", adds_bos),
        add_eos_token=vocabulary.flag("add_eos_token", False),
        chat_template=vocabulary.template(),
        clean_up_tokenization_spaces=False,
    )


def _add_whole(vocabulary: _Vocabulary, tokenizer: Any) -> None:
    """Let the tokens that are never made of parts be found before all else."""
    from tokenizers import AddedToken

    architecture = vocabulary.fields.get("general.architecture")
    swallows = isinstance(architecture, str) and architecture == "phi3" and tokenizer.normalizer is not None
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                special=kind == CONTROL,
                normalized=False,
                rstrip=swallows and kind == CONTROL and token not in _KEEPS_SPACES,
            )
            for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )


def _byte_level(vocabulary: _Vocabulary, pre: PreTokenizer) -> Any:
    """Return BPE over bytes (GPT-2's), whose merges the file lists."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    listed: list[str] = vocabulary.array("merges", str) if vocabulary.has("merges") else []  # tokens may be bytes alone
    cut = (merge.partition(" ") for merge in listed)
    merges = list(
        dict.fromkeys((left, right) for left, _, right in cut)
    )  # of one that is listed twice the first counts
    wrong = next((pair for pair in merges if "".join(pair) not in vocabulary.ids), None)
    if wrong is not None:
        raise vocabulary.fault(f"merges has {' '.join(wrong)!r:.80}, which makes no token")
    tokenizer = Tokenizer(_bpe(models, vocabulary, merges, ignore_merges=pre.ignores_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = cut_by(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def cut_by(pre: PreTokenizer) -> Any:
    """Return what cuts texts into the pieces that byte-level BPE takes."""
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in pre.expressions]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(vocabulary: _Vocabulary) -> Any:
    """Return BPE over characters (SentencePiece's), whose merges follow from the tokens' scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    spaced = vocabulary.flag("add_space_prefix", True)
    unknown = vocabulary.token("unknown") or vocabulary.tokens[0]
    merges = _merges(vocabulary)
    tokenizer = Tokenizer(_bpe(models, vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    marked = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), marked] if spaced else [marked])
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if spaced else parts)
    return tokenizer


def _bpe(models: Any, vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> Any:
    try:
        return models.BPE(vocabulary.ids, merges, **options)
    except Exception as error:  # of what the library calls it that refuses a merge
        raise vocabulary.fault(f"tokens and merges are no vocabulary of BPE: {error}") from error


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return all ways to put a token together from two, those of the highest scores first."""
    scores, ids = vocabulary.array("scores", int, float), vocabulary.ids
    if len(scores) != len(vocabulary.tokens):
        raise vocabulary.fault(f"scores has {len(scores)} entries, and there are {len(vocabulary.tokens)} tokens")
    found: list[tuple[str, str]] = []
    for index in sorted(range(len(scores)), key=lambda index: -scores[index]):
        token = vocabulary.tokens[index]
        if vocabulary.kinds[index] in (NORMAL, USER_DEFINED):
            cuts = ((token[:place], token[place:]) for place in range(1, len(token)))
            found += [(left, right) for left, right in cuts if left in ids and right in ids]
    return found
