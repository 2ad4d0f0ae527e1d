"""Adapters of requests, by vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphdecode.errors import ArgumentError, shown


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that a request is to have, as vLLM's class of this name.

    Attributes:
        lora_name: names it; the first request with a name loads the adapter.
        lora_int_id: vLLM's number of it, >= 1; names tell adapters apart here.
        lora_path: a folder as PEFT saves it.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ArgumentError(f"lora_name must be a text that is not empty, got {shown(self.lora_name)}")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ArgumentError(f"lora_int_id must be an integer >= 1, got {shown(self.lora_int_id)}")
        if not isinstance(self.lora_path, (str, Path)) or not str(self.lora_path):
            raise ArgumentError(f"lora_path must be a folder, got {shown(self.lora_path)}")


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


def as_lora_requests(given: LoRARequests, count: int) -> list[LoRARequest | None]:
    """Return one for each prompt; None: the model as it is.

    Raises:
        ArgumentError: they are something else, or not as many.
    """
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    listed = list(given) if isinstance(given, Sequence) else [given]
    wrong = [each for each in listed if each is not None and not isinstance(each, LoRARequest)]
    if wrong:
        raise ArgumentError(f"lora_request must be a LoRARequest, a list of them, or None, got {shown(wrong[0])}")
    if len(listed) != count:
        raise ArgumentError(f"there are {count} prompts and {len(listed)} lora_request")
    return listed
