"""Batches: requests from a file, responses to another, as the server's endpoints give them."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from graphdecode.errors import ArgumentError
from graphdecode.server.endpoint import GENERATING
from graphdecode.server.http import HttpError
from graphdecode.server.protocol import GeneratingPath, problem_of
from graphdecode.server.service import Service

_ANSWER_BEGINS = b'{"id": "batch_req_'
_SYNC_EVERY_SECONDS = 1.0
ATTEMPTS = 3  # at a request whose answer is lost with the engine
_LOOK_EVERY_SECONDS = 0.05  # whether the engine serves again
log = logging.getLogger(__name__)
_MOST_FAULTS = 10  # of a file, that are named at once


class BatchRequest(BaseModel):
    """One line of the input in OpenAI's batch format; the body is validated when it is answered."""

    model_config = ConfigDict(strict=True)

    custom_id: str = Field(min_length=1)
    method: Literal["POST"]
    url: GeneratingPath
    body: dict[str, Any]


class BatchInput:
    """The requests of a file, read lazily; only their `custom_id`s stay in memory.

    Raises:
        ArgumentError: the file cannot be read, a line is no request, or two have one `custom_id`; it names the
            lines, the first ten where there are more.
    """

    def __init__(self, path: Path, max_line_bytes: int) -> None:
        if not path.is_file():
            wrong = "is no file" if path.exists() else "does not exist"
            raise ArgumentError(f"{path} {wrong}: a batch needs a file of requests, one a line")
        self._path = path
        self._max_line_bytes = max_line_bytes
        self.custom_ids: dict[str, int] = {}  # of all requests, each with its line's number from 1
        faults: list[str] = []
        for number, line in self._lines():
            try:
                custom_id = self._request(number, line).custom_id
                first = self.custom_ids.setdefault(custom_id, number)
                if first != number:
                    raise ArgumentError(f"{path} lines {first} and {number} have one custom_id: {custom_id[:100]!r}")
            except ArgumentError as error:
                faults.append(str(error))
            if len(faults) == _MOST_FAULTS:
                break
        if faults:
            raise ArgumentError("; ".join(faults))
        if not self.custom_ids:
            raise ArgumentError(f"{path} holds no request")

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
            raise ArgumentError(f"{self._path} line {number}: {problem_of(error)[0]}") from None


class BatchOutput:
    """The output file of a batch; missing answers are appended, each as one whole line.

    A line that was cut short, as a kill may leave the last one, is dropped. The file is held against other runs.

    Args:
        path: of the file; it is made where there is none.
        asked: the `custom_id`s of the input.

    Raises:
        ArgumentError: the file cannot be written, holds something else than answers to this input, or is another
            run's; it is left as it was.
    """

    def __init__(self, path: Path, asked: dict[str, int]) -> None:
        self.answered: set[str] = set()  # the `custom_id`s that have their line
        self.num_failed = 0  # lines that tell of an error
        self._path = path
        self._synced = time.monotonic()
        if path.exists() and not path.is_file():
            raise ArgumentError(f"{path} must be a file that answers can be added to")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ArgumentError(f"{path} cannot be written: {error.strerror}") from error
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go when this process ends
            except OSError:
                raise ArgumentError(f"{path} is being written by another run") from None
            whole_bytes = self._read_answers(asked)
            if whole_bytes < os.fstat(self._file).st_size:
                os.ftruncate(self._file, whole_bytes)
        except BaseException:
            os.close(self._file)
            raise

    def _read_answers(self, asked: dict[str, int]) -> int:
        """Record which requests are answered; return the bytes of whole lines."""
        whole_bytes = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if not (line.startswith(_ANSWER_BEGINS) or _ANSWER_BEGINS.startswith(line)):
                        raise ArgumentError(f"{self._path} line {number} is no answer of a batch")
                    break
                custom_id, status = self._told(number, line)
                if custom_id not in asked:
                    raise ArgumentError(
                        f"{self._path} line {number} answers {custom_id[:100]!r}, for which the input does not ask"
                    )
                if custom_id in self.answered:
                    raise ArgumentError(f"{self._path} line {number} answers {custom_id[:100]!r} a second time")
                self._note(custom_id, status)
                whole_bytes += len(line)
        return whole_bytes

    def _told(self, number: int, line: bytes) -> tuple[str, int]:
        try:
            answer = json.loads(line)
            custom_id, status = answer["custom_id"], answer["response"]["status_code"]
        except (ValueError, TypeError, KeyError, RecursionError):
            custom_id = status = None
        if not (isinstance(custom_id, str) and isinstance(status, int)):
            raise ArgumentError(f"{self._path} line {number} is no answer of a batch")
        return custom_id, status

    def _note(self, custom_id: str, status: int) -> None:
        self.answered.add(custom_id)
        self.num_failed += status != 200

    def add(self, custom_id: str, number: str, status: int, body: dict[str, Any]) -> None:
        """Write the answer to a request.

        Raises:
            OSError: there is no room for it; what part of it was written is dropped when the run is gone on with.
        """
        response = {"status_code": status, "request_id": f"req_{number}", "body": body}
        answer = {"id": f"batch_req_{number}", "custom_id": custom_id, "response": response, "error": None}
        left = memoryview(json.dumps(answer).encode() + b"\n")
        while left:
            left = left[os.write(self._file, left) :]
        self._note(custom_id, status)
        if time.monotonic() - self._synced > _SYNC_EVERY_SECONDS:
            self._sync()

    def _sync(self) -> None:
        os.fsync(self._file)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Flush all lines to disk, and close the file."""
        try:
            self._sync()
        finally:
            os.close(self._file)


class _Answers(Protocol):
    """`EngineAnswers`, or `ReplicaAnswers`."""

    async def start(self) -> None: ...

    async def answer(self, request: BatchRequest) -> tuple[int, dict[str, Any]]: ...

    def close(self, *, at_once: bool = False) -> None: ...


class EngineAnswers:
    """Answers with one engine.

    Args:
        service: of the model; `start` starts it, where nobody else did.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def start(self) -> None:
        """Load, and come back when requests can be answered."""
        await self._service.start()

    def close(self, *, at_once: bool = False) -> None:
        """End it; `at_once`: without waiting for what is under way."""
        self._service.close(at_once=at_once)

    async def answer(self, request: BatchRequest) -> tuple[int, dict[str, Any]]:
        """Return status and body of the response to a request; one whose answer is lost with the engine is repeated."""
        for attempt in range(1, ATTEMPTS + 1):
            while not self._service.client.serves:
                await asyncio.sleep(_LOOK_EVERY_SECONDS)
            try:
                if request.body.get("stream"):
                    message = "stream is not supported in a batch: its answers are whole"
                    raise HttpError(400, message, param="stream")
                data = json.dumps(request.body).encode()
                return 200, await (await GENERATING[request.url].respond(self._service, data, caller="")).whole()
            except HttpError as failed:
                if failed.status < 500 or attempt == ATTEMPTS:
                    return failed.status, failed.body
            except Exception:  # of this package, and in one request: the others have their answers all the same
                log.exception("%r: an internal error", request.custom_id)
                break
        return 500, HttpError(500, "an internal error; the log says more").body


class BatchRun:
    """A run over the requests that have no answer yet.

    Args:
        answers: to them; it is started and closed by `run`.
        output: takes the answers in the order in which they are complete.
        window: requests under way at a time, which bounds the memory of a run.
    """

    def __init__(
        self,
        answers: _Answers,
        requests: BatchInput,
        output: BatchOutput,
        *,
        window: int,
        on_answer: Callable[[], object],
    ) -> None:
        self._answers = answers
        self._output = output
        self._window = window
        self._on_answer = on_answer
        self._waiting = (request for request in requests if request.custom_id not in output.answered)
        self.prompt_tokens = 0  # of the requests that were answered in this run
        self.completion_tokens = 0

    async def run(self) -> None:
        """Answer all; when it is cancelled, what is under way has no line.

        Raises:
            ArgumentError: the model cannot be loaded, or the input was changed meanwhile.
            OSError: an answer cannot be written.
        """
        completed = False
        try:
            await self._answers.start()
            async with asyncio.TaskGroup() as group:
                for _ in range(self._window):
                    group.create_task(self._answer_some())
            completed = True
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        finally:
            self._answers.close(at_once=not completed)

    async def _answer_some(self) -> None:
        for request in self._waiting:  # which all the tasks of a window share
            status, body = await self._answers.answer(request)
            usage = body.get("usage", {})
            self.prompt_tokens += usage.get("prompt_tokens", 0)
            self.completion_tokens += usage.get("completion_tokens", 0)
            self._output.add(request.custom_id, uuid.uuid4().hex, status, body)
            self._on_answer()
