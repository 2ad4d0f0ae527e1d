"""Structured outputs of requests, compiled in a child process first."""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
from collections import OrderedDict
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from graphdecode.engine import StructuredOutputsParams
from graphdecode.engine.constraint import ConstraintError, TokenAutomaton
from graphdecode.errors import ArgumentError, shown
from graphdecode.server.engine_client import EngineClient
from graphdecode.server.fork_pool import ForkPool
from graphdecode.server.http import HttpError
from graphdecode.server.jobs import JobError, JobLimits
from graphdecode.server.messages import AddGrammar
from graphdecode.server.preprocessing import Preprocessor
from graphdecode.server.protocol import ChatCompletion, Generation
from graphdecode.server.tool_prompts import function_name
from graphdecode.text.chat_formats import ChatFormat
from graphdecode.text.chat_formats.constraint import Calling, grammar_of_calls
from graphdecode.text.grammar import MAX_GRAMMAR_LENGTH, is_available

_PARAM_NAMES = frozenset(field.name for field in fields(StructuredOutputsParams))
# field of a request -> field of `structured_outputs`
_FIELDS = {
    **{f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")},
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
}
_COMPILING_LIMITS = JobLimits(cpu_seconds=4, wall_seconds=60.0, memory_bytes=512 << 20)
_MAX_RESULTS, _MAX_RESULT_CHARACTERS = 256, 8 << 20
_LEAST_SIZE = 1 << 14  # size of a job, for fairness: small grammars may take long, too


def serialized_tokenizer(tokenizer: Any) -> str | None:
    """Return a tokenizer as the engine's process takes it for structured outputs; None: there are none."""
    return tokenizer.backend_tokenizer.to_str() if is_available() else None


class StructuredOutput(NamedTuple):
    """The structured output of a request."""

    params: StructuredOutputsParams
    field: str  # name of the request's field
    is_optional: bool = False  # a request whose grammar cannot be compiled goes without one
    otherwise: StructuredOutput | None = None  # or with this one

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The schema of a `response_format`; None: it is something else."""
        if self.field != "response_format":
            return None
        schema = {"type": "object"} if self.params.json_object else self.params.schema
        return schema if isinstance(schema, dict) else None

    def error_text(self, error: ArgumentError) -> str:
        """Return an error of the engine with the names of the request's fields."""
        text = str(error).removeprefix("structured_outputs")
        return self.field + (text.replace(": json ", ": json_schema ", 1) if self.field == "response_format" else text)


def structured_output_of(body: Generation) -> StructuredOutput | None:
    """Return the structured output of a request; raises `HttpError` if it is invalid, or there are two."""
    named = [_named(body, field) for field in _FIELDS]
    candidates = [_response_format(body.response_format), _structured_outputs(body.structured_outputs), *named]
    outputs = [each for each in candidates if each is not None]
    if len(outputs) > 1:
        first, second = outputs[0].field, outputs[1].field
        raise HttpError(400, f"give {first} or {second}, not both", param=first)
    if body.guided_whitespace_pattern is not None and not (outputs and outputs[0].field == "guided_json"):
        field = "guided_whitespace_pattern"
        raise HttpError(400, f"{field} needs guided_json", param=field)
    return outputs[0] if outputs else None


def _named(body: Generation, field: str) -> StructuredOutput | None:
    """Return the structured output of a field of vLLM's old names, SGLang's or llama.cpp's."""
    kind, value = _FIELDS[field], getattr(body, field)
    if value is None or (field == "grammar" and not value):  # llama.cpp's default
        return None
    if field == "json_schema" and value == {}:  # llama.cpp's for any object
        value = {"type": "object"}
    whitespace = body.guided_whitespace_pattern if field == "guided_json" else None
    return _checked({kind: value} | ({} if whitespace is None else {"whitespace_pattern": whitespace}), field)


def _response_format(response_format: dict[str, Any] | None) -> StructuredOutput | None:
    field = "response_format"
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise HttpError(400, f"{field}: type must be text, json_object or json_schema", param=field)
    wrapped = response_format.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    if kind == "json_schema" and not isinstance(schema, dict):
        raise HttpError(400, f"{field}: json_schema must have a schema", param=field)
    schema_field = {"json_object": "schema", "json_schema": "json_schema"}.get(kind)
    for name, value in response_format.items():
        if name not in ("type", schema_field) and value:
            raise HttpError(400, f"{field}: {shown(name)} has no effect with the type {kind}", param=field)
    if kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema")  # llama.cpp's
        if not schema and schema in (None, {}):
            return StructuredOutput(StructuredOutputsParams(json_object=True), field)
        if not isinstance(schema, dict):
            raise HttpError(400, f"{field}: schema must be a JSON Schema, got {shown(schema)}", param=field)
    return _checked({"json": schema}, field)


def _structured_outputs(params: dict[str, Any] | None) -> StructuredOutput | None:
    if params is None:
        return None
    field, unknown = "structured_outputs", sorted(params.keys() - _PARAM_NAMES)
    if unknown:
        names = ", ".join(sorted(_PARAM_NAMES))
        raise HttpError(400, f"{field}: unknown {shown(unknown[0])}; names are {names}", param=field)
    return _checked({name: value for name, value in params.items() if value is not None}, field)


def _checked(params: dict[str, Any], field: str) -> StructuredOutput:
    """Return a structured output, with its schema as text; check the lengths of its texts."""
    try:
        if isinstance(params.get("json"), dict):
            try:
                params = {**params, "json": json.dumps(params["json"], ensure_ascii=False)}
            except (ValueError, RecursionError) as error:  # an integer of 5,000 digits
                raise ArgumentError(f": json cannot be read: {error}") from error
        for name, text in params.items():
            if isinstance(text, str) and len(text) > MAX_GRAMMAR_LENGTH:
                raise ArgumentError(f": {name} must have at most {MAX_GRAMMAR_LENGTH} characters, got {len(text)}")
        return StructuredOutput(StructuredOutputsParams(**params), field)
    except ArgumentError as error:
        raise HttpError(400, field + str(error).removeprefix("structured_outputs"), param=field) from error


def structured_output_of_calls(
    body: ChatCompletion, chat_format: ChatFormat, calling: Calling, *, constrains_auto: bool
) -> StructuredOutput | None:
    """Return the grammar of outputs that must call functions, or whose calls, once begun, match their schemas.

    `calling` says how; its functions are those of the body. With `constrains_auto`, that holds for all functions that
    may be called, where a grammar can be made; else for strict ones. Raises `HttpError` for a malformed tool.
    """
    functions = [tool["function"] for tool in body.tools or [] if isinstance(tool.get("function"), dict)]
    functions = functions if calling.tools else []
    choice, must = body.tool_choice, False
    several = body.parallel_tool_calls is not False
    if isinstance(choice, dict):
        named_function = function_name(choice) if choice.get("type") == "function" else None
        functions = [function for function in functions if function.get("name") == named_function]
        if named_function is None or not functions:
            raise HttpError(400, "tool_choice must name one of the tools", param="tool_choice")
        must, several = True, False
    elif choice == "required":
        must = True
    has_strict = any(function.get("strict") is True for function in functions)
    if not (must or has_strict or constrains_auto):
        return None
    named = [(function.get("name"), function.get("parameters")) for function in functions]
    if not (named or calling.content is not None) or not all(
        isinstance(name, str) and isinstance(parameters, dict | None) for name, parameters in named
    ):
        raise HttpError(400, "tools: each function must have a name, and parameters that are a schema", param="tools")
    tools = {name: parameters or {} for name, parameters in named}
    if has_strict and not must:
        anything = {"type": "object"}
        tools = {each["name"]: tools[each["name"]] if each.get("strict") is True else anything for each in functions}
    is_optional = not (must or has_strict)
    try:
        grammar = grammar_of_calls(chat_format, replace(calling, tools=tools, must=must, several=several))
    except ArgumentError as error:
        if is_optional:
            return None
        raise HttpError(400, f"tools: {error}", param="tools") from error
    if grammar is None or (is_optional and len(grammar) > MAX_GRAMMAR_LENGTH):
        return None
    return StructuredOutput(StructuredOutputsParams(grammar=grammar), "tools", is_optional)


class _Results(OrderedDict[bytes, str]):
    """Texts that recent jobs returned, by digest of the request; bounded in number and characters."""

    def put(self, digest: bytes, text: str) -> None:
        self[digest] = text
        self.move_to_end(digest)
        while len(self) > _MAX_RESULTS or sum(map(len, self.values())) > _MAX_RESULT_CHARACTERS:
            self.popitem(last=False)


@dataclass
class _Job:
    task: asyncio.Task[str]
    num_waiting: int = 0  # requests


class GrammarCompiler:
    """Compiles structured outputs in a child process, caches the results, and sends the grammars to the engine."""

    def __init__(self, pool: ForkPool, engine: EngineClient) -> None:
        self._pool = pool
        self._engine = engine
        self._errors, self._grammars = _Results(), _Results()
        self._jobs: dict[tuple[str, bytes], _Job] = {}

    async def grammar(self, params: StructuredOutputsParams, caller: str) -> str:
        """Return the grammar of a structured output.

        Raises `ArgumentError` if it is invalid or takes too long, `HttpError` if it could not be compiled now.
        """
        data = json.dumps(asdict(params)).encode()
        digest = hashlib.blake2b(data).digest()
        error, grammar = self._errors.get(digest), self._grammars.get(digest)
        if error is not None:
            raise ArgumentError(error)
        if grammar is not None and self._engine.has_grammar(grammar):
            return grammar
        key = caller, digest  # requests of one caller share a job
        job = self._jobs.get(key)
        if job is None:
            reading = self._read(params, digest, caller, _LEAST_SIZE + len(data))
            job = self._jobs[key] = _Job(asyncio.create_task(reading, name="grammar"))
            job.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # no request may be left
        job.num_waiting += 1
        try:
            return await asyncio.shield(job.task)
        finally:
            job.num_waiting -= 1
            if not job.num_waiting:
                job.task.cancel()
                if self._jobs.get(key) is job:
                    del self._jobs[key]

    async def _read(self, params: StructuredOutputsParams, digest: bytes, caller: str, size: int) -> str:
        try:
            read: AddGrammar = await self._pool.run(
                compiled_grammar, params, limits=_COMPILING_LIMITS, caller=caller, size=size
            )
        except (ArgumentError, JobError) as error:
            if isinstance(error, JobError):
                error = ArgumentError(f"structured_outputs: reading the {params.kind} {error}")
            self._errors.put(digest, str(error))
            raise error from None
        self._grammars.put(digest, read.grammar)
        if not self._engine.has_grammar(read.grammar):
            self._engine.add_grammar(read)
        return read.grammar


def compiled_grammar(preprocessor: Preprocessor, params: StructuredOutputsParams) -> AddGrammar:
    """Compile a structured output as the engine's process will, and its first mask; raises `ArgumentError`."""
    before = _most_resident_bytes()
    grammars = preprocessor.input_processor.grammars
    grammar = grammars.grammar(params)
    try:
        compiled = grammars.compiled(grammar)
        constraint = grammars.new_constraint(compiled)
        constraint.fill(np.empty(constraint.num_words, dtype=np.int32), ())
    except ConstraintError as error:
        raise ArgumentError(f"structured_outputs: {params.kind} cannot be enforced: {error}") from error
    if isinstance(compiled, TokenAutomaton):
        arrays = (compiled.classes, compiled.following, compiled.masks, compiled.accepts, compiled.completes)
        return AddGrammar(grammar, compiled, len(grammar) + sum(array.nbytes for array in arrays))
    return AddGrammar(grammar, None, len(grammar) + _most_resident_bytes() - before)


def _most_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
