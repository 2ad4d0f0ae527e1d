"""Soak test: many steps and requests, some of them aborted, with memory and descriptors measured."""

from __future__ import annotations

import gc
import os
import random
import resource
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from graphdecode import Engine, Request, SamplingParams
from graphdecode.engine.loading import load_runner

_ROWS = 4
_VOCABULARY = 256  # the demo's byte tokens
_READINGS = 10


class Reading(NamedTuple):
    """The resources of the process at one moment.

    Attributes:
        steps: decode steps so far.
        requests: submitted so far.
        aborted: those of them that were aborted.
        resident_bytes: of the process.
        descriptors: open ones.
        objects: tracked by Python's garbage collector.
        pages: of the cache in use or kept for a prefix.
    """

    steps: int
    requests: int
    aborted: int
    resident_bytes: int
    descriptors: int
    objects: int
    pages: int


def soak(steps: int, requests: int, seed: int) -> list[Reading]:
    """Run numbers of steps and requests; return readings at equal intervals.

    Args:
        steps: decode steps at least.
        requests: at least; a third of them is aborted.
    """
    rng = random.Random(seed)
    runner = load_runner("demo", device="cpu", max_batch_size=_ROWS, max_sequence_length=512, page_size=16)
    runner.graphs.capture(progress=False, kinds=["steps"])
    runner.buffers.freeze()
    engine = Engine(runner)
    length = max(min(2 * steps * _ROWS // (3 * max(requests, 1)), 400), 1)  # so that both numbers are reached together
    readings: list[Reading] = []
    running: list[int] = []
    handed_in = aborted = done = 0
    with tqdm(total=steps, desc="soaking", unit="step") as bar:
        while done < steps or handed_in < requests:
            while len(running) < _ROWS + 1:
                prompt = [rng.randrange(_VOCABULARY) for _ in range(rng.randrange(1, 40))]
                params = SamplingParams(
                    temperature=rng.choice([0.0, 0.8]), ignore_eos=True, max_tokens=rng.randrange(1, 2 * length),
                    top_p=rng.choice([1.0, 0.9]), repetition_penalty=rng.choice([1.0, 1.1]),
                )  # fmt: skip
                running.append(engine.add(Request(prompt, params)))
                handed_in += 1
            for event in engine.step():
                if event.finish_reason is not None:
                    running.remove(event.request_id)
            if rng.random() < _ROWS / (3 * length):
                given_up = rng.choice(running) if running else None
                if given_up is not None:
                    engine.abort(given_up)
                    running.remove(given_up)
                    aborted += 1
            bar.update(engine.stats.bucket_steps.total() - done)
            done = engine.stats.bucket_steps.total()
            if done >= steps * (len(readings) + 1) / _READINGS and len(readings) < _READINGS - 1:
                readings.append(_reading(engine, handed_in, aborted))
    readings.append(_reading(engine, handed_in, aborted))
    engine.close()
    return readings


def _reading(engine: Engine, requests: int, aborted: int) -> Reading:
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    pool = engine.cache.pool
    return Reading(
        engine.stats.bucket_steps.total(),
        requests,
        aborted,
        resident,
        len(os.listdir("/proc/self/fd")),
        len(gc.get_objects()),
        pool.used + pool.evictable,
    )
