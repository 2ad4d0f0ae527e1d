"""A tokenizer in the fields of a GGUF file: byte-level BPE, whose texts are cut in a way that GGUF has a name for."""

from __future__ import annotations

import json
from typing import Any

from graphdecode.models import ModelSourceError
from graphdecode.models.gguf.metadata import CONTROL, NORMAL, USER_DEFINED
from graphdecode.text.gguf_tokenizer import cut_by
from graphdecode.text.pre_tokenizers import PRE_TOKENIZERS

_INSTEAD = "int4, int8 and fp8 are written as safetensors, with the tokenizer as it is"
_UNUSED = 5  # of `tokenizer.ggml.token_type`
_NAMED = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}
_PROBES = (
    "Hello, world!  What's 12345 + 67?\n\n  def f(x):\n\treturn x**2 // 3\r\n",
    "na\u00efve Stra\u00dfe \u2167 don't WE'LL i'm 1234567 \u00bd\u00b2 http://a.b/c?d=e_f",
    "\u4f60\u597d\uff0c\u4e16\u754c 2024\u5e74 \u3053\u3093\u306b\u3061\u306f \U0001f469\u200d\U0001f467",
    "   \u00a0 e\u0301 camelCaseHTTPServer\n\n\n x",
)


def vocabulary_fields(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Return what a GGUF file says of a tokenizer of transformers.

    Args:
        tokenizer: with a tokenizer.json.
        vocab_size: rows of the embedding; ids without a token get names that no text has.

    Raises:
        ModelSourceError: it is no byte-level BPE, or cuts texts in a way that has no name.
    """
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    if model.get("type") != "BPE" or (described.get("decoder") or {}).get("type") != "ByteLevel":
        raise ModelSourceError(f"the tokenizer is no byte-level BPE, which alone is written as GGUF; {_INSTEAD}")
    whole = {token["id"]: token for token in described["added_tokens"]}
    by_id = {index: token for token, index in model["vocab"].items()} | {
        index: token["content"] for index, token in whole.items()
    }
    kinds = [
        (CONTROL if whole[index]["special"] else USER_DEFINED)
        if index in whole
        else (NORMAL if index in by_id else _UNUSED)
        for index in range(vocab_size)
    ]
    template = tokenizer.chat_template
    named = {f"{use}_token_id": getattr(tokenizer, name, None) for use, name in _NAMED.items()}
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": _name_of_cuts(tokenizer, described, bool(model.get("ignore_merges"))),
        "tokens": [by_id.get(index, f"[PAD{index}]") for index in range(vocab_size)],
        "token_type": kinds,
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        **{name: index for name, index in named.items() if index is not None},
        "add_bos_token": tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id],
    }
    found = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    return found | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def _name_of_cuts(tokenizer: Any, described: dict[str, Any], ignores_merges: bool) -> str:
    """Return the name of what happens to a text before BPE: of the way that cuts some texts as the tokenizer does."""
    backend = tokenizer.backend_tokenizer
    composes = "NFC" in json.dumps(described.get("normalizer"))
    expected = [backend.pre_tokenizer.pre_tokenize_str(probe) for probe in _PROBES]
    for name, known in PRE_TOKENIZERS.items():
        if known.nfc == composes and known.ignores_merges == ignores_merges:
            cuts = cut_by(known)
            if [cuts.pre_tokenize_str(probe) for probe in _PROBES] == expected:
                return name
    raise ModelSourceError(f"the tokenizer cuts texts in a way that GGUF has no name for; {_INSTEAD}")
