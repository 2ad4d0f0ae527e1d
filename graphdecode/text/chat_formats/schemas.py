"""What JSON schemas say of values: which types they may have, as far as that can be told without a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphdecode.errors import ArgumentError, shown

TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
ANNOTATIONS = frozenset(
    {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "example"}
)
_MAX_DEPTH = 16


def value_types(value: Any) -> frozenset[str]:
    """Return the types that a value has."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    kinds = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return frozenset({kinds[type(value)]})


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a schema refers to within `root`, or itself."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = root
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, Mapping) else None
        schema = target
    return {}


def property_schema(schema: Any, name: str) -> Any:
    """Return the schema of a property of the objects of a schema; {} where it says nothing."""
    schema = resolved(schema, schema) if isinstance(schema, Mapping) else {}
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    others = schema.get("additionalProperties") if isinstance(schema, Mapping) else None
    return others if isinstance(others, Mapping) else {}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the types that a schema's values may have."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return TYPES
    types = TYPES
    declared = schema.get("type")
    if isinstance(declared, str | list):
        listed = [declared] if isinstance(declared, str) else declared
        types &= {kind for kind in listed if isinstance(kind, str)} | ({"integer"} if "number" in listed else set())
    if isinstance(schema.get("enum"), list):
        types &= frozenset().union(*map(value_types, schema["enum"]))
    if "const" in schema:
        types &= value_types(schema["const"])
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            types &= frozenset().union(*(types_of(each, root, depth + 1) for each in schema[keyword]))
    if isinstance(schema.get("allOf"), list):
        for each in schema["allOf"]:
            types &= types_of(each, root, depth + 1)
    return types


def referable(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a part of the schema `root` as a schema of its own, whose references resolve."""
    if not isinstance(schema, Mapping):
        return schema
    return {**{name: root[name] for name in ("$defs", "definitions") if name in root}, **schema}


def narrowed(schema: Any, root: Mapping[str, Any], types: frozenset[str]) -> Any:
    """Return a schema of those values that have one of some types; raises ArgumentError where that cannot be said."""
    schema = resolved(schema, root)
    admitted = types_of(schema, root)
    if admitted <= types or not isinstance(schema, Mapping):
        return referable(schema, root)
    if isinstance(schema.get("enum"), list):
        return {"enum": [value for value in schema["enum"] if value_types(value) & types]}
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            branches = [each for each in schema[keyword] if types_of(each, root) & types]
            return referable({**schema, keyword: [narrowed(each, root, types) for each in branches]}, root)
    if isinstance(schema.get("allOf"), list):
        raise ArgumentError("allOf with several types cannot be enforced in this form of calls")
    kept = sorted(admitted & types)
    return referable({**schema, "type": [kind for kind in kept if kind != "integer" or "number" not in kept]}, root)


def object_properties(schema: Any) -> tuple[dict[str, Any], frozenset[str], Any]:
    """Return the properties of an object's schema, the names of required ones, and the schema of others.

    The latter is False if there are none. Raises ArgumentError for a schema that says more.
    """
    schema = resolved(schema, schema) if isinstance(schema, Mapping) else schema
    if not isinstance(schema, Mapping):
        raise ArgumentError(f"parameters must be a schema of an object, got {shown(schema)}")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    known = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "strict"}
    if unknown := sorted(schema.keys() - known):
        raise ArgumentError(f"{unknown[0]!r} of an object cannot be enforced in this form of calls")
    is_wrong = not isinstance(properties, Mapping) or not isinstance(required, list)
    if is_wrong or schema.get("type", "object") != "object" or not set(required) <= set(properties):
        raise ArgumentError("parameters must be a schema of an object, with its required properties")
    says_nothing = "properties" not in schema and schema.get("type") == "object"
    others = schema.get("additionalProperties", {} if says_nothing else False)
    # of an object with properties, those that it does not name are left out, which it allows
    return dict(properties), frozenset(required), False if properties else {} if others is True else others
