"""What a peer is: another engine that decodes the same checkpoint, when it is there."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import ClassVar

Tokens = list[list[int]]

GPU_SHARE = 0.25
"""Of a GPU's memory, for a peer that takes all it is given: every engine of a comparison is loaded at once."""

_LEAST_CAPACITY = 512  # tokens a sequence may have, though a comparison needs fewer: engines are not sized to the token


@dataclass(frozen=True)
class Workload:
    """What all engines of a comparison run.

    Attributes:
        device: "cpu" or "cuda".
        dtype: of weights, activations and cache: "float32", "bfloat16" or "float16".
        batch_sizes: that will be asked for.
        prompt_tokens: of each sequence.
        new_tokens: decode steps of one measurement.
        threads: of a CPU.
    """

    device: str
    dtype: str
    batch_sizes: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    threads: int

    @property
    def max_batch_size(self) -> int:
        """The largest of the batch sizes."""
        return max(self.batch_sizes)

    @property
    def capacity(self) -> int:
        """Tokens that a sequence may have: its prompt, the token that ends prefill, and one for each step."""
        return max(self.prompt_tokens + 1 + self.new_tokens, _LEAST_CAPACITY)


class Peer(ABC):
    """An engine that may be absent. Nothing of it is imported before `open`.

    Attributes:
        name: that a person asks for it by.
        requires: module -> distribution that brings it.
        devices: that it is driven on here.
    """

    name: ClassVar[str]
    requires: ClassVar[Mapping[str, str]] = {}
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def why_not(self, folder: Path, workload: Workload) -> str:
        """Return why this peer cannot take part, for people; "" when it can be tried.

        Args:
            folder: the checkpoint.
            workload: what it would run.
        """
        absent = [package for module, package in self.requires.items() if util.find_spec(module) is None]
        if absent:
            return f"not installed: {', '.join(absent)}"
        if workload.device not in self.devices:
            return f"is compared on {' and '.join(self.devices)} only"
        return ""

    @property
    def versions(self) -> dict[str, str]:
        """Of the distributions that it requires."""
        found = {}
        for package in self.requires.values():
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                found[package] = "unknown"
        return found

    @abstractmethod
    def open(self, folder: Path, workload: Workload) -> None:
        """Load the checkpoint, ready for every batch size of the workload.

        Raises:
            Exception: whatever the peer raises when it cannot.
        """

    @abstractmethod
    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        """Return `new_tokens` greedy tokens for each prompt, whether or not they end an answer.

        Args:
            prompts: token ids, all of one length.
            new_tokens: for each of them.
        """

    def seconds_per_step(self, prompts: Tokens, new_tokens: int) -> float:
        """Return the time of one decode step: a long answer less a short one, so that prefill does not count."""
        began = time.perf_counter()
        self.generate(prompts, 1)
        middle = time.perf_counter()
        self.generate(prompts, new_tokens + 1)
        return (time.perf_counter() - middle - (middle - began)) / new_tokens

    def close(self) -> None:  # noqa: B027 (most peers hold nothing that outlives them)
        """Give back what outlives the object: processes, files, memory of other libraries."""
