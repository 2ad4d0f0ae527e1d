"""A tokenizer that encodes, decodes and renders plain chats without transformers, whose import takes a second."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from graphdecode.errors import ArgumentError

_SIMPLE_KEYS = {"role", "content"}
_OF_TRANSFORMERS = "generation"  # a template tag that only transformers defines
_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")  # these use tokenizer.json unchanged
_MODEL_TYPES = ("llama", "olmo2", "smollm3")  # have no tokenizer class of their own
_USES = tuple(f"{use}_token" for use in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_HARMLESS = {  # keys of tokenizer_config.json that change neither tokens nor text here
    *("tokenizer_class", "backend", "model_max_length", "padding_side", "truncation_side", "chat_template"),
    *("model_input_names", "is_local", "local_files_only", "name_or_path", "clean_up_tokenization_spaces"),
}
_FURTHER_FILES = ("added_tokens.json", "special_tokens_map.json", "chat_template.json", "additional_chat_templates")


def is_tokenizer_error(error: BaseException) -> bool:
    """Whether an error may come from a tokenizer: any `Exception`, or a panic of Rust code."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class LightTokenizer:
    """A tokenizer with the methods of transformers' `PreTrainedTokenizerFast`.

    Only encoding, decoding and plain conversations are done here; the rest by transformers' tokenizer, made on demand.

    Args:
        backend: a `tokenizers.Tokenizer`.
        named: tokens by their use, such as `eos_token`.
        make_full: returns the tokenizer of transformers; picklable.
    """

    def __init__(
        self, backend: Any, named: Mapping[str, str], chat_template: str | None, make_full: Callable[[], Any]
    ) -> None:
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self.special_tokens_map = dict(named)
        self._make_full = make_full

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "special_tokens_map":  # while a copy is made
            raise AttributeError(name)
        if name in ("bos_token_id", "eos_token_id"):
            token = self.special_tokens_map.get(name.removesuffix("_id"))
            return None if token is None else self.backend_tokenizer.token_to_id(token)
        return getattr(self.full, name)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(self, text: Any, *, add_special_tokens: bool = True, verbose: bool = True, **more: Any) -> Any:
        """Return the tokens of a text, or of a list of texts, as `input_ids`."""
        if not more and isinstance(text, str):
            return SimpleNamespace(input_ids=self._bare().encode(text, add_special_tokens=add_special_tokens).ids)
        if not more and type(text) is list and all(isinstance(each, str) for each in text):
            encoded = self._bare().encode_batch(text, add_special_tokens=add_special_tokens)
            return SimpleNamespace(input_ids=[each.ids for each in encoded])
        return self.full(text, add_special_tokens=add_special_tokens, verbose=verbose, **more)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **more: Any) -> Any:
        """Return the text of tokens."""
        if not more and type(token_ids) is list and all(type(each) is int for each in token_ids):
            return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self.full.decode(token_ids, skip_special_tokens=skip_special_tokens, **more)

    def get_chat_template(self, chat_template: str | None = None, tools: Sequence[Any] | None = None) -> str:
        """Return the given chat template, else the tokenizer's own; raise ArgumentError if there is none."""
        template = self.chat_template if chat_template is None else chat_template
        if template is None:
            raise ArgumentError("the tokenizer has no chat template")
        if isinstance(template, str):
            return template
        self.full.chat_template = template  # several, by name
        return str(self.full.get_chat_template(chat_template, tools))

    def apply_chat_template(self, conversation: Any, chat_template: str | None = None, **options: Any) -> Any:
        """Render a conversation; see transformers."""
        template = self.get_chat_template(chat_template)
        variables = {
            name: value for name, value in options.items() if name not in ("tokenize", "continue_final_message")
        }
        is_simple = (
            options.get("tokenize") is False
            and bool(conversation)
            and not options.get("continue_final_message")
            and options.get("tools") is None
            and all(type(value) in (str, bool, int, type(None)) for value in variables.values())
            and all(
                message.keys() <= _SIMPLE_KEYS and all(type(value) is str for value in message.values())
                for message in conversation
            )
        )
        if not is_simple or _OF_TRANSFORMERS in template.replace("add_generation_prompt", ""):
            return self.full.apply_chat_template(conversation, chat_template=template, **options)
        defaults = {"tools": None, "documents": None, "add_generation_prompt": False, **self.special_tokens_map}
        messages = [dict(message) for message in conversation]
        return str(_compiled(template).render(messages=messages, **(defaults | variables)))

    def _bare(self) -> Any:
        """Return the backend without truncation and padding, which a call of `full` may have set."""
        if self.backend_tokenizer.truncation is not None:
            self.backend_tokenizer.no_truncation()
        if self.backend_tokenizer.padding is not None:
            self.backend_tokenizer.no_padding()
        return self.backend_tokenizer

    @cached_property
    def full(self) -> Any:
        """The tokenizer of transformers."""
        return self._make_full()


def light_folder_tokenizer(folder: Path, make_full: Callable[[], Any]) -> LightTokenizer | None:
    """Return the tokenizer of a folder if its tokenizer.json is sufficient, as for Llama 3 and SmolLM3, else None."""
    from tokenizers import Tokenizer

    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        model = json.loads((folder / "config.json").read_text("utf-8"))
        tokenizer_class, added = settings.pop("tokenizer_class"), settings.pop("added_tokens_decoder", {})
        splits, template = settings.pop("split_special_tokens", False), settings.get("chat_template")
        uses = {use: token for use in _USES if (token := settings.pop(use, None)) is not None}
        named = {use: token["content"] if isinstance(token, dict) else token for use, token in uses.items()}
        file = folder / "chat_template.jinja"
        template = file.read_text("utf-8") if file.exists() else template
        if (
            tokenizer_class not in _CLASSES
            or model["model_type"] not in _MODEL_TYPES
            or "auto_map" in model
            or not settings.keys() <= _HARMLESS
            or not isinstance(template, str | None)
            or any((folder / name).exists() for name in _FURTHER_FILES)
        ):
            return None
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        added_tokens = backend.get_added_tokens_decoder()
        same = all(_of(added_tokens[int(index)]) == token for index, token in added.items())
        contents = {token.content for token in added_tokens.values()}
        if type(backend.model).__name__ != "BPE" or not same or not set(named.values()) <= contents:
            return None
        backend.encode_special_tokens = bool(splits)
        backend.decode(backend.encode("a").ids)  # a damaged tokenizer may fail here
    except BaseException as error:
        if is_tokenizer_error(error):
            return None
        raise
    return LightTokenizer(backend, named, template, make_full)


def _of(token: Any) -> dict[str, Any]:
    """Return an added token in the format of tokenizer_config.json."""
    return {
        name: getattr(token, name) for name in ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    }


def _as_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    """Compile a chat template as transformers does; jinja2 is imported for the first one."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
    from jinja2.utils import Namespace

    def check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a chat template may not set {name!r} of a namespace")

    class GuardedNamespace(Namespace):
        """Jinja's namespace, without names that give access to Python."""

        def __init__(*args: Any, **keywords: Any) -> None:  # as Jinja's: `self` may be a keyword, too
            namespace, *others = args
            for name in (variables := dict(*others, **keywords)):
                check_name(name)
            Namespace.__init__(namespace, variables)

        def __setitem__(self, name: str, value: Any) -> None:
            check_name(name)
            super().__setitem__(name, value)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _as_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda text: datetime.now().strftime(text),
        "dict": lambda *args, **keywords: dict(*args, **keywords),
        "namespace": GuardedNamespace,
    }
    return environment.from_string(template)
