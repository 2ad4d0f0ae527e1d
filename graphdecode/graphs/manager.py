"""`GraphManager`: the graphs of a step of one's own, one a batch-size bucket; the public face of `GraphTable`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from graphdecode.buckets import BucketLadder, ShapeLadder, StepShape
from graphdecode.buffers import StepBuffers
from graphdecode.errors import ArgumentError
from graphdecode.graphs.backend import Backend
from graphdecode.graphs.inspect.picture import to_dot, to_svg
from graphdecode.graphs.report import GraphReport
from graphdecode.graphs.step_graph import Step, StepGraph
from graphdecode.graphs.table import GraphTable


class GraphManager:
    """Captures a step once for each bucket and replays it.

    Args:
        step: given the buffers narrowed to a bucket's rows; writes its results into them.
        buffers: everything that the step reads and writes.
        ladder: the buckets; a `BucketLadder`, or batch sizes.
        constants: modules and tensors that the step only reads; they are kept alive, and watched for being moved.
        backend: "cuda" (CUDA graphs), "recorded" (the same semantics on a CPU), "eager" (nothing is captured), or
            "auto": CUDA graphs on a GPU, recorded ones on a CPU.
        warmup_steps: eager steps before each capture; recordings after the first do with one.
        options: `capture_when`, `strict`, `choices` and `loop` of `GraphTable`.

    Attributes:
        table: the graphs; `report`, `verify`, `audit`, `freeze`, `thaw` and `close` are its own.

    Raises:
        ValueError: an argument is unknown or does not fit the buffers or their device, or the ladder their capacity.
    """

    def __init__(
        self,
        step: Step,
        buffers: StepBuffers,
        ladder: BucketLadder | Iterable[int],
        *,
        constants: Iterable[Any] = (),
        backend: str = "auto",
        warmup_steps: int = 2,
        **options: Any,
    ) -> None:
        if not isinstance(ladder, BucketLadder):
            ladder = BucketLadder(ladder, buffers.max_batch_size)
        most, held = ladder.max_batch_size, buffers.max_batch_size
        if most > held:
            raise ArgumentError(f"the ladder goes up to {most} rows, the buffers hold {held}")
        captured = Backend(buffers, constants=constants, name=backend, warmup_steps=warmup_steps)
        shapes = ShapeLadder(map(StepShape, ladder), most)
        self._stand_for(GraphTable(lambda _, batch: step(batch), buffers, shapes, captured, **options))

    @classmethod
    def of(cls, table: GraphTable) -> GraphManager:
        """Return the face of a table that is there; its buckets are those of one query a row."""
        manager = cls.__new__(cls)
        manager._stand_for(table)
        return manager

    def _stand_for(self, table: GraphTable) -> None:
        self.table, self.buffers, self.backend = table, table.buffers, table.backend.name
        self.ladder = BucketLadder((shape.rows for shape in table.ladder.of("steps")), table.ladder.max_batch_size)
        self.report, self.verify, self.audit = table.report, table.verify, table.audit
        self.freeze, self.thaw, self.close = table.freeze, table.thaw, table.close
        self.bucket_for = self.ladder.bucket_for

    @property
    def graphs(self) -> dict[int, StepGraph]:
        """The captured steps by bucket, for those who look into them."""
        return self.table.graphs()

    @property
    def buckets(self) -> tuple[int, ...]:
        """The batch sizes that have a graph, ascending; `bucket_for` says which one holds some rows."""
        return self.ladder.sizes

    def capture(self, progress: bool = True) -> GraphReport:
        """Capture all buckets, and return the report; see `GraphTable.capture`."""
        self.table.capture(progress, ["steps"])
        return self.report()

    def replay(self, batch_size: int) -> int:
        """Run one step of the first `batch_size` rows: one launch. Return the bucket that ran; see `GraphTable.run`."""
        self.bucket_for(batch_size)
        return (self.table.run(StepShape(batch_size)) or StepShape(0)).rows

    def launch(self, batch_size: int, num_steps: int) -> int:
        """Run `num_steps` steps of the first `batch_size` rows, and the loop's epilogue. Return the bucket that ran.

        Fewer steps run where none of the rows is running any more. On a GPU all of it is one launch wherever the
        driver grants that; the report says what each bucket got instead, and why.
        """
        self.table.check_steps(num_steps)
        self.bucket_for(batch_size)
        return (self.table.run(StepShape(batch_size), steps=num_steps) or StepShape(0)).rows

    def run_eager(self, batch_size: int) -> int:
        """Run the same step over the same bucket without its graph: bit for bit what `replay` computes."""
        self.bucket_for(batch_size)
        return self.table.run_eager(StepShape(batch_size)).rows

    def dot(self, bucket: int, queries: int = 1) -> str:
        """Return a picture of one bucket's step, in Graphviz' language; a ValueError where it has no graph."""
        captured = self.table.graphs(queries)
        if type(bucket) is not int or bucket not in captured:
            raise ArgumentError(f"bucket must be one of the captured {sorted(captured)}, got {bucket!r}")
        return to_dot(str(StepShape(bucket, queries)), captured[bucket].nodes)

    def svg(self, bucket: int, queries: int = 1) -> str:
        """Return the same as SVG; Graphviz draws it, and a PictureError says where it is not installed."""
        return to_svg(self.dot(bucket, queries))
