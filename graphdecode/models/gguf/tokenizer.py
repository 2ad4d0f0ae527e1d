"""Tokenizer, stop tokens and chat template of a GGUF file; and the fields that describe a tokenizer in one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graphdecode.hub.model_path import ModelSourceError
from graphdecode.models.gguf.container import read_header

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATHS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _SIGNS + _SPACES
_QWEN2 = _CONTRACTIONS + _WORDS + r"\p{N}" + _SIGNS + _SPACES
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*"
) + _SPACES
_PREFIX = "tokenizer.ggml."
_TWIN = "\U0010ffff"  # marks tokens whose text another one has; no character
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SPACE = "\u2581"  # SentencePiece's mark for a space
_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3; its other control tokens strip the spaces behind them
_INSTEAD = "int4, int8 and fp8 are written as safetensors, with the tokenizer as it is"
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # values of `tokenizer.ggml.token_type`
# tokens that end a message or a text whether or not the file says so, as in llama.cpp
_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<turn|>",
)  # fmt: skip
_HARMONY = {"<|return|>", "<|call|>"}  # if these end the output, <|end|> ends a part of it
_PROBES = (
    "Hello, world!  What's 12345 + 67?\n\n  def f(x):\n\treturn x**2 // 3\r\n",
    "na\u00efve Stra\u00dfe \u2167 don't WE'LL i'm 1234567 \u00bd\u00b2 http://a.b/c?d=e_f",
    "\u4f60\u597d\uff0c\u4e16\u754c 2024\u5e74 \u3053\u3093\u306b\u3061\u306f \U0001f469\u200d\U0001f467",
    "   \u00a0 e\u0301 camelCaseHTTPServer\n\n\n x",
)


class PreTokenizer(NamedTuple):
    """The pre-tokenizer in front of byte-level BPE."""

    expressions: tuple[str, ...]  # applied one after another; each splits pieces into its matches and the rest
    nfc: bool = False  # normalize to NFC first
    adds_bos: bool = False  # if the file does not say
    ignores_merges: bool = False  # a piece that is a token is not merged


_BY_DIGIT = PreTokenizer((r"\p{N}", _GPT2))
_OF_LLAMA3 = PreTokenizer((_LLAMA3,), adds_bos=True, ignores_merges=True)
_OF_QWEN2 = PreTokenizer((_QWEN2,), nfc=True)
_OF_GPT4O = PreTokenizer(("".join(f"{cased}{_CONTRACTIONS}?|" for cased in _CASED) + r"\p{N}{1,3}" + _PATHS + _SPACES,))
_OF_TEKKEN = PreTokenizer(("|".join((*_CASED, r"\p{N}")) + _PATHS + _SPACES,), adds_bos=True, ignores_merges=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "command-r": _BY_DIGIT._replace(nfc=True),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", "[0-9][0-9][0-9]")),
    "deepseek-r1-qwen": _OF_QWEN2._replace(nfc=False),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
    "falcon-h1": _OF_LLAMA3,
    "falcon3": _OF_LLAMA3,
    "glm4": PreTokenizer((_LLAMA3,)),
    "gpt-2": PreTokenizer((_GPT2,)),
    "gpt-4o": _OF_GPT4O,
    "lfm2": _OF_LLAMA3,
    "llama-bpe": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "llama3": _OF_LLAMA3,
    "llama4": _OF_GPT4O,
    "megrez": _OF_QWEN2,
    "mpt": PreTokenizer((_GPT2,)),
    "olmo": PreTokenizer((_GPT2,)),
    "phi-2": PreTokenizer((_GPT2,)),
    "pixtral": _OF_LLAMA3,
    "qwen2": _OF_QWEN2,
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "refact": _BY_DIGIT,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "smollm": _BY_DIGIT,
    "stablelm2": _OF_QWEN2._replace(nfc=False),
    "starcoder": _BY_DIGIT,
    "tekken": _OF_TEKKEN,
}


class GgufTokenizer(NamedTuple):
    """The tokenizer of a file."""

    tokenizer: Any  # `tokenizers.Tokenizer`
    special_tokens: dict[str, str]  # by use, such as "eos_token"
    chat_template: str | None
    options: dict[str, bool]  # keywords for `PreTrainedTokenizerFast`


def read_gguf_tokenizer(path: Path, hint: str = "") -> GgufTokenizer:
    """Return a file's tokenizer.

    Args:
        hint: appended to error messages.

    Raises:
        ModelSourceError: there is none, it is damaged, or of an unknown kind.
        CheckpointError: the file is damaged.
    """
    vocabulary = _Vocabulary(path, read_header(path).fields, hint)
    kind = vocabulary.fields.get(f"{_PREFIX}model")
    if not isinstance(kind, str):  # it may be an array
        raise vocabulary.fault(f"model must be str, got {kind!r:.80}")
    if kind == "gpt2":
        pre = vocabulary.pre_tokenizer()
        return _finished(vocabulary, _byte_level(vocabulary, pre), adds_bos=pre.adds_bos)
    if kind in ("llama", "gemma4"):  # whose merges follow from the tokens' scores, or are listed
        merges = _merges_by_score(vocabulary) if kind == "llama" else _listed_merges(vocabulary)
        return _finished(vocabulary, _sentencepiece(vocabulary, merges), adds_bos=True)
    raise vocabulary.fault(f"model {kind!r:.80} is not supported; supported are gpt2, llama and gemma4")


class _Vocabulary:
    """The token fields of a file, validated."""

    def __init__(self, path: Path, fields: Mapping[str, Any], hint: str) -> None:
        self._path, self._hint, self.fields = path, hint, fields
        stated: list[str] = self.array("tokens", str)
        last = {token: index for index, token in enumerate(stated)}  # of tokens with one text, the last is used
        self.has_twins = len(last) < len(stated)
        self.tokens = [
            (token if last[token] == index else f"{token}{_TWIN * (index + 1)}") if token else f"[EMPTY_{index}]"
            for index, token in enumerate(stated)
        ]
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        self.kinds: list[int] = self.array("token_type", int) if self._has("token_type") else [_NORMAL] * len(stated)
        if len(self.kinds) < len(self.tokens):
            raise self.fault(f"token_type has {len(self.kinds)} entries, and there are {len(self.tokens)} tokens")
        kinds = zip(self.tokens, self.kinds, strict=False)
        self.kinds = [_CONTROL if token in _ENDS and kind == _NORMAL else kind for token, kind in kinds]

    def _has(self, name: str) -> bool:
        return f"{_PREFIX}{name}" in self.fields

    def array(self, name: str, *kinds: type) -> list[Any]:
        """Return a list whose elements have some types."""
        value = self.fields.get(f"{_PREFIX}{name}")
        values = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(values, list) or not set(map(type, values)) <= set(kinds):
            raise self.fault(f"{name} must be a list of {kinds[-1].__name__}, got {value!r:.80}")
        return values

    def flag(self, name: str, default: bool) -> bool:
        """Return a bool."""
        value = self.fields.get(f"{_PREFIX}{name}", default)
        if not isinstance(value, bool):
            raise self.fault(f"{name} must be bool, got {value!r:.80}")
        return value

    def token(self, name: str) -> str | None:
        """Return the token of a use, such as "eos", if any."""
        index = self.fields.get(f"{_PREFIX}{name}_token_id")
        if index is None:
            index = _default_ids(self.fields).get(name, len(self.tokens))
            return self.tokens[index] if index < len(self.tokens) else None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise self.fault(f"{name}_token_id is {index!r:.80}; there are {len(self.tokens)} tokens")
        return self.tokens[index]

    def pre_tokenizer(self) -> PreTokenizer:
        """Return the pre-tokenizer."""
        name = self.fields.get(f"{_PREFIX}pre") or "default"
        pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
        if pre is None:
            raise self.fault(f"pre {name!r:.80} is not supported; supported are {', '.join(PRE_TOKENIZERS)}")
        return pre

    def fault(self, wrong: str) -> ModelSourceError:
        """Return the error for a field; the message begins with its name."""
        return ModelSourceError(f"{self._path}: {_PREFIX}{wrong}{self._hint}")


def _default_ids(fields: Mapping[str, Any]) -> Mapping[str, int]:
    """Return the special tokens that llama.cpp takes where a file names none: those of Llama's SentencePiece."""
    return _SENTENCEPIECE_IDS if fields.get(f"{_PREFIX}model") == "llama" else {}


def stop_token_ids(fields: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end the output: those that the file names, and those known by their text."""
    default = _default_ids(fields)
    named = [fields.get(f"{_PREFIX}{name}_token_id", default.get(name)) for name in ("eos", "eot", "eom")]
    tokens, kinds = fields.get(f"{_PREFIX}tokens"), fields.get(f"{_PREFIX}token_type")
    ends = {}
    if isinstance(tokens, list) and isinstance(kinds, np.ndarray | None):  # else `_Vocabulary` reports it
        ends = {token: index for index, token in enumerate(tokens) if token in _ENDS}
        if kinds is not None:
            likely = np.flatnonzero(np.isin(kinds, (_NORMAL, _CONTROL))).tolist()
            ends = {token: index for token, index in ends.items() if index in likely}
    if ends.keys() >= _HARMONY:
        ends.pop("<|end|>", None)
    return sorted({token for token in (*named, *ends.values()) if isinstance(token, int)})


def _finished(vocabulary: _Vocabulary, tokenizer: Any, *, adds_bos: bool) -> GgufTokenizer:
    named = {name: token for name, use in _NAMED.items() if (token := vocabulary.token(use)) is not None}
    _add_whole(vocabulary, tokenizer, list(named.values()))
    ends = {"bos": vocabulary.flag("add_bos_token", adds_bos), "eos": vocabulary.flag("add_eos_token", False)}
    _add_template(tokenizer, *(named.get(f"{name}_token") if adds else None for name, adds in ends.items()))
    options = {f"add_{name}_token": adds for name, adds in ends.items()} | {"clean_up_tokenization_spaces": False}
    template = vocabulary.fields.get("tokenizer.chat_template")
    return GgufTokenizer(tokenizer, named, template if isinstance(template, str) else None, options)


def _add_template(tokenizer: Any, begin: str | None, end: str | None) -> None:
    from tokenizers.processors import TemplateProcessing

    ids = {token: tokenizer.token_to_id(token) for token in (begin, end) if token is not None}
    if ids:
        first, second = (
            [f"{token}:{at}" if token in ids else token for token in (begin, text, end) if token is not None]
            for at, text in enumerate(("$A", "$B:1"))
        )
        tokenizer.post_processor = TemplateProcessing(
            single=first, pair=[*first, *second], special_tokens=list(ids.items())
        )


def _add_whole(vocabulary: _Vocabulary, tokenizer: Any, named: list[str]) -> None:
    """Add the tokens that are never split: control tokens, user-defined tokens, and those with a use."""
    from tokenizers import AddedToken

    strips = str(vocabulary.fields.get("general.architecture")) == "phi3" and tokenizer.normalizer is not None
    kinds = zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    whole = {token: kind for token, kind in kinds if kind in (_CONTROL, _USER_DEFINED)}
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                special=kind == _CONTROL,
                normalized=False,
                rstrip=strips and kind == _CONTROL and token not in _KEEPS_SPACES,
            )
            for token, kind in whole.items()
        ]
    )
    more = [token for token in dict.fromkeys(named) if token not in whole]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in more])


def _byte_level(vocabulary: _Vocabulary, pre: PreTokenizer) -> Any:
    """Return BPE over bytes (GPT-2's), whose merges the file lists."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    has_merges = f"{_PREFIX}merges" in vocabulary.fields  # not if all tokens are bytes
    merges = _listed_merges(vocabulary) if has_merges else []
    tokenizer = Tokenizer(_bpe(models, vocabulary, merges, ignore_merges=pre.ignores_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _splitter(pre)
    tokenizer.decoder = _decoder(vocabulary, [decoders.ByteLevel()])
    return tokenizer


def _listed_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return the merges that the file lists, each once."""
    merges = list(dict.fromkeys(vocabulary.array("merges", str)))
    wrong = next((merge for merge in merges if merge.replace(" ", "", 1) not in vocabulary.ids), None)
    if wrong is not None:
        raise vocabulary.fault(f"merges has {wrong!r:.80}, which makes no token")
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]


def _splitter(pre: PreTokenizer) -> Any:
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in pre.expressions]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(vocabulary: _Vocabulary, merges: list[tuple[str, str]]) -> Any:
    """Return BPE over characters (SentencePiece's)."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    spaced = vocabulary.flag("add_space_prefix", True)
    unknown = vocabulary.token("unknown") or vocabulary.tokens[0]
    tokenizer = Tokenizer(_bpe(models, vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    marked = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), marked] if spaced else [marked])
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = _decoder(vocabulary, [*parts, decoders.Strip(" ", 1, 0)] if spaced else parts)
    return tokenizer


def _decoder(vocabulary: _Vocabulary, parts: list[Any]) -> Any:
    from tokenizers import decoders

    first = [decoders.Replace(_TWIN, "")] if vocabulary.has_twins else []
    return decoders.Sequence([*first, *parts]) if len(first) + len(parts) > 1 else parts[0]


def _bpe(models: Any, vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> Any:
    try:
        return models.BPE(vocabulary.ids, merges, **options)
    except Exception as error:  # the library's own type
        raise vocabulary.fault(f"tokens and merges are no vocabulary of BPE: {error}") from error


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, by descending score."""
    scores, ids = vocabulary.array("scores", int, float), vocabulary.ids
    if len(scores) < len(vocabulary.tokens):
        raise vocabulary.fault(f"scores has {len(scores)} entries, and there are {len(vocabulary.tokens)} tokens")
    merges: list[tuple[str, str]] = []
    for index in sorted(range(len(vocabulary.tokens)), key=lambda index: -scores[index]):
        token = vocabulary.tokens[index]
        if vocabulary.kinds[index] in (_NORMAL, _USER_DEFINED):
            cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
            merges += [(left, right) for left, right in cuts if left in ids and right in ids]
    return merges


def vocabulary_fields(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Return the fields of a GGUF file for a tokenizer of transformers.

    Args:
        vocab_size: rows of the embedding; ids without a token get padding names.

    Raises:
        ModelSourceError: it is not byte-level BPE, or its pre-tokenizer has no name in GGUF.
    """
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    if model.get("type") != "BPE" or (described.get("decoder") or {}).get("type") != "ByteLevel":
        raise ModelSourceError(f"the tokenizer is not byte-level BPE, which alone is written as GGUF; {_INSTEAD}")
    whole = {token["id"]: token for token in described["added_tokens"]}
    by_id = {index: token for token, index in model["vocab"].items()}
    kinds = dict.fromkeys(range(vocab_size), _UNUSED) | dict.fromkeys(by_id, _NORMAL)
    kinds |= {index: _CONTROL if token["special"] else _USER_DEFINED for index, token in whole.items()}
    by_id |= {index: token["content"] for index, token in whole.items()}
    template = tokenizer.chat_template
    named = {f"{use}_token_id": getattr(tokenizer, f"{name}_id", None) for name, use in _NAMED.items()}
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": _pre_tokenizer_name(tokenizer, described, bool(model.get("ignore_merges"))),
        "tokens": [by_id.get(index, f"[PAD{index}]") for index in range(vocab_size)],
        "token_type": [kinds[index] for index in range(vocab_size)],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        **{name: index for name, index in named.items() if index is not None},
        "add_bos_token": tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id],
    }
    prefixed = {f"{_PREFIX}{name}": value for name, value in fields.items()}
    return prefixed | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def _pre_tokenizer_name(tokenizer: Any, described: dict[str, Any], ignores_merges: bool) -> str:
    backend = tokenizer.backend_tokenizer
    composes = "NFC" in json.dumps(described.get("normalizer"))
    expected = [backend.pre_tokenizer.pre_tokenize_str(probe) for probe in _PROBES]
    for name, each in PRE_TOKENIZERS.items():
        if each.nfc == composes and each.ignores_merges == ignores_merges:
            splitter = _splitter(each)
            if [splitter.pre_tokenize_str(probe) for probe in _PROBES] == expected:
                return name
    raise ModelSourceError(f"the tokenizer cuts texts in a way that GGUF has no name for; {_INSTEAD}")
