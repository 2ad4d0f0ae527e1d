"""What form an answer must have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphdecode.errors import ArgumentError, shown

_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_MAX_CHOICES = 10_000


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of an answer, which no token that is sampled can leave; names and meanings are vLLM's.

    Exactly one of the first six says which form.

    Args:
        json: a JSON Schema, as a dict or as text: the answer is JSON that it admits, with properties in its order.
        regex: the answer matches it from its first character to its last one.
        choice: the answer is one of these texts.
        grammar: a grammar that derives the answer, in Lark's or GBNF's notation.
        json_object: True: the answer is any JSON object.
        structural_tag: not supported.
        disable_any_whitespace: write no whitespace between the parts of JSON.
        disable_additional_properties: objects whose schema does not speak of them have no further properties.
        whitespace_pattern: a regular expression of the whitespace between the parts of JSON; left out: any.

    Raises:
        ValueError: none or several of the forms are given, or something is of a wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            names, found = ", ".join(_FORMS[:-1]), " and ".join(given) or None
            raise ArgumentError(f"structured_outputs must have exactly one of {names}, got {found}")
        if self.structural_tag is not None:
            raise ArgumentError("structured_outputs: structural_tag is not supported; a grammar can say the same")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            self._check(name, value is None or (isinstance(value, str) and value != ""), "a text that is not empty")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        self._check("json_object", self.json_object in (None, True, False), "True or None")
        choice = self.choice
        self._check(
            "choice",
            choice is None
            or (
                isinstance(choice, Sequence)
                and not isinstance(choice, str)
                and 0 < len(choice) <= _MAX_CHOICES
                and all(isinstance(text, str) and text for text in choice)
            ),
            f"a list of 1..{_MAX_CHOICES} texts, none of them empty",
        )
        self._check("json", self.json is None or isinstance(self.schema, Mapping), "a JSON Schema that is an object")

    @property
    def form(self) -> str:
        """Which of the fields says the form."""
        return next(name for name in _FORMS if getattr(self, name) not in (None, False))

    @property
    def schema(self) -> Any:
        """The JSON Schema, read where it is a text; None where that is no JSON."""
        if not isinstance(self.json, str):
            return self.json
        try:
            return json.loads(self.json)
        except (ValueError, RecursionError):
            return None

    def _check(self, name: str, good: bool, expected: str) -> None:
        if not good:
            raise ArgumentError(f"structured_outputs: {name} must be {expected}, got {shown(getattr(self, name))}")
