"""A device "cuda:0" over lazy streams, for the production code to find; and a Runner that works on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lazy_stream import DEVICE, DeviceTensors, Event, Graph, LazyStreams, as_operations_know

from graphdecode.buckets import StepShape
from graphdecode.buffers import Batch
from graphdecode.config import EngineConfig
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.runner import Runner
from graphdecode.engine.steps import DecodeStep, StepSetting
from graphdecode.graphs import cuda_loop
from graphdecode.graphs.cuda import CudaStepGraph
from graphdecode.graphs.inspect import nodes as cuda_nodes
from graphdecode.graphs.step_graph import LoopControl, StepLoop
from graphdecode.models import Chunks, Model

_FREE_BYTES = 1 << 30


class LazyDecodeStep(DecodeStep):
    """The step as one operation of the device."""

    def __init__(self, streams: LazyStreams, setting: StepSetting) -> None:
        self._streams = streams
        super().__init__(setting)

    def run(self, shape: StepShape, batch: Batch, chunks: Chunks | None = None) -> None:
        places = None if chunks is None else Chunks(*map(as_operations_know, chunks))
        self._streams.enqueue(partial(self._later, partial(super().run, shape, chunks=places), batch.size))
        is_captured = self._streams.current is not self._streams.streams[0]
        if batch.size == self._streams.refused_bucket and is_captured and shape == StepShape(batch.size):
            raise ValueError("not fit to be captured")

    def _end_launch(self, batch: Batch) -> None:
        self._streams.enqueue(partial(self._later, super()._end_launch, batch.size))

    def _later(self, work: Callable[[Batch], None], size: int) -> None:
        work(self.buffers.narrow(size))


class DeviceLoop(StepLoop):
    """Stands for a WHILE node: how many steps run is decided when they run, from the slots."""

    kind = "while"

    def __init__(self, streams: LazyStreams, control: LoopControl, step: Graph, epilogue: Graph) -> None:
        self._streams, self._control, self._step, self._epilogue = streams, control, step, epilogue
        self.reason = None

    def launch(self, num_steps: int) -> int:
        self._streams.count_launch()
        for graph in (self._step, self._epilogue):
            graph.under_way += 1
        self._streams.enqueue(self._run, last=self._ended)
        return 0

    def _run(self) -> None:
        count, goes_on = self._control.count, True
        count.zero_()
        while goes_on:
            self._step.run()
            count.add_(1)
            goes_on = bool(count < self._control.limit) and bool(self._control.running > 0)
        self._epilogue.run()

    def _ended(self) -> None:
        for graph in (self._step, self._epilogue):
            graph.under_way -= 1


@contextmanager
def installed(seed: int, *, has_while_nodes: bool = True) -> Iterator[LazyStreams]:
    """Let there be a device, whose order a seed picks; with WHILE nodes, or with a driver that knows none."""
    streams = LazyStreams(seed)
    cuda = {
        "Stream": streams.new_stream,
        "Event": partial(Event, streams),
        "CUDAGraph": lambda **_options: Graph(streams),
        "current_stream": lambda *_device: streams.current,
        "stream": streams.on,
        "device": lambda _device: nullcontext(),
        "synchronize": streams.synchronize,
        "graph_pool_handle": lambda: 1,
        "empty_cache": lambda: None,
        "memory_reserved": lambda *_device: 0,
        "mem_get_info": lambda *_device: (_FREE_BYTES, _FREE_BYTES),
        "memory_snapshot": list,
        "current_device": lambda: 0,
        "get_device_properties": lambda _device: SimpleNamespace(
            multi_processor_count=2, major=9, total_memory=_FREE_BYTES, shared_memory_per_multiprocessor=228 * 1024
        ),
    }

    def over(loops: cuda_loop.CudaLoops, step: CudaStepGraph, epilogue: CudaStepGraph) -> StepLoop:
        return DeviceLoop(streams, loops._control, step.raw_graph(), epilogue.raw_graph())  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch, DeviceTensors(streams):
        for name, replacement in cuda.items():
            patch.setattr(torch.cuda, name, replacement)
        patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        patch.setattr(cuda_nodes, "driver", None)
        patch.setattr(cuda_loop, "driver", None)
        if has_while_nodes:
            patch.setattr(cuda_loop.CudaLoops, "over", over)
        try:
            yield streams
        finally:
            streams.is_over = True


@contextmanager
def lazy_runner(streams: LazyStreams, model: Model, config: EngineConfig) -> Iterator[Runner]:
    """Give a runner that takes its model to be on the device; nothing is captured yet."""
    prefill = model.prefill

    def later(*arguments: Any, **options: bool) -> None:
        """Queue a prompt. It gives nothing back: its logits are for prompts that are scored."""
        places = [as_operations_know(argument) for argument in arguments]

        def work() -> None:
            prefill(*places, **options)

        streams.enqueue(work)
        streams.go_on()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "device", DEVICE)
        patch.setattr(model, "prefill", later)
        yield make_runner(model, config, step=partial(LazyDecodeStep, streams))
