"""A tokenizer that does what every prompt and answer needs, and imports transformers, a second's work, for the rest."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

from graphdecode.errors import ArgumentError

_PLAIN_KEYS = {"role", "content"}
_OF_TRANSFORMERS = "generation"  # a tag of templates that its own extension reads


class Encoded(NamedTuple):
    """The tokens of a text, or those of several."""

    input_ids: list[Any]


class LightTokenizer:
    """A tokenizer with the methods of transformers' `PreTrainedTokenizerFast`.

    Encoding, decoding and the rendering of plain conversations are done here; for whatever else is asked, the
    tokenizer of transformers is made from this one and answers.

    Args:
        backend: a `tokenizers.Tokenizer`, with what it puts around a text.
        named: tokens by their use, such as `eos_token`.
        chat_template: in Jinja; None: there is none.
        options: further arguments of `PreTrainedTokenizerFast`.
    """

    def __init__(self, backend: Any, named: Mapping[str, str], chat_template: str | None, options: Mapping[str, Any]):
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self.special_tokens_map = dict(named)
        self._options = dict(options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "special_tokens_map":  # of copies that are not filled yet
            raise AttributeError(name)
        return getattr(self._whole, name)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(self, text: Any, *, add_special_tokens: bool = True, verbose: bool = True, **more: Any) -> Any:
        """Return the tokens of a text, or of each of a list of them, as `input_ids`."""
        if not more and isinstance(text, str):
            return Encoded(self._bare().encode(text, add_special_tokens=add_special_tokens).ids)
        if not more and type(text) is list and all(isinstance(each, str) for each in text):
            encoded = self._bare().encode_batch(text, add_special_tokens=add_special_tokens)
            return Encoded([each.ids for each in encoded])
        return self._whole(text, add_special_tokens=add_special_tokens, verbose=verbose, **more)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **more: Any) -> Any:
        """Return the text of some tokens."""
        if not more and type(token_ids) is list and all(type(each) is int for each in token_ids):
            return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self._whole.decode(token_ids, skip_special_tokens=skip_special_tokens, **more)

    def get_chat_template(self, chat_template: str | None = None, tools: Sequence[Any] | None = None) -> str:
        """Return the chat template that is given, else the tokenizer's own.

        Raises:
            ArgumentError: there is none.
        """
        found = self.chat_template if chat_template is None else chat_template
        if found is None:
            raise ArgumentError("the tokenizer has no chat template")
        return found

    def apply_chat_template(self, conversation: Any, chat_template: str | None = None, **how: Any) -> Any:
        """Return a conversation as a prompt; see transformers."""
        template = self.get_chat_template(chat_template)
        variables = {name: value for name, value in how.items() if name not in ("tokenize", "continue_final_message")}
        plain = (
            how.get("tokenize") is False
            and bool(conversation)
            and not how.get("continue_final_message")
            and how.get("tools") is None
            and all(type(value) in (str, bool, int, type(None)) for value in variables.values())
            and all(
                message.keys() <= _PLAIN_KEYS and all(type(value) is str for value in message.values())
                for message in conversation
            )
        )
        if not plain or _OF_TRANSFORMERS in template.replace("add_generation_prompt", ""):
            return self._whole.apply_chat_template(conversation, chat_template=template, **how)
        given = {"tools": None, "documents": None, "add_generation_prompt": False, **self.special_tokens_map}
        messages = [dict(message) for message in conversation]
        return _compiled(template).render(messages=messages, **(given | variables))

    @property
    def bos_token_id(self) -> int | None:
        """What a text begins with."""
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """What a text ends with."""
        return self._id_of("eos_token")

    def _bare(self) -> Any:
        """Return the backend without the truncation and padding that a call of the whole tokenizer left in it."""
        if self.backend_tokenizer.truncation is not None:
            self.backend_tokenizer.no_truncation()
        if self.backend_tokenizer.padding is not None:
            self.backend_tokenizer.no_padding()
        return self.backend_tokenizer

    def _id_of(self, use: str) -> int | None:
        token = self.special_tokens_map.get(use)
        found: int | None = None if token is None else self.backend_tokenizer.token_to_id(token)
        return found

    @cached_property
    def _whole(self) -> Any:
        from transformers import PreTrainedTokenizerFast  # here, for it takes a second

        whole = PreTrainedTokenizerFast(
            tokenizer_object=_Uncopied(self.backend_tokenizer), **self.special_tokens_map, **self._options
        )
        whole.chat_template = self.chat_template
        return whole


class _Uncopied:
    """A tokenizer whose deep copy is itself: the copy that transformers makes takes seconds for a large vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._tokenizer


class _Namespace(Namespace):
    """What a template keeps values in; names that reach into Python are refused."""

    def __init__(*args: Any, **given: Any) -> None:  # as Jinja's, so that `self` may be a name too
        own, *others = args
        for name in (found := dict(*others, **given)):
            _check_name(name)
        Namespace.__init__(own, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not set {name!r} of a namespace")


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _as_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    """Return a chat template as transformers compiles it: sandboxed, blocks without the line that they stand on."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _as_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *args, **given: dict(*args, **given),
        "namespace": _Namespace,
    }
    return environment.from_string(template)
