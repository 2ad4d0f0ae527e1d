"""What a report says of each bucket, as table, JSON and picture."""

import json
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from graphdecode import GraphManager, Slot, StepBuffers
from graphdecode.buffers import Batch
from graphdecode.graphs import check

WEIGHT = torch.eye(8, device="cuda" if torch.cuda.is_available() else "cpu")


def step(batch: Batch) -> None:
    hidden = torch.tanh(batch.x @ WEIGHT)
    hidden = torch.tanh(hidden + hidden.sum(-1, keepdim=True))
    batch.y.copy_(hidden)


@pytest.fixture
def graphs(device: str) -> GraphManager:
    slots = [Slot("x", ("batch", 8), torch.float32), Slot("y", ("batch", 8), torch.float32)]
    buffers = StepBuffers(slots, max_batch_size=4, device=device)
    manager = GraphManager(step, buffers, [2, 4], constants=[WEIGHT])
    manager.capture(progress=False)
    return manager


def test_padding_share_counts_the_rows_that_were_not_live(graphs: GraphManager) -> None:
    for batch_size in (3, 3, 4, 1):
        graphs.replay(batch_size)
    small, large = graphs.report().buckets
    assert (small.replays, small.live_rows, small.padding_share) == (1, 1, 0.5)
    assert (large.replays, large.live_rows) == (3, 10)
    assert large.padding_share == pytest.approx(2 / 12)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts operators")
def test_nodes_kernels_and_bytes_of_a_recorded_step(graphs: GraphManager) -> None:
    _, large = graphs.report().buckets
    expected = {"aten.mm.default": 1, "aten.tanh.default": 2, "aten.sum.dim_IntList": 1}
    assert large.kernels == {**expected, "aten.add.Tensor": 1, "aten.copy_.default": 1}
    assert large.nodes == large.kernels
    row, matrix = 4 * 8 * 4, 8 * 8 * 4
    assert large.pool_bytes == 3 * row  # mm, and the sums after it; tanh, and the last tanh; add
    mm, tanh, total, add, copy = row + matrix + row, 2 * row, row + 16, row + 16 + row, 2 * row
    assert large.moved_bytes == mm + 2 * tanh + total + add + copy


def test_a_report_is_a_snapshot(graphs: GraphManager) -> None:
    before = graphs.report()
    graphs.replay(4)
    assert before.buckets[1].replays == 0
    assert graphs.report().buckets[1].replays == 1


def test_json_says_the_same_as_the_report(graphs: GraphManager) -> None:
    graphs.replay(3)
    report = graphs.report()
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain == report.as_dict()
    assert plain["backend"] == graphs.backend
    assert plain["buckets"][1]["padding_share"] == 0.25
    assert plain["buckets"][1]["nodes"] == dict(report.buckets[1].nodes)


def test_the_table_has_a_line_a_bucket(graphs: GraphManager) -> None:
    graphs.replay(3)
    lines = str(graphs.report()).splitlines()
    assert lines[0] == f"2 buckets, {graphs.backend} backend"
    driver = r"[\d.]+" if graphs.backend == "cuda" else "-"
    figures = rf"\d+\s+[\d.]+\s+{driver}\s+[\d.]+\s+{driver}\s+[\d.]+"
    assert re.match(rf"\s+4\s+captured\s+{figures}\s+1\s+25.0%$", lines[3]), lines[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts operators")
def test_operators_are_listed_once_for_buckets_that_have_the_same(graphs: GraphManager) -> None:
    lines = str(graphs.report()).splitlines()
    begin = lines.index("most often in bucket 2, 4:")
    assert lines[begin + 1 :] == [
        "      2 aten.tanh.default",
        "      1 aten.mm.default",
        "      1 aten.sum.dim_IntList",
        "      1 aten.add.Tensor",
        "      1 aten.copy_.default",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="pictures operators")
def test_the_picture_has_a_box_an_operator_and_an_arrow_for_what_it_reads(graphs: GraphManager) -> None:
    dot = graphs.dot(4)
    boxes = dict(re.findall(r'(n\d+) \[label="([\w.]+)\\n', dot))
    assert list(boxes.values()) == [
        "aten.mm.default",
        "aten.tanh.default",
        "aten.sum.dim_IntList",
        "aten.add.Tensor",
        "aten.tanh.default",
        "aten.copy_.default",
    ]
    arrows = set(re.findall(r"(\S+) -> (n\d+)", dot))
    assert {('"x"', "n0"), ('"constants[0]"', "n0"), ("n0", "n1"), ("n1", "n2"), ("n1", "n3"), ("n2", "n3")} < arrows
    assert ("n4", "n5") in arrows
    assert ("n0", "n5") not in arrows
    assert "test_report.py" in dot
    assert dot.startswith("digraph")
    assert dot.count("{") == dot.count("}")


@pytest.mark.parametrize("bucket", [3, None, "4", 4.0, True, [4]])
def test_a_picture_of_a_bucket_without_a_graph_is_refused(graphs: GraphManager, bucket) -> None:
    for picture in (graphs.dot, graphs.svg):
        with pytest.raises(ValueError, match="bucket .*2, 4"):
            picture(bucket)


def test_choices_are_shown_bucket_by_bucket(device: str) -> None:
    slots = [Slot("x", ("batch", 8), torch.float32), Slot("y", ("batch", 8), torch.float32)]
    chosen = {1: {"tile": {"path": "a", "us": 1.5}}, 2: {"tile": {"path": "b"}}, 4: {"tile": {"path": "b"}}}
    buffers = StepBuffers(slots, max_batch_size=4, device=device)
    graphs = GraphManager(step, buffers, [1, 2, 4], constants=[WEIGHT], choices=chosen.__getitem__)
    plain = json.loads(json.dumps(graphs.report().as_dict()))
    assert [bucket["choices"] for bucket in plain["buckets"]] == list(chosen.values())
    assert str(graphs.report()).splitlines()[-4:] == [
        "chosen for bucket 1:",
        "  tile: path a, us 1.5",
        "chosen for bucket 2, 4:",
        "  tile: path b",
    ]


def test_moved_bytes_are_an_upper_bound(device: str) -> None:
    """A gather reads as many rows as there are indices; the graph knows the table alone."""
    table = torch.zeros(1000, 8, device=device)
    buffers = StepBuffers(
        [Slot("ids", ("batch",), torch.int64), Slot("y", ("batch", 8), torch.float32)], max_batch_size=2, device=device
    )
    graphs = GraphManager(lambda batch: batch.y.copy_(table[batch.ids]), buffers, [2], constants=[table])
    report = graphs.capture(progress=False)
    gathered = 2 * 8 * 4
    assert "moved MiB is an upper bound: caches and tables count whole" in str(report)
    assert report.buckets[0].moved_bytes >= table.nbytes > gathered
    graphs.close()


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
    if device == "cuda" and name in ("gru", "lstm"):
        pytest.skip("torch sets a tensor's memory to cuDNN's weights in every call, which is refused")
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


ROWS, CAPACITY, VOCABULARY = 4, 32, 128


class TransformersStep:
    """A Llama, its cache, and the buffers that hold all that a step reads."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=CAPACITY,
        )
        self.model = LlamaForCausalLM(config).eval().to(device)
        self.cache = StaticCache(config=config, max_cache_len=CAPACITY)
        slots = [
            Slot("tokens", ("batch",), torch.int64, pad=1),
            Slot("position", (1,), torch.int64),
            Slot("logits", ("batch", VOCABULARY), torch.float32),
        ]
        self.buffers = StepBuffers(slots, max_batch_size=ROWS, device=device)
        with torch.no_grad():
            self(self.buffers.narrow(ROWS))  # allocates the cache
        self.state = [
            value for layer in self.cache.layers for value in vars(layer).values() if isinstance(value, Tensor)
        ]

    def __call__(self, batch: Batch) -> None:
        positions = batch.position[None].expand(batch.size, 1)
        output = self.model(input_ids=batch.tokens[:, None], position_ids=positions, past_key_values=self.cache)
        batch.logits.copy_(output.logits[:, -1])

    def declare_cache(self) -> None:
        for index, tensor in enumerate(self.state):
            self.buffers.adopt(f"cache_{index}", tensor)

    def generate(self, run: Callable[[int], int], count: int) -> list[Tensor]:
        for tensor in self.state:
            tensor.zero_()
        self.buffers.position.zero_()
        self.buffers.set_live_rows(ROWS)
        self.buffers.tokens.copy_(torch.tensor([3, 5, 7, 9]))
        logits = []
        for _ in range(count):
            run(ROWS)
            logits.append(self.buffers.logits.clone())
            self.buffers.tokens.copy_(logits[-1].argmax(-1))
            self.buffers.position.add_(1)
        return logits


@pytest.fixture
def llama(device: str) -> TransformersStep:
    return TransformersStep(device)


def test_the_check_names_undeclared_state_of_a_cache(llama: TransformersStep) -> None:
    findings = check(llama, llama.buffers, constants=[llama.model])
    assert {finding.kind for finding in findings} == {"undeclared-input"}
    assert any("cache_utils.py" in (finding.file or "") for finding in findings)


def test_law_5_it_replays_as_it_runs_once_its_state_is_declared(llama: TransformersStep) -> None:
    llama.declare_cache()
    assert not check(llama, llama.buffers, constants=[llama.model])
    graphs = GraphManager(llama, llama.buffers, [ROWS], constants=[llama.model])
    graphs.capture(progress=False)
    eager, replayed = llama.generate(graphs.run_eager, 12), llama.generate(graphs.replay, 12)
    for before, after in zip(eager, replayed, strict=True):
        assert torch.equal(before, after)
    assert len({tuple(logits.argmax(-1).tolist()) for logits in replayed}) > 1, "it does not always say the same"
