"""What a peer of decode attention is: a way to attend over the same caches, when it is there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import util
from typing import ClassVar

import torch
from torch import Tensor

from peers.attention.problem import AttentionProblem

Calls = list[Callable[[], Tensor]]


class AttentionPeer(ABC):
    """A way to compute decode attention. Nothing of it is imported before `calls`.

    Attributes:
        name: that a person asks for it by.
        requires: module -> distribution that brings it.
        devices: that it runs on.
    """

    name: ClassVar[str]
    requires: ClassVar[Mapping[str, str]] = {}
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def why_not(self, device: torch.device) -> str:
        """Return why this peer cannot take part, for people; "" when it can be tried."""
        absent = [package for module, package in self.requires.items() if util.find_spec(module) is None]
        if absent:
            return f"not installed: {', '.join(absent)}"
        if device.type not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        return ""

    @abstractmethod
    def calls(self, problem: AttentionProblem) -> Calls:
        """Return one call for each cache of the problem, which attends over it and returns the output.

        What depends on lengths alone is done here, as engines do it once for all layers of a step.

        Raises:
            Exception: whatever the peer raises when it cannot.
        """
