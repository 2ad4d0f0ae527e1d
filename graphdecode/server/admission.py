"""Admission: the outputs that a server prepares, keeps waiting and runs at a time."""

from __future__ import annotations

from collections.abc import Callable

from graphdecode.server.fair_queue import RETRY_AFTER
from graphdecode.server.http import HttpError


class AdmissionControl:
    """Bounds the outputs of all admitted requests; `num_submitted` returns how many of them the engine has.

    Attributes:
        num_preparing: outputs that were admitted, and are not submitted yet.
    """

    def __init__(self, max_outputs: int, num_submitted: Callable[[], int]) -> None:
        self.max_outputs, self.num_preparing = max_outputs, 0
        self._num_submitted = num_submitted

    @property
    def num_open(self) -> int:
        """Outputs that were admitted and have not ended."""
        return self.num_preparing + self._num_submitted()


class Admission:
    """A request's share of the outputs that may wait and run, from the server's door to its last token.

    At the door a request counts as one output; `reserve` says how many it has. Once they are submitted, each counts as
    long as the engine has it.

    Raises:
        HttpError: there is no room.
    """

    def __init__(self, control: AdmissionControl) -> None:
        self._control, self._outputs = control, 0
        self.reserve(1)

    def reserve(self, outputs: int) -> None:
        """Reserve room for all outputs of the request; raises `HttpError` if there is none, and changes nothing."""
        control = self._control
        others = control.num_open - self._outputs
        if others + outputs > control.max_outputs:
            raise HttpError(429, f"{others} requests run or wait already", code="queue_full", headers=RETRY_AFTER)
        control.num_preparing += outputs - self._outputs
        self._outputs = outputs

    def release(self) -> None:
        """Count the outputs here no longer: they are submitted now, or the request has failed."""
        self._control.num_preparing -= self._outputs
        self._outputs = 0
