"""A forward pass launches what its lines call: no attribute does, and prompts whose logits nobody reads stop early."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from driven_decoder import DrivenDecoder, assert_same_bits
from torch.utils._python_dispatch import TorchDispatchMode

from graphdecode.models import load_model
from graphdecode.models.blocks import DecoderLayer

PROMPTS = {row: list(range(5 + row, 15 + row)) for row in range(3)}
STARTS = dict.fromkeys(PROMPTS, 0)


class Launches(TorchDispatchMode):
    """Counts the operators that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


@contextmanager
def launches() -> Iterator[Launches]:
    with torch.no_grad(), Launches() as counted:
        yield counted


def test_reading_attributes_launches_nothing(checkpoint, monkeypatch):
    driven = DrivenDecoder(load_model(checkpoint("gemma2"), device="cpu", dtype="float32"), 3)
    counts, call = [], DecoderLayer.__call__

    def read_all(layer: DecoderLayer, *passed: Any) -> Any:
        result = call(layer, *passed)
        parts = [part for part in (*passed, *result) if part is not None and not isinstance(part, torch.Tensor)]
        with launches() as counted:
            for part in (layer, *vars(layer).values(), *parts):
                for name in dir(part):
                    getattr(part, name)
        counts.append(counted.count)
        return result

    monkeypatch.setattr(DecoderLayer, "__call__", read_all)
    driven.model.prefill(driven.chunks(PROMPTS, STARTS), driven.caches)
    assert counts == [0] * driven.model.num_layers


@pytest.mark.parametrize("name", ["llama-3", "gemma4-inputs", "deepseek-v3", "falcon-h1", "nemotron-h"])
def test_prompts_without_logits_fill_the_same_cache_by_fewer_launches(checkpoint, name):
    model = load_model(checkpoint(name), device="cpu", dtype="float32")
    counts, snapshots = [], []
    for with_logits in (True, False):
        driven = DrivenDecoder(model, 3)
        with launches() as counted:
            driven.model.prefill(driven.chunks(PROMPTS, STARTS), driven.caches, with_logits=with_logits)
        counts.append(counted.count)
        snapshots.append(driven.snapshot(0))
    assert_same_bits(*snapshots)
    assert counts[1] < counts[0]
