"""The two files of a batch: requests that are read one at a time, and answers that are written line by line."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from graphdecode.errors import ArgumentError
from graphdecode.server.protocol import GeneratingPath, problem_of

_ANSWER_BEGINS = b'{"id": "batch_req_'
_SYNC_EVERY_SECONDS = 1.0


class BatchRequest(BaseModel):
    """One line of the input, as OpenAI's batches have it; what the body says is judged when it is answered."""

    model_config = ConfigDict(strict=True)

    custom_id: str = Field(min_length=1)
    method: Literal["POST"]
    url: GeneratingPath
    body: dict[str, Any]


class BatchInput:
    """The requests of a file, which is read as they are needed; only their `custom_id`s are held.

    Args:
        path: of the file.
        max_line_bytes: of one request.

    Attributes:
        custom_ids: of all requests, each with its line's number from 1.

    Raises:
        ArgumentError: the file cannot be read, a line is no request, or two have one `custom_id`; it names the lines.
    """

    def __init__(self, path: Path, max_line_bytes: int) -> None:
        if not path.is_file():
            wrong = "is no file" if path.exists() else "does not exist"
            raise ArgumentError(f"{path} {wrong}: a batch needs a file of requests, one a line")
        self._path = path
        self._max_line_bytes = max_line_bytes
        self.custom_ids: dict[str, int] = {}
        for number, request in self._numbered():
            first = self.custom_ids.setdefault(request.custom_id, number)
            if first != number:
                raise ArgumentError(
                    f"{path} lines {first} and {number} have one custom_id: {request.custom_id[:100]!r}"
                )
        if not self.custom_ids:
            raise ArgumentError(f"{path} holds no request")

    def __iter__(self) -> Iterator[BatchRequest]:
        return (request for _, request in self._numbered())

    def _numbered(self) -> Iterator[tuple[int, BatchRequest]]:
        with self._path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(self._max_line_bytes + 1), b""), 1):
                if len(line) > self._max_line_bytes:
                    raise ArgumentError(f"{self._path} line {number} is longer than {self._max_line_bytes} bytes")
                if line.strip():
                    yield number, self._request(number, line)

    def _request(self, number: int, line: bytes) -> BatchRequest:
        try:
            return BatchRequest.model_validate_json(line)
        except ValidationError as error:
            raise ArgumentError(f"{self._path} line {number}: {problem_of(error)[0]}") from None


class BatchOutput:
    """The answers of a batch in a file, to which those that are missing are added, each as one whole line.

    A line that was cut short, as a kill may leave the last one, is dropped. The file is held against other runs.

    Args:
        path: of the file; it is made where there is none.
        asked: the `custom_id`s of the input.

    Attributes:
        answered: the `custom_id`s that have their line.
        num_failed: lines that tell of an error.

    Raises:
        ArgumentError: the file cannot be written, holds something else than answers to this input, or is another
            run's; it is left as it was.
    """

    def __init__(self, path: Path, asked: dict[str, int]) -> None:
        self.answered: set[str] = set()
        self.num_failed = 0
        self._path = path
        self._synced = time.monotonic()
        if path.exists() and not path.is_file():
            raise ArgumentError(f"{path} must be a file that answers can be added to")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ArgumentError(f"{path} cannot be written: {error.strerror}") from error
        try:
            self._hold()
            whole_bytes = self._read_answers(asked)
            if whole_bytes < os.fstat(self._file).st_size:
                os.ftruncate(self._file, whole_bytes)
        except BaseException:
            os.close(self._file)
            raise

    def _hold(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go when this process ends
        except OSError:
            raise ArgumentError(f"{self._path} is being written by another run") from None

    def _read_answers(self, asked: dict[str, int]) -> int:
        """Take note of what is answered; return the bytes of whole lines."""
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

        Args:
            custom_id: the request's.
            number: unlike that of any other answer.
            status: as HTTP's.
            body: of the response.

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
        """See that all lines are on the disk, and let go of the file."""
        try:
            self._sync()
        finally:
            os.close(self._file)
