"""Law 5 over random programs: whatever a step is made of, its replay is the step run eagerly, bit for bit."""

import random
from collections.abc import Callable

import pytest
import torch
from step_buffers import make_buffers
from torch import Tensor

from graphdecode import GraphManager, Slot, StepBuffers
from graphdecode.buffers import Batch

ROWS, WIDTH, OPERATIONS = 4, 8, 14
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WEIGHT = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)).to(DEVICE)
SPARSE = torch.eye(WIDTH).roll(1, 0).to_sparse().to(DEVICE)


@torch.library.custom_op("graphdecode_tests::accumulate", mutates_args={"total"})
def accumulate(total: Tensor, x: Tensor) -> Tensor:
    """Add to a running total, and return a new tensor too: what an append-and-attend operator does."""
    total.add_(x.sum(-1))
    return total[:, None] * 0.5 + x


@accumulate.register_fake
def _(total: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("graphdecode_tests::halves", mutates_args=())
def halves(x: Tensor) -> list[Tensor]:
    """Return a list of new tensors."""
    return [part.clone() for part in x.chunk(2, -1)]


@halves.register_fake
def _(x: Tensor) -> list[Tensor]:
    return [torch.empty_like(part) for part in x.chunk(2, -1)]


def _two_views(a: Tensor, b: Tensor) -> Tensor:
    left, right = a.chunk(2, -1)
    return torch.cat([right, left], -1) + b


def _partly_written(a: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros_like(a)
    out[:, 2:5] = b[:, 2:5]
    out[0] = 1.5
    out[:, 0] += 0.25
    return out


def _written_under_mask(a: Tensor, b: Tensor) -> Tensor:
    out = a.clone()
    out[b > 0] = -1.0
    return out


def _preallocated(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty_like(a)
    torch.mul(a, b, out=out)
    return out


def _reshaped_in_place(a: Tensor, b: Tensor) -> Tensor:
    out = a + b
    out.t_().mul_(0.5).unsqueeze_(0)
    return (out[0] * 2.0).t()


def _attention(a: Tensor, b: Tensor) -> Tensor:
    q, k = a.view(1, 1, -1, WIDTH), b.view(1, 1, -1, WIDTH)
    return torch.nn.functional.scaled_dot_product_attention(q, k, k).view_as(a)


def _complex(a: Tensor) -> Tensor:
    return torch.complex(a[:, ::2], a[:, 1::2])


def _real(z: Tensor) -> Tensor:
    return torch.cat([z.real, z.imag], -1)


def _conjugate_written(a: Tensor, b: Tensor) -> Tensor:
    out = _complex(a)
    out.conj().mul_(_complex(b)).imag.neg_()
    return _real(out)


def _conjugate_as_out(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty_like(_complex(a))
    torch.add(_complex(a), _complex(b).conj(), out=out.conj())
    return torch.view_as_real(out).flatten(1)


class Plain(torch.Tensor):
    """A subclass without operators of its own."""


UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.tanh,
    torch.sin,
    lambda a: torch.softmax(a, -1),
    lambda a: torch.sort(a, -1)[0],
    lambda a: torch.topk(a, WIDTH, -1)[0],
    lambda a: a.cumsum(-1),
    lambda a: a.to(torch.bfloat16).to(torch.float32),
    lambda a: a @ WEIGHT,
    lambda a: torch.nn.functional.linear(a, WEIGHT),
    lambda a: torch.nn.functional.layer_norm(a, (WIDTH,)),
    lambda a: torch.nn.functional.dropout(a, 0.5, training=False),
    lambda a: a.t().contiguous().t(),
    lambda a: a.t().reshape(-1).view(-1, WIDTH),
    lambda a: a.flip(-1).roll(1, -1),
    lambda a: a.clamp(-1, 1).neg_(),
    lambda a: torch.stack(halves(a)).transpose(0, 1).reshape_as(a),
    lambda a: a.argsort(-1).float(),
    lambda a: a / (1 + a.abs().amax(-1, keepdim=True)),
    lambda a: _real(_complex(a).conj().clone()),
    lambda a: torch.view_as_real(_complex(a).conj().resolve_conj()).flatten(1),
    lambda a: _complex(a).conj().imag.clone().repeat(1, 2),
    lambda a: torch.fft.irfft(torch.fft.rfft(a).conj(), n=WIDTH),
    lambda a: (a.as_subclass(Plain) * 0.5).as_subclass(Tensor),
    lambda a: torch.sparse.mm(SPARSE, a.t()).t(),
    lambda a: torch.vmap(lambda row: row.softmax(-1))(a),
    lambda a: torch.einsum("bi,bj->bij", a, a).mean(-1),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.mul,
    torch.maximum,
    lambda a, b: torch.where(a > b, a, b * 0.5),
    lambda a, b: torch.lerp(a, b, 0.3),
    lambda a, b: torch.gather(a, 1, b.argsort(-1)),
    _two_views,
    _partly_written,
    _written_under_mask,
    _preallocated,
    lambda a, b: _real(_complex(a).conj() * _complex(b)),
    _conjugate_written,
    _conjugate_as_out,
    _reshaped_in_place,
    _attention,
]


def random_step(seed: int) -> Callable[[Batch], None]:
    """Return a step of random operations over what came before them; it writes two slots, one through views."""
    draw = random.Random(seed)
    plan = [(draw.choice(UNARY + BINARY), draw.random(), draw.random(), draw.random()) for _ in range(OPERATIONS)]

    def step(batch: Batch) -> None:
        values = [batch.x, batch.y]
        for operation, first, second, in_place in plan:
            a, b = values[int(first * len(values))], values[int(second * len(values))]
            result = operation(a, b) if operation in BINARY else operation(a)
            if in_place < 0.2:
                result = result.clone().mul_(0.5)
                result[:, 1:3].add_(a[:, :2])
            values.append(result)
        values.append(accumulate(batch.total, values[-1]))
        batch.x.copy_(torch.tanh(values[-1]))
        batch.y[:, : WIDTH // 2].copy_(values[-2][:, WIDTH // 2 :])

    return step


@pytest.mark.parametrize("seed", range(60))
def test_law_5_any_step_replays_as_it_runs(seed: int) -> None:
    rows = ("batch", WIDTH)
    buffers = StepBuffers(
        [Slot("x", rows, torch.float32), Slot("y", rows, torch.float32), Slot("total", ("batch",), torch.float32)],
        max_batch_size=ROWS,
        device=DEVICE,
    )
    graphs = GraphManager(random_step(seed), buffers, [1, ROWS], constants=[WEIGHT, SPARSE])
    graphs.capture(progress=False)
    results = []
    for run in (graphs.run_eager, graphs.replay):
        generator = torch.Generator().manual_seed(seed)
        buffers.total.zero_()
        buffers.y.zero_()
        trace = []
        for batch_size in (ROWS, 1, 3, ROWS):
            buffers.x.copy_(torch.randn(ROWS, WIDTH, generator=generator))
            buffers.set_live_rows(batch_size)
            if run == graphs.replay and DEVICE == "cpu":
                for graph in graphs.graphs.values():
                    graph.poison()
            run(batch_size)
            trace.append([tensor.clone() for tensor in (buffers.x, buffers.y, buffers.total)])
        results.append(trace)
    for step, (eager, replayed) in enumerate(zip(*results, strict=True)):
        for before, after in zip(eager, replayed, strict=True):
            assert torch.equal(before, after), f"seed {seed}, step {step}"
    assert torch.isfinite(buffers.x).all(), f"seed {seed} shows nothing"
    graphs.close()


ROW_BYTES = 4 * 8 * 4  # of the four rows of eight floats


def layers(batch: Batch) -> None:
    """Run many layers, each of which needs what the one before it made."""
    hidden = batch.x
    for layer in range(50):
        hidden = torch.tanh(hidden) + layer
    batch.y.copy_(hidden)


def test_the_memory_of_many_layers_is_that_of_one() -> None:
    buffers = make_buffers()
    graphs = GraphManager(layers, buffers, [4])
    graphs.capture(progress=False)
    assert graphs.report().buckets[0].nodes["aten.tanh.default"] == 50
    assert graphs.report().buckets[0].pool_bytes <= 3 * ROW_BYTES
    expected = make_buffers()
    for held in (buffers, expected):
        held.x.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))
    graphs.replay(4)
    layers(expected.narrow(4))
    assert torch.equal(buffers.y, expected.y)


@pytest.mark.parametrize("seed", range(20))
def test_no_intermediate_is_overwritten_before_its_last_use(seed: int) -> None:
    """Random steps hold some of what they make, and views of it, and drop it at any time; sizes differ."""

    def step(batch: Batch) -> None:
        draw, held = random.Random(seed), [batch.x]
        for _ in range(60):
            first, second = (held[draw.randrange(len(held))] for _ in range(2))
            width = draw.choice((2, 4, 8))
            made = torch.empty(4, width).copy_(first[:, :1] - second[:, -1:])
            made.add_(first[:, :1].repeat(1, width)).mul_(0.5)
            held.append(draw.choice((made, made[:, 1:], made.flip(1), made.t().contiguous().t())))
            while len(held) > draw.randint(2, 6):
                del held[draw.randrange(len(held))]
        for made in held:
            batch.y.add_(made[:, :1])

    buffers, expected = make_buffers(), make_buffers()
    graphs = GraphManager(step, buffers, [4])
    graphs.capture(progress=False)
    for run in range(2):
        given = torch.randn(4, 8, generator=torch.Generator().manual_seed(run))
        for held in (buffers, expected):
            held.x.copy_(given)
            held.y.zero_()
        graphs.replay(4)
        step(expected.narrow(4))
        assert torch.equal(buffers.y, expected.y), f"seed {seed}, run {run}"
