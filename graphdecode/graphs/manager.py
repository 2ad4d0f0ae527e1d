"""`GraphManager`: a table of graphs with the verbs of those whose steps have rows alone, one bucket or another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from graphdecode.buckets import BucketLadder, ShapeLadder, StepShape
from graphdecode.buffers import StepBuffers
from graphdecode.errors import ArgumentError
from graphdecode.graphs.backend import Backend
from graphdecode.graphs.inspect.picture import to_dot, to_svg
from graphdecode.graphs.table import GraphTable


class GraphManager(GraphTable):
    """Captures a step once for each bucket and replays it.

    Args:
        step: given the buffers narrowed to a bucket's rows; writes its results into them. Where the ladder is one of
            shapes, it is given the shape before them.
        buffers: everything that the step reads and writes.
        ladder: the buckets: a `BucketLadder`, batch sizes, or a `ShapeLadder`, whose buckets are of one query a row.
        constants: modules and tensors that the step only reads; they are kept alive, and watched for being moved.
        backend: "cuda" (CUDA graphs), "recorded" (the same semantics on a CPU), "eager" (nothing is captured), or
            "auto": CUDA graphs on a GPU, recorded ones on a CPU.
        warmup_steps: eager steps before each capture; recordings after the first do with one.
        prompts: see `GraphTable`.
        options: the others of `GraphTable`.

    Attributes:
        bucket_for: given a batch size, returns the bucket that holds it.

    Raises:
        ValueError: an argument is unknown or does not fit the buffers or their device, or the ladder their capacity.
    """

    def __init__(
        self,
        step: Callable[..., None],
        buffers: StepBuffers,
        ladder: ShapeLadder | BucketLadder | Iterable[int],
        *,
        constants: Iterable[Any] = (),
        backend: str = "auto",
        warmup_steps: int = 2,
        prompts: StepBuffers | None = None,
        **options: Any,
    ) -> None:
        if isinstance(ladder, ShapeLadder):
            shapes, of_shape = ladder, step
        else:
            if not isinstance(ladder, BucketLadder):
                ladder = BucketLadder(ladder, buffers.max_batch_size)
            shapes, of_shape = ShapeLadder(map(StepShape, ladder), ladder.max_batch_size), lambda _, batch: step(batch)
        if shapes.max_batch_size > buffers.max_batch_size:
            raise ArgumentError(
                f"the ladder goes up to {shapes.max_batch_size} rows, the buffers hold {buffers.max_batch_size}"
            )
        beside = [] if prompts is None else [prompts]
        captured = Backend(buffers, *beside, constants=constants, name=backend, warmup_steps=warmup_steps)
        super().__init__(of_shape, buffers, shapes, captured, prompts=prompts, **options)
        self._rows = BucketLadder((shape.rows for shape in shapes.of("steps")), shapes.max_batch_size)
        self.bucket_for = self._rows.bucket_for

    @property
    def buckets(self) -> tuple[int, ...]:
        """The batch sizes that have a graph, ascending; `bucket_for` says which one holds some rows."""
        return self._rows.sizes

    def replay(self, batch_size: int) -> int:
        """Run one step of the first `batch_size` rows: one launch. Return the bucket that ran; see `GraphTable.run`."""
        self.bucket_for(batch_size)
        return (self.run(StepShape(batch_size)) or StepShape(0)).rows

    def launch(self, batch_size: int, num_steps: int) -> int:
        """Run `num_steps` steps of the first `batch_size` rows, and the loop's epilogue. Return the bucket that ran.

        Fewer steps run where none of the rows is running any more. On a GPU all of it is one launch wherever the
        driver grants that; the report says what each bucket got instead, and why.

        Raises:
            ValueError: `num_steps` is outside 1..max_steps of the loop.
            RuntimeError: there is no loop.
        """
        if self._control is None:
            raise RuntimeError("several steps at once need graphs that were made with loop=")
        if type(num_steps) is not int or not 1 <= num_steps <= self._control.loop.max_steps:
            most = self._control.loop.max_steps
            raise ArgumentError(f"num_steps must be in 1..max_steps={most}, got {num_steps!r}")
        self.bucket_for(batch_size)
        return (self.run(StepShape(batch_size), steps=num_steps) or StepShape(0)).rows

    def run_eager(self, batch_size: int) -> int:
        """Run the same step over the same bucket without its graph: bit for bit what `replay` computes."""
        shape = StepShape(self.bucket_for(batch_size))
        self.buffers.make_ready(batch_size, shape.rows, self._user)
        self._backend.eager(*self._bound(shape)).replays[0]()
        return shape.rows

    def dot(self, bucket: int, queries: int = 1) -> str:
        """Return a picture of one bucket's step, in Graphviz' language; a ValueError where it has no graph."""
        captured = {shape: ready.graphs[0] for shape, (ready, _) in self._ready.items() if ready.graphs}
        shape = StepShape(bucket, queries)
        if type(bucket) is not int or shape not in captured:
            known = sorted(other.rows for other in captured if other == StepShape(other.rows, queries))
            raise ArgumentError(f"bucket must be one of the captured {known}, got {bucket!r}")
        return to_dot(str(shape), captured[shape].nodes)

    def svg(self, bucket: int, queries: int = 1) -> str:
        """Return the same as SVG; Graphviz draws it, and a PictureError says where it is not installed."""
        return to_svg(self.dot(bucket, queries))
