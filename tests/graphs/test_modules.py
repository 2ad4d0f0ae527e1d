"""Law 5 for torch's own modules: a user's step may be made of any of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from graphdecode import GraphManager, Slot, StepBuffers
from graphdecode.buffers import Batch

WIDTH = 16
Call = Callable[[nn.Module, Tensor], Tensor]


def plain(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def recurrent(module: nn.Module, x: Tensor) -> Tensor:
    return module(x[:, None])[0][:, 0]


def attention(module: nn.Module, x: Tensor) -> Tensor:
    return module(x[None], x[None], x[None], need_weights=False)[0][0]


MODULES: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)), plain),
    "bfloat16": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH)).bfloat16(),
        lambda module, x: module(x.bfloat16()).float(),
    ),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.BatchNorm1d(WIDTH)), plain),
    "dropout": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)), plain),
    "convolution": (lambda: nn.Conv1d(1, 1, 3, padding=1), lambda module, x: module(x[:, None])[:, 0]),
    "pooling": (
        lambda: nn.Sequential(nn.AvgPool1d(3, 1, 1), nn.MaxPool1d(3, 1, 1)),
        lambda module, x: module(x[:, None])[:, 0],
    ),
    "embedding": (lambda: nn.Embedding(8, WIDTH), lambda module, x: module((x[:, 0].abs() * 7).long().clamp(0, 7))),
    "gru": (lambda: nn.GRU(WIDTH, WIDTH, batch_first=True), recurrent),
    "lstm": (lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), recurrent),
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 4, batch_first=True), attention),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True),
        lambda module, x: module(x[None])[0],
    ),
    "decoder layer": (
        lambda: nn.TransformerDecoderLayer(WIDTH, 4, 32, batch_first=True),
        lambda module, x: module(x[None], x[None])[0],
    ),
    "upsampling": (lambda: nn.Upsample(scale_factor=2), lambda module, x: module(x[:, None])[:, 0, ::2]),
}


@pytest.mark.parametrize("name", MODULES)
def test_law_5_a_module_replays_as_it_runs(device: str, name: str) -> None:
    make, call = MODULES[name]
    torch.manual_seed(0)
    module = make().to(device).eval()
    rows = ("batch", WIDTH)
    buffers = StepBuffers(
        [Slot("x", rows, torch.float32), Slot("y", rows, torch.float32)], max_batch_size=4, device=device
    )

    def step(batch: Batch) -> None:
        batch.y.copy_(call(module, batch.x))

    graphs = GraphManager(step, buffers, [1, 4], constants=[module])
    graphs.capture(progress=False)
    for seed, batch_size in enumerate((4, 1, 3)):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        x[batch_size:] = 0.0  # what the slot declares, and is given when the batch size changes
        buffers.set_live_rows(batch_size)
        results = []
        for run in (graphs.run_eager, graphs.replay):
            buffers.x.copy_(x)
            if device == "cpu":
                for graph in graphs.graphs.values():
                    graph.poison()
            run(batch_size)
            results.append(buffers.y.clone())
        assert torch.isfinite(results[0]).all()
        assert torch.equal(*results)
