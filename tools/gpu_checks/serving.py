"""A closed loop on the engine: as many requests at a time as clients, each followed by the next when it ends.

python -m gpu_checks.serving DEVICE SHAPE CLIENTS,... PROMPT OUTPUT SECONDS     known figures are not measured again
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import gpu_checks.absent  # noqa: F401 (first)
from gpu_checks.clock import ClockUnderLoad
from gpu_checks.figures import Figures
from gpu_checks.models import shape_of
from graphdecode.config import BucketConfig, EngineConfig
from graphdecode.config.sampling_params import SamplingParams
from graphdecode.engine.engine import Engine
from graphdecode.engine.loading import captured_runner
from graphdecode.engine.request import Request
from graphdecode.profiling.latency import percentiles


@dataclass
class Load:
    """Requests in flight and their times."""

    engine: Engine
    prompt: int
    output: int
    numbers: Iterator[int] = field(default_factory=itertools.count)
    began: dict[int, float] = field(default_factory=dict)  # requests in flight
    last: dict[int, float] = field(default_factory=dict)  # their last tokens
    first_ms: list[float] = field(default_factory=list)
    between_ms: list[float] = field(default_factory=list)
    tokens: int = 0

    def add(self) -> None:
        """Send a request."""
        number = next(self.numbers)
        ids = [(7 * number + place) % 251 + 3 for place in range(self.prompt)]
        params = SamplingParams(max_tokens=self.output, ignore_eos=True, temperature=0.0)
        self.began[self.engine.add(Request(ids, params))] = time.perf_counter()

    def step(self) -> None:
        """Take one step of the engine; requests that end are followed by others."""
        for event in self.engine.step():
            now, request = time.perf_counter(), event.request_id
            count = len(event.token_ids)
            self.tokens += count
            if request in self.last:
                self.between_ms += [1000 * (now - self.last[request]) / max(count, 1)] * count
            elif count:
                self.first_ms.append(1000 * (now - self.began[request]))
            if count:
                self.last[request] = now
            if event.finish_reason is not None:
                self.began.pop(request)
                self.last.pop(request, None)
                self.add()


def serve(engine: Engine, clients: int, prompt: int, output: int, seconds: float) -> dict[str, object]:
    """Serve for some seconds, after a part that is not counted; return tokens per second and times."""
    load = Load(engine, prompt, output)
    for _ in range(clients):
        load.add()
    warm = time.perf_counter() + seconds / 4
    while time.perf_counter() < warm:
        load.step()
    load.first_ms, load.between_ms, load.tokens = [], [], 0
    with ClockUnderLoad() as clock:
        began = time.perf_counter()
        while time.perf_counter() < began + seconds:
            load.step()
        taken = time.perf_counter() - began
    for request in load.began:
        engine.abort(request)
    while engine.has_work:
        engine.step()
    times = {"first_token_ms": load.first_ms, "between_tokens_ms": load.between_ms}
    found: dict[str, object] = {name: percentiles(values) if values else None for name, values in times.items()}
    return found | {"tokens_per_s": load.tokens / taken, "clock": clock.medians()}


def main() -> None:
    """Serve each number of clients."""
    device, shape, *numbers = sys.argv[1:]
    clients = [int(count) for count in numbers[0].split(",")]
    prompt, output = map(int, numbers[1:3])
    figures = Figures()
    keys = {count: f"serving {shape}, {count} clients, {prompt} + {output} tokens" for count in clients}
    if all(key in figures for key in keys.values()):
        return
    buckets = BucketConfig(
        max_batch_size=max(clients), max_sequence_length=prompt + output + 16, batch_sizes=sorted(clients)
    )
    options = {"device": device, "dtype": "bfloat16", "model_impl": "native", "prefix_cache": False}
    config = EngineConfig.of(buckets, **options)
    engine = Engine(captured_runner(shape_of(shape, is_small=device != "cuda"), config))
    for count, key in keys.items():
        if key not in figures:
            figures.add(key, **serve(engine, count, prompt, output, float(numbers[3])))
    engine.close()


if __name__ == "__main__":
    main()
