"""Batches: requests from a file, responses of the server's endpoints to another."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from graphdecode.errors import ArgumentError
from graphdecode.server.endpoints import GENERATING, POOLING, TRANSLATED
from graphdecode.server.http import HttpError
from graphdecode.server.protocol import GeneratingPath, problem_of
from graphdecode.server.run import ServedModel
from graphdecode.server.service import Service

_ENDPOINTS = dict[str, Any]([*GENERATING.items(), *POOLING.items(), *TRANSLATED.items()])
_USAGE = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}  # names, and those of responses
_RESPONSE_BEGINS = b'{"id": "batch_req_'
_SYNC_EVERY_SECONDS = 1.0
ATTEMPTS = 3  # for a request whose engine ended
_POLL_SECONDS = 0.05  # until the engine serves again
_MAX_FAULTS = 10  # faults of a file in one error
log = logging.getLogger(__name__)


class BatchRequest(BaseModel):
    """A line of the input in OpenAI's batch format; its body is validated when it is processed."""

    model_config = ConfigDict(strict=True)

    custom_id: str = Field(min_length=1)
    method: Literal["POST"]
    url: GeneratingPath | Literal["/v1/responses", "/v1/embeddings", "/v1/rerank", "/v1/score"]
    body: dict[str, Any]


class BatchInput:
    """The requests of a file, read lazily.

    An `ArgumentError` names up to ten lines that are no requests, or share a `custom_id`.
    """

    def __init__(self, path: Path, max_line_bytes: int) -> None:
        self._path = path
        self._max_line_bytes = max_line_bytes
        self.custom_ids: dict[str, int] = {}  # -> line number, from 1
        faults: list[str] = []
        for number, line in self._lines():
            try:
                custom_id = self._request(number, line).custom_id
                first = self.custom_ids.setdefault(custom_id, number)
                if first != number:
                    raise ArgumentError(f"{path} lines {first} and {number} share a custom_id: {custom_id[:100]!r}")
            except ArgumentError as error:
                faults.append(str(error))
            if len(faults) == _MAX_FAULTS:
                break
        if faults:
            raise ArgumentError("; ".join(faults))
        if not self.custom_ids:
            raise ArgumentError(f"{path} has no requests")

    def __iter__(self) -> Iterator[BatchRequest]:
        return (self._request(number, line) for number, line in self._lines())

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with self._path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(self._max_line_bytes + 1), b""), 1):
                if len(line) > self._max_line_bytes:
                    raise ArgumentError(f"{self._path} line {number} is longer than {self._max_line_bytes} bytes")
                if line.strip():
                    yield number, line

    def _request(self, number: int, line: bytes) -> BatchRequest:
        try:
            return BatchRequest.model_validate_json(line)
        except ValidationError as error:
            raise ArgumentError(f"{self._path} line {number}: {problem_of(error).message}") from None


class BatchOutput:
    """The output file of a batch, locked against other runs; an incomplete last line is dropped.

    Raises `ArgumentError` if it is locked, not writable, or has lines that are not responses to `requested`.
    """

    def __init__(self, path: Path, requested: dict[str, int]) -> None:
        self.answered: set[str] = set()  # `custom_id`s
        self.num_failed = 0  # responses that are errors
        self._path = path
        self._synced = time.monotonic()
        if path.exists() and not path.is_file():
            raise ArgumentError(f"{path} must be a file that responses can be appended to")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ArgumentError(f"{path} cannot be written: {error.strerror}") from error
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
            except OSError:
                raise ArgumentError(f"{path} is being written by another run") from None
            whole_bytes = self._read_responses(requested)
            if whole_bytes < os.fstat(self._file).st_size:
                os.ftruncate(self._file, whole_bytes)
        except BaseException:
            os.close(self._file)
            raise

    def _read_responses(self, requested: dict[str, int]) -> int:
        """Note which requests have a response; return the bytes of complete lines."""
        whole_bytes = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{self._path} line {number}"
                if not line.endswith(b"\n"):
                    if not (line.startswith(_RESPONSE_BEGINS) or _RESPONSE_BEGINS.startswith(line)):
                        raise ArgumentError(f"{where} is not a batch response")
                    break
                try:
                    parsed = json.loads(line)
                    custom_id, status = parsed["custom_id"], parsed["response"]["status_code"]
                except (ValueError, TypeError, KeyError, RecursionError):
                    custom_id = status = None
                if not (isinstance(custom_id, str) and isinstance(status, int)):
                    raise ArgumentError(f"{where} is not a batch response")
                if custom_id not in requested:
                    raise ArgumentError(f"{where} responds to {custom_id[:100]!r}, which the input does not have")
                if custom_id in self.answered:
                    raise ArgumentError(f"{where} is a second response to {custom_id[:100]!r}")
                self._note(custom_id, status)
                whole_bytes += len(line)
        return whole_bytes

    def _note(self, custom_id: str, status: int) -> None:
        self.answered.add(custom_id)
        self.num_failed += status != 200

    def add(self, custom_id: str, number: str, status: int, body: dict[str, Any]) -> None:
        """Write a response; if the disk is full (OSError), the next run drops the part that was written."""
        response = {"status_code": status, "request_id": f"req_{number}", "body": body}
        line = {"id": f"batch_req_{number}", "custom_id": custom_id, "response": response, "error": None}
        left = memoryview(json.dumps(line).encode() + b"\n")
        while left:
            left = left[os.write(self._file, left) :]
        self._note(custom_id, status)
        if time.monotonic() - self._synced > _SYNC_EVERY_SECONDS:
            os.fsync(self._file)
            self._synced = time.monotonic()

    def close(self) -> None:
        """Flush all lines to disk, and close the file."""
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)


async def answer_request(service: Service, request: BatchRequest) -> tuple[int, dict[str, Any]]:
    """Return status and body of the response to a request, which is tried again if the engine ends."""
    for attempt in range(1, ATTEMPTS + 1):
        while not service.client.serves:
            await asyncio.sleep(_POLL_SECONDS)
        try:
            if request.body.get("stream"):
                raise HttpError(400, "stream is not supported in a batch", param="stream")
            data = json.dumps(request.body).encode()
            reply = await _ENDPOINTS[request.url].respond(service, data, caller="")
            return 200, json.loads(await reply.whole())
        except HttpError as failed:
            if failed.status < 500 or attempt == ATTEMPTS:
                return failed.status, failed.body
        except Exception:  # a bug; other requests go on
            log.exception("%r: internal error", request.custom_id)
            break
    return 500, HttpError(500, "internal error; see the log").body


async def run_batch(
    served: ServedModel,
    answer: Callable[[BatchRequest], Awaitable[tuple[int, dict[str, Any]]]],
    requests: BatchInput,
    output: BatchOutput,
    *,
    window: int,
    on_response: Callable[[], object],
) -> Counter[str]:
    """Start one or several engines, run the requests that have no response yet, and return their summed usage.

    `answer` returns status and body of the response to a request; `window` requests are in flight, which bounds the
    memory. Raises `ArgumentError` if the model cannot be loaded or the input has changed, `OSError` if a response
    cannot be written.
    """
    waiting = (request for request in requests if request.custom_id not in output.answered)
    used: Counter[str] = Counter(dict.fromkeys(_USAGE, 0))

    async def work() -> None:
        for request in waiting:  # shared by all workers
            status, body = await answer(request)
            usage = body.get("usage") or {}
            for name, other in _USAGE.items():
                used[name] += usage.get(name, usage.get(other, 0))
            output.add(request.custom_id, uuid.uuid4().hex, status, body)
            on_response()

    completed = False
    try:
        await served.start()
        async with asyncio.TaskGroup() as group:
            for _ in range(window):
                group.create_task(work())
        completed = True
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    finally:
        served.close(force=not completed)
    return used
