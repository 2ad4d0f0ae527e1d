"""A peer: another engine that decodes the same checkpoint, if it is installed. This engine is one, and transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata, util
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from graphdecode.config import BucketConfig
from graphdecode.errors import ArgumentError
from graphdecode.text import LLM, SamplingParams
from harness import step_seconds

Result = TypeVar("Result")
Kind = TypeVar("Kind")
Tokens = list[list[int]]

_FIRST_TOKEN = 3  # below are the special tokens of most vocabularies
_REASON_LENGTH = 200
_LEAST_CAPACITY = 512  # tokens of a sequence at most, more than a comparison needs


def attempt(call: Callable[[], Result]) -> tuple[Result | None, str]:
    """Return a call's result and "", or None and its error in one line."""
    try:
        return call(), ""
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        return None, f"{type(error).__name__}: {first_line}"[:_REASON_LENGTH]


def choose(text: str, known: Mapping[str, Kind]) -> dict[str, Kind]:
    """Return the items that a comma-separated list names, each once; `"all"` names all."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        names = list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ArgumentError(f"unknown peers: {', '.join(unknown)}; there are {', '.join(known)}, or all")
    return {name: known[name] for name in names}


def random_prompts(count: int, length: int, vocab_size: int) -> Tokens:
    """Return prompts of one length, the same ones for the same number of them."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(_FIRST_TOKEN, vocab_size, (count, length), generator=generator).tolist()


@dataclass(frozen=True)
class Workload:
    """The workload of all engines of a comparison."""

    device: str  # "cpu" or "cuda"
    dtype: str  # of weights, activations and cache: "float32", "bfloat16" or "float16"
    batch_sizes: tuple[int, ...]  # that will be requested
    prompt_tokens: int  # of each sequence
    new_tokens: int  # decode steps of one measurement
    threads: int  # of a CPU

    @property
    def capacity(self) -> int:
        """Tokens that a sequence may have: its prompt, the token that ends prefill, and one for each step."""
        return max(self.prompt_tokens + 1 + self.new_tokens, _LEAST_CAPACITY)


class Peer(ABC):
    """An engine that may not be installed. Nothing of it is imported before `open`."""

    name: ClassVar[str]  # on the command line
    requires: ClassVar[Mapping[str, str]] = {}  # module -> distribution that brings it
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")  # devices that are supported here

    def unavailable_reason(self, folder: Path, workload: Workload) -> str:
        """Return why this peer cannot run, or ""."""
        absent = [package for module, package in self.requires.items() if util.find_spec(module) is None]
        if absent:
            return f"not installed: {', '.join(absent)}"
        return "" if workload.device in self.devices else f"is compared on {' and '.join(self.devices)} only"

    @property
    def versions(self) -> dict[str, str]:
        found = {}
        for package in self.requires.values():
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                found[package] = "unknown"
        return found

    @abstractmethod
    def open(self, folder: Path, workload: Workload) -> None:
        """Load the checkpoint, for every batch size of the workload."""

    @abstractmethod
    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        """Return `new_tokens` greedy tokens for each prompt, past the end-of-sequence token too."""

    def seconds_per_step(self, prompts: Tokens, new_tokens: int) -> float:
        """Return the time of one decode step: a long run less a short one, so that prefill does not count."""
        return step_seconds(partial(self.generate, prompts), new_tokens)

    def close(self) -> None:  # noqa: B027 (few have anything to give back)
        """Free processes, files and other libraries' memory."""


class Graphdecode(Peer):
    """`LLM.generate`, with a bucket for each batch size of the workload."""

    name = "graphdecode"

    def open(self, folder: Path, workload: Workload) -> None:
        sizes = list(workload.batch_sizes)
        config = BucketConfig(max_batch_size=max(sizes), max_sequence_length=workload.capacity, batch_sizes=sizes)
        self._llm = LLM(folder, config=config, dtype=workload.dtype, device=workload.device, prefix_cache=False)

    @property
    def weight_bytes(self) -> int:
        """The bytes that one step reads."""
        return self._llm.model.weight_bytes

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        return [output.outputs[0].token_ids for output in self._llm.generate(prompts, params, use_tqdm=False)]

    def close(self) -> None:
        self._llm.close()


class Transformers(Peer):
    """`generate` with the dynamic cache, which is the default."""

    name = "transformers"
    requires: ClassVar = {"transformers": "transformers"}
    cache: str | None = None
    compiled = False

    def open(self, folder: Path, workload: Workload) -> None:
        from transformers import AutoModelForCausalLM

        self._device = workload.device
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, workload.dtype))
        self._model = model.to(workload.device).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        if self.compiled and workload.device == "cpu":
            # `generate` compiles a static cache's step itself, but not on a CPU; a graph break, or the interpreter
            # after too many shapes, must fail here instead of being slow
            self._model.forward = torch.compile(self._model.forward, fullgraph=True, dynamic=False)

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        ids = torch.tensor(prompts, device=self._device)
        with torch.no_grad():
            result = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                cache_implementation=self.cache,
                disable_compile=not self.compiled,
            )
        return result[:, ids.shape[1] :].tolist()

    def close(self) -> None:
        del self._model


class TransformersStatic(Transformers):
    """`generate` with a static cache, not compiled."""

    name = "transformers-static"
    cache = "static"


class TransformersCompiled(TransformersStatic):
    """`generate` with a static cache and a compiled forward pass."""

    name = "transformers-compiled"
    compiled = True


TRANSFORMERS = (Transformers, TransformersStatic, TransformersCompiled)
