"""All shapes of a table, with a loop, in halves and of prompts, over a stand-in driver: one stream, one pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cuda_driver.counting import MAX_STEPS, Counting

from graphdecode.buckets import ShapeLadder, StepShape
from graphdecode.buffers import Batch
from graphdecode.graphs import GraphTable

ROWS, TOKENS = 4, 8


def test_a_table_captures_all_its_shapes_on_one_stream_into_one_pool(device, monkeypatch):
    made: list[str] = []

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            made.append(name)
            return call(*arguments)

        return noted

    for name in ("Stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, counted(name, getattr(torch.cuda, name)))
    rows, prompts = Counting(ROWS), Counting(TOKENS)

    def step(shape: StepShape, batch: Batch) -> None:
        if shape.part != "logits":
            (rows if shape.rows else prompts).step(batch)
        if shape.kind == "mixed":
            prompts.step(prompts.buffers.narrow(shape.prompt_tokens))

    steps = [StepShape(bucket, queries) for bucket in (1, ROWS) for queries in (1, 2)]
    halves = [half for shape in steps if shape.queries == 1 for half in shape.halves]
    beside = [StepShape(0, 1, TOKENS), StepShape(ROWS, 1, TOKENS)]
    constants = [rows.weight, prompts.weight]
    ladder = ShapeLadder([*steps, *halves, *beside], ROWS)
    table = GraphTable(step, rows.buffers, ladder, constants=constants, prompts=prompts.buffers, loop=rows.loop())
    table.capture(progress=False)
    rows.enter([0.1, 0.2, 0.3], [MAX_STEPS] * 3)
    prompts.enter([0.5] * 3, [2] * 3)
    for wanted, meanwhile, looped in [
        (StepShape(3), None, 3),
        (StepShape(3, 2), None, None),
        (StepShape(3, 1, 3), None, None),
        (StepShape(3, part="logits"), lambda: None, None),
        (StepShape(3, part="logits"), lambda: None, None),
    ]:
        assert table.run(wanted, steps=looped, meanwhile=meanwhile) is not None
        rows.expect_steps(3, looped or 1)
    prompts.expect_steps(3, 1)
    assert table.run(StepShape(0, 1, 3)) is not None  # rare beside mixed steps: captured now
    prompts.expect_steps(3, 1)
    assert table.run(StepShape(0, 1, 3)) is not None
    rows.check(3)
    prompts.check(3)
    assert sorted(made) == ["Stream", "graph_pool_handle"]
    assert {bucket.state for kind in ("prompts", "mixed") for bucket in table.report(kind).buckets} == {"captured"}
    table.close()
