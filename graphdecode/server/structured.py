"""Which form an answer must have: `response_format`, `structured_outputs`, and the calls of tools that are a must."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from graphdecode.engine import StructuredOutputsParams
from graphdecode.errors import ArgumentError, shown
from graphdecode.server.http_errors import HttpError
from graphdecode.server.protocol import ChatCompletion, Generation
from graphdecode.server.tool_calls import ToolFormat
from graphdecode.text.grammar import MAX_GRAMMAR_LENGTH

# llguidance's options for arguments: what cannot be kept is refused, and JSON is spaced as chat templates write it
_STRICTLY = {
    "x-guidance": {"lenient": False, "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}
_KNOWN = frozenset(field.name for field in fields(StructuredOutputsParams))


class Form(NamedTuple):
    """A form that a request asks for.

    Attributes:
        params: which one.
        field: of the request, that asks for it.
    """

    params: StructuredOutputsParams
    field: str

    def said(self, error: ArgumentError) -> str:
        """Return what is wrong with the form, in the words of the request."""
        text = str(error).removeprefix("structured_outputs")
        return self.field + (text.replace(": json ", ": json_schema ", 1) if self.field == "response_format" else text)


def form_of(body: Generation) -> Form | None:
    """Return the form that the fields of a request ask for, None where they ask for none.

    Raises:
        HttpError: it is none that there is, or there are two.
    """
    asked = [_response_format(body.response_format), _structured_outputs(body.structured_outputs)]
    forms = [form for form in asked if form is not None]
    if len(forms) > 1:
        raise HttpError(400, "response_format and structured_outputs: give one of them", param="response_format")
    return forms[0] if forms else None


def _response_format(given: dict[str, Any] | None) -> Form | None:
    field = "response_format"
    if given is None or given.get("type") == "text":
        return None
    if given.get("type") == "json_object":
        return Form(StructuredOutputsParams(json_object=True), field)
    if given.get("type") != "json_schema":
        raise HttpError(400, f"{field}: type must be text, json_object or json_schema", param=field)
    wrapped = given.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    if not isinstance(schema, dict):
        raise HttpError(400, f"{field}: json_schema must have a schema", param=field)
    return _made({"json": schema}, field)


def _structured_outputs(given: dict[str, Any] | None) -> Form | None:
    field = "structured_outputs"
    if given is None:
        return None
    unknown = sorted(given.keys() - _KNOWN)
    if unknown:
        raise HttpError(
            400, f"{field}: unknown {shown(unknown[0])}; known are {', '.join(sorted(_KNOWN))}", param=field
        )
    return _made({name: value for name, value in given.items() if value is not None}, field)


def _made(given: dict[str, Any], field: str) -> Form:
    """Return a form whose schema is a text: it is read again elsewhere, if it is not too long for that."""
    try:
        if isinstance(given.get("json"), dict):
            given = {**given, "json": _text_of(given["json"])}
        for name, text in given.items():
            if isinstance(text, str) and len(text) > MAX_GRAMMAR_LENGTH:
                raise ArgumentError(f": {name} must have at most {MAX_GRAMMAR_LENGTH} characters, got {len(text)}")
        return Form(StructuredOutputsParams(**given), field)
    except ArgumentError as error:
        raise HttpError(400, field + str(error).removeprefix("structured_outputs"), param=field) from error


def _text_of(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (ValueError, RecursionError) as error:  # an integer of 5,000 digits
        raise ArgumentError(f": json cannot be read: {error}") from error


def form_of_calls(body: ChatCompletion, form: ToolFormat, opening_id: int | None) -> Form | None:
    """Return the form of an answer that must call tools, or that keeps to the schemas of strict ones where it calls.

    The calls look as the model has learnt to write them.

    Args:
        body: of the request, with tools.
        form: how the model writes calls.
        opening_id: the token of `form.opening`, where that is special.

    Raises:
        HttpError: `tool_choice` names none of the tools.
    """
    functions = [tool["function"] for tool in body.tools or [] if isinstance(tool.get("function"), dict)]
    choice = body.tool_choice
    if isinstance(choice, dict):
        function = choice.get("function")
        wanted = function.get("name") if choice.get("type") == "function" and isinstance(function, dict) else None
        functions = [function for function in functions if function.get("name") == wanted]
        if wanted is None or not functions:
            raise HttpError(400, "tool_choice must name one of the tools", param="tool_choice")
        return _calls(functions, form, opening_id, several=False, amid_text=False)
    several = body.parallel_tool_calls is not False
    if choice == "required":
        return _calls(functions, form, opening_id, several=several, amid_text=False)
    if form.opening and any(function.get("strict") is True for function in functions):
        functions = [each if each.get("strict") is True else {**each, "parameters": None} for each in functions]
        return _calls(functions, form, opening_id, several=several, amid_text=True)
    return None


def _calls(
    functions: Sequence[dict[str, Any]], form: ToolFormat, opening_id: int | None, *, several: bool, amid_text: bool
) -> Form:
    """Return a grammar in Lark's notation; each schema is a document of its own, whose references stay in it."""
    named = [(function.get("name"), function.get("parameters")) for function in functions]
    if not named or not all(isinstance(name, str) and isinstance(given, dict | None) for name, given in named):
        raise HttpError(400, "tools: each function must have a name, and parameters that are a schema", param="tools")
    lead = f"<[{opening_id}]>" if form.is_special else json.dumps(form.opening) if form.opening else ""
    rules = ["TEXT: /(.|\\n)*/"]
    if amid_text and form.is_special:
        lead = f"TEXT {lead}"
    elif amid_text:
        rules.append(f"opening[lazy]: /(.|\\n)*/ {lead}")
        lead = "opening"
    if form.closing:
        rules.append(f"block: {lead} NEWLINE call NEWLINE {json.dumps(form.closing)}")
    elif form.opening:
        rules.append(f"""block: {lead} "[" call {'(", " call)*' if several else ""} "]" """)
    else:
        rules.append("block: call")
    if amid_text:
        rules.append("start: block* TEXT")
    else:
        rules.append("start: block (NEWLINE block)*" if several and form.closing else "start: block")
    rules += ['NEWLINE: "\\n"', f"call: {' | '.join(f'call_{index}' for index in range(len(named)))}"]
    for index, (name, parameters) in enumerate(named):
        head = f'{{"name": {json.dumps(name)}, "{form.arguments}": '
        rules.append(f'call_{index}: {json.dumps(head)} arguments_{index} "}}"')
        schema = {"type": "object"} if parameters is None else parameters
        rules.append(f"arguments_{index}: %json {json.dumps(schema | _STRICTLY)}")
    return Form(StructuredOutputsParams(grammar="\n".join(["%llguidance {}", *rules, ""])), "tools")
