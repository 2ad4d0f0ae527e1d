"""Grammars of outputs that call functions: each call in its family's form, with arguments by its schema.

They begin behind a thought, and are in llguidance's dialect of Lark. What a schema says and the form cannot enforce is
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphdecode.errors import ArgumentError
from graphdecode.text.chat_formats.chat_format import (
    CallSyntax,
    Channels,
    ChatFormat,
    JsonArguments,
    JsonCall,
    LiteralArguments,
    TaggedArguments,
    Tools,
)
from graphdecode.text.chat_formats.schemas import (
    ANNOTATIONS,
    TYPES,
    narrowed,
    object_properties,
    resolved,
    types_of,
)
from graphdecode.text.chat_formats.source import words

# llguidance's options for arguments: unsupported keywords are refused; JSON is spaced as chat templates write it
_STRICT = {"lenient": False, "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FREE = {"lenient": False, "whitespace_flexible": True, "coerce_one_of": False}  # those for content
# keywords of a function's parameters: schemas of only the first have no parameters, the others set the type
_EMPTY_KEYWORDS = ANNOTATIONS | {"type", "properties", "required", "strict"}
_TYPE_KEYWORDS = frozenset({"type", "$ref", "allOf", "anyOf", "oneOf", "const", "enum"})
_ANY = r"/(.|\n)*/"
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_ZONE = r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,6}})?{_ZONE}"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
# texts that are read as another type, where a value may have one
_LOOKS_LIKE_JSON = r"/\s*[-0-9\[{](.|\n)*/", r"/\s*(true|false|null|True|False|None)\s*/"


@dataclass(frozen=True)
class Calling:
    """What an output may do with functions, and how its tokens are."""

    tools: Tools
    must: bool  # it calls, and says nothing else
    several: bool = True  # it may call more than once
    content: Mapping[str, Any] | None = None  # schema of what it says if it does not call; None: any text
    special_tokens: Mapping[str, int] | None = None  # tokens by their text, which no text contains


def grammar_of_calls(chat_format: ChatFormat, calling: Calling) -> str | None:
    """Return the grammar of outputs that call functions; None where nothing marks a call that may come.

    Raises ArgumentError for a schema that cannot be enforced in this form.
    """
    lark = _Lark(chat_format, calling)
    if chat_format.channels is not None:
        lark.messages(chat_format.channels)
    elif chat_format.calls is None or (
        not calling.must and not (chat_format.calls.opening or chat_format.calls.section_opening)
    ):
        return None
    else:
        lark.answer(chat_format.calls)
    return "\n".join(["%llguidance {}", *lark.rules, ""])


def schema_of_arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function's parameters as the schema of an object, which is empty where they describe none."""
    schema = dict(parameters)
    if not schema.get("properties") and schema.keys() <= _EMPTY_KEYWORDS:
        is_open = schema.get("type") == "object" and "properties" not in schema  # it says that it is any object
        schema = schema if is_open else {**schema, "additionalProperties": False}
    return schema if schema.keys() & _TYPE_KEYWORDS else {"type": "object", **schema}


class _Lark:
    """Collects the rules of a grammar."""

    def __init__(self, chat_format: ChatFormat, calling: Calling) -> None:
        self._format = chat_format
        self._calling = calling
        special = sorted(calling.special_tokens or {}, key=len, reverse=True)
        begins = [text for text in special if text in _beginnings(chat_format)]
        spelled = "".join(f" & ~/(.|\\n)*{_pattern(text)}(.|\\n)*/" for text in begins)
        self.rules: list[str] = [f"TEXT: {_ANY}{spelled}"]  # the parser takes what is spelled for a token, too
        self._special = re.compile(f"({'|'.join(map(re.escape, special))})" if special else "(?!)")
        self._any: dict[int, str] = {}

    def rule(self, body: str, *, kind: str = "rule") -> str:
        """Add a rule or a terminal, and return its name."""
        name = f"{kind}_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Return a text as the grammar writes it, with its special tokens."""
        tokens = self._calling.special_tokens or {}
        parts = filter(None, self._special.split(text))
        return " ".join(
            f"<[{tokens[part]}]>" if part in tokens else json.dumps(part, ensure_ascii=False) for part in parts
        )

    def until(self, marker: str) -> str:
        """Return text up to the first of a marker, and the marker."""
        written = self.literal(marker)
        if written.startswith("<["):
            return f"TEXT {written}"
        first = json.dumps(words(marker)[0], ensure_ascii=False)
        name = f"until_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {_ANY} {first}")
        rest = marker.lstrip()[len(words(marker)[0]) :]
        return f"{name} {self.literal(rest)}" if rest else name

    def json(self, schema: Any, options: Mapping[str, Any] = _STRICT) -> str:
        """Return a rule of JSON."""
        document = schema if isinstance(schema, Mapping) else {} if schema is True else {"not": {}}
        return self.rule(f"%json {json.dumps({**document, 'x-guidance': options}, ensure_ascii=False)}")

    def content(self) -> str:
        """Return what an output says if it does not call."""
        schema = self._calling.content
        return "TEXT" if schema is None else self.json(schema, _FREE)

    def answer(self, calls: CallSyntax) -> None:
        """Add the start of answers with calls that something marks, or that must come."""
        calling, block = self._calling, self._block(calls)
        if calling.must or calling.content is not None:
            more = f"({self.literal(calls.separator)} {block})*" if calls.separator else f"{block}*"
            several = calling.several and not calls.is_list and not calls.section_opening and calls.opening
            gap = (
                self.rule(r"/[ \n]{0,2}/", kind="GAP") if self._format.thinking is not None else ""
            )  # behind a thought
            start = f"{gap} {block} {more if several else ''}"
            start += "" if calling.must else f" | {gap} {self.content()}"
        elif calling.several:
            start = f"{block}* TEXT"
        else:
            start = f"{block} | TEXT"
        self.rules.append(f"start: {start}")

    def _block(self, calls: CallSyntax) -> str:
        """Return the calls that one opening marks."""
        calling, call = self._calling, self._call(calls)
        separator = f"({self.literal(calls.separator)} {call})*" if calls.separator else f"{call}*"
        body = f"{call} {separator}" if calling.several else call
        opening, closing = calls.opening, calls.closing
        if calls.section_opening:
            opening, closing = calls.section_opening, calls.section_closing
        elif calls.is_list:
            body = f'"[" {body} "]"'
        else:
            body = call
        is_first = calling.must or calling.content is not None
        lead = self.literal(opening) if is_first else self.until(opening)
        return self.rule(f"{lead} {body} {self.literal(closing)}")

    def _call(self, calls: CallSyntax) -> str:
        """Return a rule of one call, of any function."""
        alternatives = []
        for name, parameters in self._calling.tools.items():
            schema, call = schema_of_arguments(parameters), calls.call
            if isinstance(call, JsonCall):
                head = f'{{"name": {json.dumps(name)}, "{call.arguments}": '
                body = f'{self.literal(head)} {self.json(schema)} "}}"'
            else:
                ids = f"{self.literal(call.id_marker)} /[a-zA-Z0-9]{{9}}/" if call.id_marker else ""
                number = f"{self.literal(call.number_marker)} /[0-9]{{1,4}}/" if call.number_marker else ""
                head = self.literal(f"{call.prefix}{name}")
                body = f"{head} {ids} {number} {self.literal(call.infix)} {self._arguments(call.arguments, schema)}"
                body += f" {self.literal(call.suffix)}"
            if calls.section_opening:
                body = f"{self.literal(calls.opening)} {body} {self.literal(calls.closing)}"
            alternatives.append(self.rule(body))
        return self.rule(" | ".join(alternatives))

    def _arguments(self, syntax: Any, schema: dict[str, Any]) -> str:
        if isinstance(syntax, JsonArguments):
            return self.json(schema)
        if isinstance(syntax, LiteralArguments):
            return self._members(syntax, schema, schema, syntax.assign, quoted=False)
        properties, required, others = object_properties(schema)
        members = [
            (self._tagged(syntax, self.literal(name), each, schema), name in required)
            for name, each in properties.items()
        ]
        if not members and others is not False:
            key = self.rule(r"/[A-Za-z_][A-Za-z0-9_]{0,31}/", kind="KEY")
            return f"{self._tagged(syntax, key, others, schema)}*"
        return " ".join(f"{member}{'' if is_required else '?'}" for member, is_required in members)

    def _tagged(self, syntax: TaggedArguments, key: str, schema: Any, root: dict[str, Any]) -> str:
        """Return a rule of an argument between markers."""
        types = types_of(schema, root)
        head, closing = f"{self.literal(syntax.opening)} {key}", self.literal(syntax.closing)
        alternatives = []
        if "string" in types:
            is_mixed = types != {"string"} and not syntax.named_json
            text = self._text(schema, root, syntax.closing, is_mixed=is_mixed)
            alternatives.append(f"{head} {self.literal(syntax.named)} {text}")
        if others := types - {"string"}:
            value = self.json(narrowed(schema, root, others))
            alternatives.append(f"{head} {self.literal(syntax.named_json or syntax.named)} {value} {closing}")
        return self.rule(" | ".join(alternatives))

    def _text(self, schema: Any, root: Mapping[str, Any], closing: str, *, is_mixed: bool = False) -> str:
        """Return a text as it is up to a closing marker, and the marker."""
        written, alternatives = self.literal(closing), _texts(schema, root)
        is_special = written.startswith("<[")
        first = words(closing)[0]
        excluded = [] if is_special else [f"/(.|\\n)*{_pattern(first)}(.|\\n)*/"]
        excluded += _LOOKS_LIKE_JSON if is_mixed else ()
        terms = []
        for patterns in alternatives:
            parts = [*patterns, *(f"~{each}" for each in excluded)]
            terms.append(f"({' & '.join(parts)})" if len(parts) > 1 else parts[0])
        text = f"({' | '.join(terms)})"
        if is_special:
            return f"{self.rule(text, kind='TEXT')} {written}"
        return self.rule(f"{text} {json.dumps(closing, ensure_ascii=False)}", kind="TEXT")

    def _members(
        self, syntax: LiteralArguments, schema: Any, root: dict[str, Any], assign: str, *, quoted: bool
    ) -> str:
        """Return the members of an object in a literal."""
        properties, required, others = object_properties(schema)
        if not properties and others is not False:
            value = self._literal(syntax, others, root)
            key = self.rule(r"/[A-Za-z_][A-Za-z0-9_]{0,31}/", kind="KEY")
            member = f"{self._key(syntax, key, quoted)} {self.literal(assign)} {value}"
            return self._separated(syntax, self.rule(member), 0, None)
        members = []
        for name, each in properties.items():
            key = self._key(syntax, self.literal(name), quoted)
            member = f"{key} {self.literal(assign)} {self._literal(syntax, each, root)}"
            members.append((self.rule(member), name in required))
        return self._sequence(members, syntax.separator)

    def _key(self, syntax: LiteralArguments, key: str, quoted: bool) -> str:
        quote = self.literal(syntax.quotes[0])
        return f"{quote} {key} {quote}" if quoted and not syntax.bare_keys else key

    def _sequence(self, members: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return members in their order, of which some may be left out, with a separator between two."""
        first, more = '""', '""'  # what follows when nothing came before, and when something did
        for member, is_required in reversed(members):
            after = f"{self.literal(separator)} {member} {more}"
            then = f"{member} {more}"
            if is_required:
                first, more = self.rule(then), self.rule(after)
            else:
                first, more = self.rule(f"{then} | {first}"), self.rule(f"{after} | {more}")
        return first

    def _separated(self, syntax: LiteralArguments, item: str, least: int, most: int | None) -> str:
        """Return items with separators between them."""
        another = f"({self.literal(syntax.separator)} {item})"
        if most == 0:
            return '""'
        rest = f"{another}{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return f"{item} {rest}" if least else f"({item} {rest})?"

    def _literal(self, syntax: LiteralArguments, schema: Any, root: dict[str, Any]) -> str:
        """Return a rule of a value in a literal."""
        schema = resolved(schema, root)
        if not isinstance(schema, Mapping) or not schema.keys() - ANNOTATIONS:
            return self._any_literal(syntax)
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
            if schema.keys() - ANNOTATIONS - {"enum", "const", "type"} or not values:
                raise ArgumentError("enum with other keywords cannot be enforced in this form of calls")
            return self.rule(" | ".join(self._written(syntax, value) for value in values))
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                if schema.keys() - ANNOTATIONS - {keyword}:
                    raise ArgumentError(f"{keyword} with other keywords cannot be enforced in this form of calls")
                return self.rule(" | ".join(self._literal(syntax, each, root) for each in schema[keyword]))
        types = types_of(schema, root)
        kinds = sorted(types - {"integer"} if "number" in types else types)
        if types == TYPES or "allOf" in schema:
            raise ArgumentError("a schema without a type cannot be enforced in this form of calls")
        return self.rule(" | ".join(self._of_type(syntax, kind, schema, root) for kind in kinds))

    def _of_type(self, syntax: LiteralArguments, kind: str, schema: Mapping[str, Any], root: dict[str, Any]) -> str:
        true, false, null = syntax.constants
        if kind in ("boolean", "null"):
            return f'("{true}" | "{false}")' if kind == "boolean" else f'"{null}"'
        if kind == "string" and not syntax.is_escaped:
            quote = syntax.quotes[0]
            return f"{self.literal(quote)} {self._text(narrowed(schema, root, frozenset({'string'})), root, quote)}"
        if kind == "array":
            known = ANNOTATIONS | {"type", "items", "minItems", "maxItems"}
            if unknown := sorted(schema.keys() - known):
                raise ArgumentError(f"{unknown[0]!r} of an array cannot be enforced in this form of calls")
            item = self._literal(syntax, schema.get("items", {}), root)
            return f'"[" {self._separated(syntax, item, schema.get("minItems", 0), schema.get("maxItems"))} "]"'
        if kind == "object":
            inner = {"type": "object", **{name: value for name, value in schema.items() if name != "type"}}
            return f'"{{" {self._members(syntax, inner, root, syntax.pair, quoted=True)} "}}"'
        return self.json(narrowed(schema, root, frozenset({kind, "integer"} if kind == "number" else {kind})))

    def _written(self, syntax: LiteralArguments, value: Any) -> str:
        """Return a value as a literal."""
        if isinstance(value, bool) or value is None:
            return json.dumps(syntax.constants[2 if value is None else 1 - value])
        if isinstance(value, str) and not syntax.is_escaped:
            return f"{self.literal(syntax.quotes[0])} {self.literal(value)} {self.literal(syntax.quotes[0])}"
        if isinstance(value, str | int | float):
            return self.literal(json.dumps(value, ensure_ascii=False))
        raise ArgumentError("an enum of arrays or objects cannot be enforced in this form of calls")

    def _any_literal(self, syntax: LiteralArguments) -> str:
        """Return a rule of any value in a literal."""
        if not self._any:
            name = self._any[0] = "any_value"
            key = self.rule(r"/[A-Za-z_][A-Za-z0-9_]{0,31}/", kind="KEY")
            kinds = ("boolean", "null", "number", "string")
            scalars = [self._of_type(syntax, kind, {"type": kind}, {}) for kind in kinds]
            member = f"{self._key(syntax, key, True)} {self.literal(syntax.pair)} {name}"
            items = self._separated(syntax, name, 0, None)
            members = self._separated(syntax, self.rule(member), 0, None)
            self.rules.append(f'{name}: {" | ".join(scalars)} | "[" {items} "]" | "{{" {members} "}}"')
        return self._any[0]

    def messages(self, channels: Channels) -> None:
        """Add the start of outputs whose messages have headers."""
        channel, message = self.literal(channels.channel), self.literal(channels.message)
        goes_on = f"{self.until(channels.endings[0])} {self.literal(channels.start + channels.author)}"
        before = [
            self.rule(f"{channel} {self.literal(name)} {message} {goes_on}")
            for name in (channels.reasoning, channels.calls)
        ]
        constrained = f'" " {self.literal(channels.constrain)} "json" {message}'
        calls = [
            self.rule(
                f"{channel} {self.literal(channels.calls + channels.recipient + name)} {constrained} "
                f"{self.json(schema_of_arguments(parameters))}"
            )
            for name, parameters in self._calling.tools.items()
        ]
        last = (
            calls
            if self._calling.must
            else [*calls, f"{channel} {self.literal(channels.content)} {message} {self.content()}"]
        )
        self.rules.append(f"start: ({' | '.join(before)})* ({' | '.join(last)})")


def _beginnings(chat_format: ChatFormat) -> Collection[str]:
    """Return the markers at which a parser that reads content begins to read something else."""
    if (channels := chat_format.channels) is not None:
        return (channels.start, channels.channel, channels.message, *channels.endings)
    return () if (calls := chat_format.calls) is None else words(calls.section_opening or calls.opening)[:1]


def _texts(schema: Any, root: Mapping[str, Any]) -> list[list[str]]:
    """Return alternatives of patterns that a schema's texts match, all of one alternative."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return [[_ANY]]
    if isinstance(schema.get("enum"), list) or "const" in schema:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]]
        return [[f"/{_pattern(value)}/" if value else '""'] for value in values if isinstance(value, str)]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            branches = [each for each in schema[keyword] if "string" in types_of(each, root)]
            return [alternative for each in branches for alternative in _texts(each, root)]
    known = ANNOTATIONS | {"type", "minLength", "maxLength", "pattern", "format"} | _OF_OTHER_TYPES
    if unknown := sorted(schema.keys() - known):
        raise ArgumentError(f"{unknown[0]!r} of a string cannot be enforced in this form of calls")
    patterns = []
    if "minLength" in schema or "maxLength" in schema:
        patterns.append(f"/(.|\\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/")
    if "pattern" in schema:
        patterns.append(f"/{_searched(str(schema['pattern']))}/")
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise ArgumentError(f"the format {schema['format']!r} cannot be enforced in this form of calls")
        patterns.append(f"/{_FORMATS[schema['format']]}/")
    return [patterns or [_ANY]]


_OF_OTHER_TYPES = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "minItems", "maxItems"}
    | {"properties", "required", "additionalProperties"}
)


def _pattern(text: str) -> str:
    """Return a text as a regular expression within slashes."""
    return re.sub(r"[].*+?()|{}^$\\/[]", lambda match: f"\\{match[0]}", text).replace("\n", "\\n").replace("\t", "\\t")


def _searched(pattern: str) -> str:
    """Return a schema's pattern, which may match anywhere, as one that matches a whole text."""
    pattern = pattern.replace("\\/", "/").replace("/", "\\/")
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends]
    anything = r"(.|\n)*"
    return f"{'' if begins else anything}({inner}){'' if ends else anything}"
