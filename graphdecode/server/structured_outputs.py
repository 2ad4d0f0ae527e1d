"""Structured outputs: which one a request asks for, and reading it in a child process before it is used."""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, Protocol

import numpy as np

from graphdecode.engine import StructuredOutputsParams
from graphdecode.engine.constraint import ConstraintError, TokenAutomaton
from graphdecode.errors import ArgumentError, shown
from graphdecode.server.desk import Desk
from graphdecode.server.forked_work import ForkedWork, WorkError, WorkLimits
from graphdecode.server.http import HttpError
from graphdecode.server.protocol import ChatCompletion, Generation
from graphdecode.server.tool_calls import ToolFormat
from graphdecode.text.grammar import MAX_GRAMMAR_LENGTH

# llguidance's options for arguments: what cannot be kept is refused, and JSON is spaced as chat templates write it
_STRICTLY = {
    "x-guidance": {"lenient": False, "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}
_KNOWN = frozenset(field.name for field in fields(StructuredOutputsParams))
_READING_LIMITS = WorkLimits(cpu_seconds=4, wall_seconds=60.0, memory_bytes=512 << 20)
KEPT_BYTES = 32 << 20  # in the engine's process
_KEPT = 64
_OUTCOMES_KEPT, _OUTCOMES_BYTES = 256, 8 << 20  # in this one
_LEAST_SIZE = 1 << 14  # of a grammar, among the work of its caller: small ones may take long, too


class StructuredOutput(NamedTuple):
    """A structured output that a request asks for."""

    params: StructuredOutputsParams  # which one
    field: str  # of the request, that asks for it

    def said(self, error: ArgumentError) -> str:
        """Return an error of the engine in the words of the request."""
        text = str(error).removeprefix("structured_outputs")
        return self.field + (text.replace(": json ", ": json_schema ", 1) if self.field == "response_format" else text)


def structured_output_of(body: Generation) -> StructuredOutput | None:
    """Return the structured output that a request asks for; None where it asks for none.

    Raises:
        HttpError: it is none that there is, or there are two.
    """
    asked = [_response_format(body.response_format), _structured_outputs(body.structured_outputs)]
    given = [each for each in asked if each is not None]
    if len(given) > 1:
        raise HttpError(400, "response_format and structured_outputs: give one of them", param="response_format")
    return given[0] if given else None


def _response_format(given: dict[str, Any] | None) -> StructuredOutput | None:
    field = "response_format"
    if given is None or given.get("type") == "text":
        return None
    if given.get("type") == "json_object":
        return StructuredOutput(StructuredOutputsParams(json_object=True), field)
    if given.get("type") != "json_schema":
        raise HttpError(400, f"{field}: type must be text, json_object or json_schema", param=field)
    wrapped = given.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    if not isinstance(schema, dict):
        raise HttpError(400, f"{field}: json_schema must have a schema", param=field)
    return _made({"json": schema}, field)


def _structured_outputs(given: dict[str, Any] | None) -> StructuredOutput | None:
    field = "structured_outputs"
    if given is None:
        return None
    unknown = sorted(given.keys() - _KNOWN)
    if unknown:
        raise HttpError(
            400, f"{field}: unknown {shown(unknown[0])}; known are {', '.join(sorted(_KNOWN))}", param=field
        )
    return _made({name: value for name, value in given.items() if value is not None}, field)


def _made(given: dict[str, Any], field: str) -> StructuredOutput:
    """Return a structured output with its schema as text, which other processes read, within a limit of length."""
    try:
        if isinstance(given.get("json"), dict):
            try:
                given = {**given, "json": json.dumps(given["json"], ensure_ascii=False)}
            except (ValueError, RecursionError) as error:  # an integer of 5,000 digits
                raise ArgumentError(f": json cannot be read: {error}") from error
        for name, text in given.items():
            if isinstance(text, str) and len(text) > MAX_GRAMMAR_LENGTH:
                raise ArgumentError(f": {name} must have at most {MAX_GRAMMAR_LENGTH} characters, got {len(text)}")
        return StructuredOutput(StructuredOutputsParams(**given), field)
    except ArgumentError as error:
        raise HttpError(400, field + str(error).removeprefix("structured_outputs"), param=field) from error


def structured_output_of_calls(
    body: ChatCompletion, tool_format: ToolFormat, opening_id: int | None
) -> StructuredOutput | None:
    """Return the grammar of an answer that must call tools, or whose calls keep to the schemas of strict tools.

    The calls look as the model has learnt to write them.

    Args:
        opening_id: the token of `tool_format.opening`, where that is special.

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
        return _calls(functions, tool_format, opening_id, several=False, amid_text=False)
    several = body.parallel_tool_calls is not False
    if choice == "required":
        return _calls(functions, tool_format, opening_id, several=several, amid_text=False)
    if tool_format.opening and any(function.get("strict") is True for function in functions):
        functions = [each if each.get("strict") is True else {**each, "parameters": None} for each in functions]
        return _calls(functions, tool_format, opening_id, several=several, amid_text=True)
    return None


def _calls(
    functions: Sequence[dict[str, Any]],
    tool_format: ToolFormat,
    opening_id: int | None,
    *,
    several: bool,
    amid_text: bool,
) -> StructuredOutput:
    """Return a grammar in Lark's notation; each schema is a document of its own, whose references stay in it."""
    named = [(function.get("name"), function.get("parameters")) for function in functions]
    if not named or not all(isinstance(name, str) and isinstance(given, dict | None) for name, given in named):
        raise HttpError(400, "tools: each function must have a name, and parameters that are a schema", param="tools")
    lead = (
        f"<[{opening_id}]>"
        if tool_format.is_special
        else json.dumps(tool_format.opening)
        if tool_format.opening
        else ""
    )
    rules = ["TEXT: /(.|\\n)*/"]
    if amid_text and tool_format.is_special:
        lead = f"TEXT {lead}"
    elif amid_text:
        rules.append(f"opening[lazy]: /(.|\\n)*/ {lead}")
        lead = "opening"
    if tool_format.closing:
        rules.append(f"block: {lead} NEWLINE call NEWLINE {json.dumps(tool_format.closing)}")
    elif tool_format.opening:
        rules.append(f"""block: {lead} "[" call {'(", " call)*' if several else ""} "]" """)
    else:
        rules.append("block: call")
    if amid_text:
        rules.append("start: block* TEXT")
    else:
        rules.append("start: block (NEWLINE block)*" if several and tool_format.closing else "start: block")
    rules += ['NEWLINE: "\\n"', f"call: {' | '.join(f'call_{index}' for index in range(len(named)))}"]
    for index, (name, parameters) in enumerate(named):
        head = f'{{"name": {json.dumps(name)}, "{tool_format.arguments}": '
        rules.append(f'call_{index}: {json.dumps(head)} arguments_{index} "}}"')
        schema = {"type": "object"} if parameters is None else parameters
        rules.append(f"arguments_{index}: %json {json.dumps(schema | _STRICTLY)}")
    return StructuredOutput(StructuredOutputsParams(grammar="\n".join(["%llguidance {}", *rules, ""])), "tools")


class ReadGrammar(NamedTuple):
    """A grammar that can be enforced."""

    grammar: str  # its text, which `Grammars.compiled` takes
    automaton: TokenAutomaton | None  # what it became; None: it is not that simple
    nbytes: int  # that it takes where it is compiled


class KeptGrammars:
    """The grammars that the engine's process holds: the last used ones that fit in its memory."""

    def __init__(self) -> None:
        self._nbytes: OrderedDict[str, int] = OrderedDict()
        self._sum = 0

    def __contains__(self, grammar: str) -> bool:
        """Return whether a grammar is held, and mark it as used."""
        if grammar not in self._nbytes:
            return False
        self._nbytes.move_to_end(grammar)
        return True

    def add(self, read: ReadGrammar) -> list[str]:
        """Add a grammar; return the grammars to evict for it."""
        self._nbytes[read.grammar] = read.nbytes
        self._sum += read.nbytes
        gone = []
        while len(self._nbytes) > 1 and (len(self._nbytes) > _KEPT or self._sum > KEPT_BYTES):
            other, nbytes = self._nbytes.popitem(last=False)
            self._sum -= nbytes
            gone.append(other)
        return gone

    def drop(self, grammar: str) -> bool:
        """Evict a grammar; return whether it was there."""
        nbytes = self._nbytes.pop(grammar, None)
        self._sum -= nbytes or 0
        return nbytes is not None


class _Taught(Protocol):
    """The receiver of grammars once they are read: `EngineClient`."""

    def knows(self, grammar: str) -> bool: ...

    def teach(self, read: ReadGrammar) -> None: ...


class _Outcomes:
    """The results of the latest readings: texts by digest of the request."""

    def __init__(self) -> None:
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._sum = 0

    def get(self, digest: bytes) -> str | None:
        return self._texts.get(digest)

    def put(self, digest: bytes, text: str) -> None:
        self._sum += len(text) - len(self._texts.pop(digest, ""))
        self._texts[digest] = text
        while len(self._texts) > _OUTCOMES_KEPT or self._sum > _OUTCOMES_BYTES:
            self._sum -= len(self._texts.popitem(last=False)[1])


@dataclass
class _Reading:
    """A reading in progress."""

    task: asyncio.Task[str]  # that reads it
    askers: int = 0  # who wait for it


class GrammarReader:
    """Reads structured outputs in a child process, and caches the results.

    Args:
        work: where they are read.
        taught: where they go.
    """

    def __init__(self, work: ForkedWork, taught: _Taught) -> None:
        self._work = work
        self._taught = taught
        self._wrong = _Outcomes()  # errors
        self._good = _Outcomes()  # grammars
        self._reading: dict[tuple[str, bytes], _Reading] = {}

    async def grammar(self, params: StructuredOutputsParams, caller: str) -> str:
        """Return the grammar of a structured output.

        Raises:
            ArgumentError: it cannot be kept, or reading it takes too long; the message says what is in the way.
            HttpError: it could not be read now.
        """
        told = json.dumps(asdict(params)).encode()
        digest = hashlib.blake2b(told).digest()
        wrong, grammar = self._wrong.get(digest), self._good.get(digest)
        if wrong is not None:
            raise ArgumentError(wrong)
        if grammar is not None and self._taught.knows(grammar):
            return grammar
        return await self._shared((caller, digest), params, _LEAST_SIZE + len(told))

    async def _shared(self, key: tuple[str, bytes], params: StructuredOutputsParams, size: int) -> str:
        """Return the grammar; requests of one caller for the same one share a reading."""
        reading = self._reading.get(key)
        if reading is None:
            reading = self._reading[key] = _Reading(asyncio.create_task(self._read(key, params, size), name="grammar"))
            reading.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be left
        reading.askers += 1
        try:
            return await asyncio.shield(reading.task)
        finally:
            reading.askers -= 1
            if not reading.askers:
                reading.task.cancel()
                if self._reading.get(key) is reading:
                    del self._reading[key]

    async def _read(self, key: tuple[str, bytes], params: StructuredOutputsParams, size: int) -> str:
        caller, digest = key
        try:
            read: ReadGrammar = await self._work.run(
                read_grammar, params, limits=_READING_LIMITS, caller=caller, size=size
            )
        except (ArgumentError, WorkError) as error:
            if isinstance(error, WorkError):
                error = ArgumentError(f"structured_outputs: reading the {params.kind} {error}")
            self._wrong.put(digest, str(error))
            raise error from None
        self._good.put(digest, read.grammar)
        if not self._taught.knows(read.grammar):
            self._taught.teach(read)
        return read.grammar


def read_grammar(desk: Desk, params: StructuredOutputsParams) -> ReadGrammar:
    """Compile a structured output as the engine's process will, and compute its first mask.

    Raises:
        ArgumentError: it cannot be kept.
    """
    before = _most_resident_bytes()
    grammars = desk.input_processor.grammars
    grammar = grammars.grammar(params)
    try:
        compiled = grammars.compiled(grammar)
        grammars.held(compiled).fill(np.empty(desk.mask_words, dtype=np.int32), ())
    except ConstraintError as error:
        raise ArgumentError(f"structured_outputs: {params.kind} cannot be kept: {error}") from error
    if isinstance(compiled, TokenAutomaton):
        arrays = (compiled.classes, compiled.following, compiled.masks, compiled.accepts, compiled.completes)
        return ReadGrammar(grammar, compiled, len(grammar) + sum(array.nbytes for array in arrays))
    return ReadGrammar(grammar, None, len(grammar) + _most_resident_bytes() - before)


def _most_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
