"""How text is cut before byte-level BPE, by the names that GGUF files have for it.

The expressions are those of the models' own tokenizer.json.
"""

from __future__ import annotations

from typing import NamedTuple

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


class PreTokenizer(NamedTuple):
    """What happens to a text before byte-level BPE.

    Attributes:
        expressions: each cuts what the one before it left into its matches and what lies between them.
        nfc: characters are composed first (Unicode's form C).
        adds_bos: a text begins with the token for that, where the file does not say.
        ignores_merges: a piece that is a token as a whole is that token.
    """

    expressions: tuple[str, ...]
    nfc: bool = False
    adds_bos: bool = False
    ignores_merges: bool = False


def _either(*expressions: str) -> str:
    return "|".join(expressions)


_BY_DIGIT = PreTokenizer((r"\p{N}", _GPT2))
_OF_LLAMA3 = PreTokenizer((_LLAMA3,), adds_bos=True, ignores_merges=True)
_OF_QWEN2 = PreTokenizer((_QWEN2,), nfc=True)
_OF_GPT4O = PreTokenizer(
    (_either(*(f"{cased}{_CONTRACTIONS}?" for cased in _CASED), r"\p{N}{1,3}") + _PATHS + _SPACES,)
)
_OF_TEKKEN = PreTokenizer((_either(*_CASED, r"\p{N}") + _PATHS + _SPACES,), adds_bos=True, ignores_merges=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "command-r": _BY_DIGIT._replace(nfc=True),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "deepseek-r1-qwen": _OF_QWEN2._replace(nfc=False),
    "falcon3": _OF_LLAMA3,
    "gpt-2": PreTokenizer((_GPT2,)),
    "gpt-4o": _OF_GPT4O,
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
    "refact": _BY_DIGIT,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "smollm": _BY_DIGIT,
    "stablelm2": _OF_QWEN2._replace(nfc=False),
    "starcoder": _BY_DIGIT,
    "tekken": _OF_TEKKEN,
}
