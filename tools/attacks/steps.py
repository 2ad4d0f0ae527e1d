"""Fuzzing of users' steps: if `graphdecode check` finds nothing, the graph computes what plain torch computes."""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import typer

from attacks.mutation import mutated_bytes
from attacks.trial import Wrong
from graphdecode import CaptureError, GraphdecodeError, GraphManager, StepBuffers
from graphdecode.cli.step import check
from graphdecode.errors import ArgumentError
from graphdecode.graphs.recorded import RecordedStepGraph

_ROWS, _WIDTH = 4, 6
_HEAD = f"""import threading, time
import torch
from graphdecode import Slot, StepBuffers

W = torch.randn({_WIDTH}, {_WIDTH}, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OUTSIDE = torch.ones({_WIDTH}, dtype=torch.float64)
KEPT = [torch.zeros({_WIDTH}, dtype=torch.float64)]
COUNT = [0]
constants = [W]
buffers = StepBuffers(
    [Slot(name, ("batch", {_WIDTH}), torch.float64, pad=PAD) for name in "xy"]
    + [Slot("n", ("batch",), torch.int64, pad=0), Slot("total", ({_WIDTH},), torch.float64)],
    max_batch_size={_ROWS}, device="cpu",
)


def apart(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def step(batch):
    a, b = batch.x, batch.y
"""
_ROWWISE = [
    "a = torch.tanh(a + b)", "b = torch.softmax(a, -1)", "a = a @ W", "b = torch.nn.functional.linear(b, W)",
    "a = torch.where(a > b, a, b * 0.5)", "b = torch.cat([a[:, 3:], b[:, :3]], -1)", "a = torch.sort(a, -1)[0]",
    "a = a * (batch.n[:, None] + 1) / 4", "b = torch.gather(a, 1, (batch.n % 6)[:, None].expand(-1, 6))",
    "a = torch.nn.functional.layer_norm(a, (6,))", "b = b.clone(); b[:, 1:3] = a[:, :2]", "a = (a - b).clamp(-1, 1)",
    "out = torch.empty_like(a); torch.mul(a, b, out=out); b = out", "a = torch.einsum('bi,bj->bij', a, b).mean(-1)",
    "b = a.t().contiguous().t()", "a = a.cumsum(-1) / 6", "b = torch.lerp(a, b, 0.25)", "b = a.flip(-1).roll(1, -1)",
    "batch.y.add_(a * 0.5)", "batch.x.copy_(b)", "batch.n.add_(1)", "batch.x[:, 2:4].mul_(0.5)",
    "for _ in range(3): a = a * 0.9 + 0.1", "a = a + a.new_zeros(a.shape[0], 1)", "b = b / (1 + b.abs().sum(-1, True))",
]  # fmt: skip
_HAZARDS = [
    "a = a * a.sum().item()", "if b.max() > 0: a = a + 1", "a = a[a > 0].sum() + b", "a = a + torch.rand_like(a)",
    "a = a + OUTSIDE", "a = a + torch.tensor([1.0] * 6)", "KEPT[0] = a.sum(0) + KEPT[0]; b = b + KEPT[0]",
    "apart(lambda: batch.y.mul_(2))", "batch.x = a * 2", "W.mul_(1.5)", "COUNT[0] += 1; a = a + COUNT[0]",
    "a = a + time.time() % 1", "b = b + a.mean(0)", "a = a - a.max()", "batch.total.copy_(a.sum(0))",
    "b = b + batch.n.tolist()[0]", "a = a + len(torch.unique(batch.n))", "a = torch.dropout(a, 0.5, train=True)",
    "a = a.roll(1, 0)", "b = b + a[0]", "a = a + float(b.double().numpy().sum())", "raise ValueError('mine')",
    "a = a + batch.x.data_ptr() % 7", "batch.total.add_(b.mean(0)); a = a + batch.total", "a = a[batch.n % 2 == 0]",
    "a = a + int(batch.n[0])", "a = torch.cat([a[1:], a[:1]])", "b = b * (batch.n.sum() + 1)",
]  # fmt: skip


class StepAttack:
    """Modules of random lines; some cannot be captured, some are not valid Python."""

    name = "steps (check)"

    def run(self, rng: random.Random, folder: Path) -> None:
        lines = rng.choices(_ROWWISE, k=rng.randrange(1, 9))
        hazard = rng.choice(_HAZARDS) if rng.random() < 0.5 else None
        if hazard is not None:
            lines.insert(rng.randrange(len(lines) + 1), hazard)
        text = _HEAD.replace("PAD", rng.choice(["0.0", "1.0", "-3.0"]))
        text += "".join(f"    {line}\n" for line in [*lines, "batch.x.add_(a)", "batch.y.copy_(b + batch.y)"])
        content = text.encode()
        if spoilt := rng.random() < 0.15:
            content = mutated_bytes(rng, content)
        name = f"attacked_{folder.name.replace('-', '_')}"
        (folder / f"{name}.py").write_bytes(content)
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        try:
            check(name)
        except typer.Exit as found:
            if found.exit_code != 1:
                raise Wrong(f"the check exits with {found.exit_code}: {lines}") from found
            if hazard is None and not spoilt:
                raise Wrong(f"a good step has findings: {lines}") from found
            raise _FoundError("hazards were found") from found
        except GraphdecodeError as error:
            if not spoilt:
                raise Wrong(f"{lines} is refused: {error}") from error
            raise
        finally:
            sys.path.remove(str(folder))
        if not spoilt:
            _compare(folder / f"{name}.py", rng, lines)


class _FoundError(GraphdecodeError, ValueError):
    """The check has findings."""


def _module_of(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("compared", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compare(file: Path, rng: random.Random, lines: list[str]) -> None:
    """Replay steps of random numbers of rows, and compare them with the same lines over tensors of as many rows."""
    captured, plain = _module_of(file), _module_of(file)
    buffers: StepBuffers = captured.buffers
    try:
        graphs = GraphManager(captured.step, buffers, [1, 2, _ROWS], constants=captured.constants)
        graphs.capture(progress=False)
    except (CaptureError, ArgumentError) as error:
        raise Wrong(f"the check finds nothing, but the capture refuses {lines}: {error}") from error
    state = {name: getattr(buffers, name).clone() for name in ("x", "y", "n", "total")}
    torch.manual_seed(rng.randrange(2**31))
    for _ in range(3):
        rows = rng.randrange(1, _ROWS + 1)
        for name in "xy":
            state[name] = torch.randn(_ROWS, _WIDTH, dtype=torch.float64)
        state["n"] = torch.randint(0, 5, (_ROWS,))
        for name, tensor in state.items():
            getattr(buffers, name).copy_(tensor)
        live = {name: tensor.clone() if name == "total" else tensor[:rows].clone() for name, tensor in state.items()}
        buffers.set_live_rows(rows)
        for graph in graphs.graphs.values():
            if isinstance(graph, RecordedStepGraph):
                graph.poison()
        graphs.replay(rows)
        _run(plain.step, live, lines)
        for name, exact in live.items():
            given = getattr(buffers, name)
            given = given if name == "total" else given[:rows]
            if not torch.allclose(given.double(), exact.double(), rtol=1e-9, atol=1e-9, equal_nan=True):
                raise Wrong(f"{name} of {rows} rows is {given.tolist()}, not {exact.tolist()}: {lines}")
            state[name] = getattr(buffers, name).clone()
    graphs.close()


def _run(step: Callable[[Any], None], live: dict[str, torch.Tensor], lines: list[str]) -> None:
    """Run the lines on plain tensors, in place."""
    batch = SimpleNamespace(**live)
    try:
        step(batch)
    except Exception as error:
        raise Wrong(f"the check does not find {type(error).__name__}: {error} of {lines}") from error
