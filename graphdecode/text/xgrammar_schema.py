"""Which schemas xgrammar keeps whole: it passes over many keywords in silence, so that they are looked at before."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from graphdecode.errors import ArgumentError
from graphdecode.text.regex_pattern import Characters, Pattern, Ranges, Repeat, UnknownPatternError, parse

_NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$comment")
)
_SHARED = frozenset(("$defs", "definitions"))
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_TYPE = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": _RANGE,
    "number": _RANGE,
    "boolean": (),
    "null": (),
}
_ALONE = ("$ref", "anyOf", "enum", "const")  # what stands beside one of these is not looked at
_FORMATS = ("uuid",)  # of the others it writes some that are none: the 31st of April, 066.1.1.1
_PLAIN = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"  # characters that stand in JSON as they are
_ASCII: dict[str, Ranges] = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "s": ((9, 13), (32, 32)),
}


def kept_schema(schema: Any) -> Any:
    """Return what xgrammar is to be given for a schema: every answer that it admits is one that the schema admits.

    Objects that name properties have no others, as vLLM has it with xgrammar; lengths are patterns, for it lets
    control characters into strings that have lengths.

    Raises:
        ArgumentError: it cannot be kept; the message names the keyword.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise ArgumentError(f"a schema must be an object or a boolean, got {schema!r:.40}")
    kept = {name: value for name, value in schema.items() if name not in _NOTES}
    for name in _SHARED & kept.keys():
        kept[name] = _kept_values(name, kept[name])
    asserting = kept.keys() - _SHARED
    for name in _ALONE:
        if name in asserting:
            _check_alone(name, kept, asserting)
            if name == "anyOf":
                kept[name] = _kept_list(name, kept[name])
            return kept
    types = [kept["type"]] if isinstance(kept.get("type"), str) else kept.get("type", list(_OF_TYPE))
    if not isinstance(types, list) or not types or not all(each in _OF_TYPE for each in types):
        raise _refused("type")
    known = {name for each in types for name in _OF_TYPE[each]}
    unknown = sorted(asserting - known - {"type"})
    if unknown:
        raise _refused(*unknown)
    if "type" not in kept and asserting:
        raise ArgumentError(f"without type, xgrammar does not keep {_quoted(*sorted(asserting))}")
    _keep_object(kept)
    _keep_array(kept)
    return _kept_string(kept)


def _check_alone(name: str, kept: Mapping[str, Any], asserting: set[str]) -> None:
    beside = sorted(asserting - {name})
    if name in ("enum", "const") and beside == ["type"]:
        values = kept["enum"] if name == "enum" else [kept["const"]]
        types = [kept["type"]] if isinstance(kept["type"], str) else kept["type"]
        if not isinstance(values, list) or not isinstance(types, list):
            raise _refused(name)
        if all(any(_is_of(value, each) for each in types) for value in values):
            return
    if beside:
        raise ArgumentError(f"xgrammar does not keep {_quoted(*beside)} beside {_quoted(name)}")
    if name == "$ref" and not str(kept[name]).startswith("#"):
        raise ArgumentError(f'xgrammar knows no "$ref" to other documents, got {kept[name]!r:.80}')


def _is_of(value: Any, type_name: Any) -> bool:
    if isinstance(value, bool):
        return type_name == "boolean"
    classes: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "null": type(None),
    }
    return type_name in classes and isinstance(value, classes[type_name])


def _keep_object(kept: dict[str, Any]) -> None:
    if "properties" in kept:
        kept["properties"] = _kept_values("properties", kept["properties"])
    named = kept.get("properties", {})
    required = kept.get("required", [])
    if not isinstance(required, list) or any(name not in named for name in required):
        raise ArgumentError('xgrammar does not keep "required" of what is not in "properties"')
    if named:  # a further one could be a named one, spelled with escapes
        if kept.setdefault("additionalProperties", False) is not False:
            raise ArgumentError('xgrammar does not keep "additionalProperties" beside "properties"')
    elif "additionalProperties" in kept:
        kept["additionalProperties"] = kept_schema(kept["additionalProperties"])


def _keep_array(kept: dict[str, Any]) -> None:
    if "items" in kept:
        kept["items"] = kept_schema(kept["items"])
    if "prefixItems" in kept:
        kept["prefixItems"] = _kept_list("prefixItems", kept["prefixItems"])


def _kept_string(kept: dict[str, Any]) -> dict[str, Any]:
    lengths: list[str] = [name for name in ("minLength", "maxLength") if name in kept]
    if "format" in kept and kept["format"] not in _FORMATS:
        raise ArgumentError(f'xgrammar does not keep "format" {kept["format"]!r:.40}; it keeps {", ".join(_FORMATS)}')
    if sum((bool(lengths), "pattern" in kept, "format" in kept)) > 1:
        raise ArgumentError(f"xgrammar keeps one of pattern, format and lengths, got {_quoted(*lengths or ['format'])}")
    if "pattern" in kept:
        _check_pattern(kept["pattern"])
    if not lengths:
        return kept
    least, most = kept.pop("minLength", 0), kept.pop("maxLength", "")
    if not all(each == "" or (type(each) is int and each >= 0) for each in (least, most)):
        raise _refused(*lengths)
    return {**kept, "pattern": f"^{_PLAIN}{{{least},{most}}}$"}


def _check_pattern(pattern: Any) -> None:
    """Refuse a pattern whose characters JSON escapes: xgrammar would write some of them as they are."""
    body = str(pattern).removeprefix("^")
    body = re.sub(r"(?<!\\)((?:\\\\)*)\$$", r"\1", body)
    try:
        if _escaped(parse(body, _ASCII.__getitem__)):
            raise ArgumentError('xgrammar does not keep a "pattern" of characters that JSON escapes')
    except UnknownPatternError as error:
        raise ArgumentError(f'xgrammar does not keep this "pattern": {error}') from error


def _escaped(pattern: Pattern) -> bool:
    """Return whether a text of a pattern can have a quote, a backslash or a control character."""
    if isinstance(pattern, Characters):
        return any(low < 0x20 or low <= 0x22 <= high or low <= 0x5C <= high for low, high in pattern.ranges)
    parts = (pattern.part,) if isinstance(pattern, Repeat) else pattern.parts
    return any(_escaped(part) for part in parts)


def _kept_values(name: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise _refused(name)
    return {each: kept_schema(value) for each, value in given.items()}


def _kept_list(name: str, given: Any) -> list[Any]:
    if not isinstance(given, list) or not given:
        raise _refused(name)
    return [kept_schema(each) for each in given]


def _refused(*names: str) -> ArgumentError:
    return ArgumentError(f"xgrammar does not keep {_quoted(*names)}")


def _quoted(*names: str) -> str:
    return ", ".join(f'"{name}"' for name in names)
