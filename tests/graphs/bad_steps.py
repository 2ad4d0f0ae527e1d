"""Steps that a graph would replay wrongly, each with the kind of its hazard."""

import itertools
import random
import time
from collections.abc import Callable

import numpy
import torch
import torch.nn.utils.rnn as rnn
from step_buffers import COMPRESSED, PACKED, SPARSE, WEIGHT

from graphdecode.kernels.native.optional_triton import tl, triton

BAD_STEPS: dict[str, tuple[Callable, str]] = {}
OUTSIDE = torch.ones(4, 8)
OUTSIDE_LIST = [torch.ones(4, 8)]
MODULE = torch.nn.Linear(8, 8)
HALF = WEIGHT.half()
LAZY: dict[str, torch.Tensor] = {}
CARRIED = [torch.zeros(4, 8)]
COUNTER = itertools.count(1)
CONTEXTS = iter(range(1, 100))
OUTSIDE_SPARSE = torch.eye(8).to_sparse()


@triton.jit
def unregistered_kernel(x, BLOCK: tl.constexpr):
    """Negate, launched by nobody's operator."""
    offsets = tl.arange(0, BLOCK)
    tl.store(x + offsets, -tl.load(x + offsets))


def bad(kind: str, **steps: Callable) -> Callable[[Callable], Callable]:
    """Add steps of one line to the corpus, or the function that this decorates."""
    BAD_STEPS.update((name, (step, kind)) for name, step in steps.items())

    def add(step: Callable) -> Callable:
        BAD_STEPS[step.__name__] = (step, kind)
        return step

    return add


@bad("host-read")
def item(batch) -> None:
    if batch.n.sum().item() > 3:
        batch.x.mul_(2.0)


@bad("host-read")
def branch_on_tensor(batch) -> None:
    if batch.flag.any():
        batch.x.zero_()


@bad("host-read")
def to_list(batch) -> None:
    for value in batch.n.tolist():
        batch.x.add_(value)


@bad("host-read")
def formatting(batch) -> None:
    batch.label = f"{batch.n[0]}"


@bad("host-read")
def equality(batch) -> None:
    if torch.equal(batch.x, batch.y):
        batch.x.zero_()


@bad("host-read")
def all_close(batch) -> None:
    if torch.allclose(batch.x, batch.y):
        batch.x.zero_()


@bad("host-read")
def while_loop(batch) -> None:
    while batch.x.abs().max() > 0.5:
        batch.x.mul_(0.5)


@bad("host-read")
def assertion(batch) -> None:
    assert (batch.n >= 0).all()


@bad("host-read")
def membership(batch) -> None:
    if 1 in batch.n:
        batch.x.zero_()


@bad("data-dependent-shape")
def nonzero(batch) -> None:
    rows = batch.flag.nonzero()
    batch.y.add_(rows.sum())


@bad("data-dependent-shape")
def where_of_one(batch) -> None:
    (rows,) = torch.where(batch.flag)
    batch.y.add_(rows.sum())


@bad("data-dependent-shape")
def mask_assignment(batch) -> None:
    batch.x[batch.flag] = batch.y[batch.flag]


@bad("undeclared-input")
def list_of_tensors(batch) -> None:
    for tensor in OUTSIDE_LIST:
        batch.x.add_(tensor)


@bad("moved")
def rebinding(batch) -> None:
    batch.x = batch.x * 2.0


@bad("moved")
def setting_data(batch) -> None:
    scratch = torch.empty(4, 8)
    scratch.set_(batch.x)


@bad("failed")
def raises(batch) -> None:
    raise ValueError("the step's own mistake")


@torch.library.custom_op("graphdecode_tests::total", mutates_args=())
def total(x: torch.Tensor) -> float:
    """Return a number: the host has to wait for it."""
    return float(x.sum())


@bad("host-read")
def range_of_a_tensor(batch) -> None:
    for _ in range(batch.n[0]):
        batch.x.add_(1.0)


@bad("data-dependent-shape")
def numbers_written_under_a_mask(batch) -> None:
    batch.x[batch.flag] = batch.y[0]


@bad("undeclared-input")
def state_kept_between_steps(batch) -> None:
    CARRIED[0] = CARRIED[0] * 0.5 + batch.x
    batch.y.copy_(CARRIED[0])


@bad("undeclared-input")
def made_at_the_first_step(batch) -> None:
    if "mask" not in LAZY:
        LAZY["mask"] = torch.ones(8)
    batch.x.mul_(LAZY["mask"])


@bad("torch-rng")
def attention_with_dropout(batch) -> None:
    q = batch.x.view(1, 1, 4, 8)
    batch.y.copy_(torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)[0, 0])


@bad("moved")
def data_replaced(batch) -> None:
    batch.y.data = batch.x * 2.0


@bad("moved")
def out_that_is_too_small(batch) -> None:
    scratch = torch.empty(0)
    torch.mul(batch.x, 2.0, out=scratch)


@bad("moved")
def slot_deleted(batch) -> None:
    del batch.y


@bad("moved")
def slot_swapped(batch) -> None:
    batch.x, batch.y = batch.y, batch.x


bad(
    "host-read",
    to_int=lambda batch: batch.x[: int(batch.n[0])].zero_(),
    to_float=lambda batch: batch.x.mul_(float(batch.y[0, 0])),
    to_numpy=lambda batch: batch.x.mul_(float(batch.y.numpy().sum())),
    printing=lambda batch: print("logits", batch.x),
    python_max=lambda batch: batch.y.copy_(max(batch.x[0, 0], batch.x[0, 1])),
    to_cpu=lambda batch: batch.x.add_(batch.y.cpu()),
    to_cpu_by_name=lambda batch: batch.x.add_(batch.y.to("cpu")),
    as_array=lambda batch: numpy.asarray(batch.n),
    slice_by_a_tensor=lambda batch: batch.x[: batch.n[0]].zero_(),
    sorting=lambda batch: sorted(batch.x[0, :3]),
    operator_that_returns_a_number=lambda batch: batch.x.mul_(total(batch.y)),
    conditional_expression=lambda batch: batch.x.mul_(2.0 if batch.flag[0] else 1.0),
    sizes_of_a_split=lambda batch: batch.y.add_(batch.x.tensor_split(batch.ids)[0].sum()),
    sizes_of_a_split_by_name=lambda batch: batch.y.add_(
        torch.tensor_split(batch.x, tensor_indices_or_sections=batch.ids)[0].sum()
    ),
    sizes_of_a_shape=lambda batch: batch.y.add_(torch._reshape_from_tensor(batch.x, batch.ids).sum()),
    sizes_of_a_narrowed_tensor=lambda batch: batch.y.add_(torch.narrow(batch.x, 0, batch.ids[0], 1)),
    sizes_of_a_range=lambda batch: batch.y.add_(torch.arange(batch.ids[0]).sum()),
    number_of_largest=lambda batch: batch.y.add_(batch.x.topk(batch.ids[0])[0].sum()),
    factor=lambda batch: batch.y.copy_(torch.add(batch.x, batch.y, alpha=batch.x[0, 0])),
    packed_sequence=lambda batch: batch.y.add_(
        rnn.pack_padded_sequence(batch.x[None], 1 + batch.ids[:1], batch_first=True).data.sum()
    ),
    padded_sequence=lambda batch: batch.y.add_(
        rnn.pad_packed_sequence(rnn.PackedSequence(batch.x, batch.ids[:1].clamp(4, 4)))[0].sum()
    ),
    storage=lambda batch: batch.y.add_(batch.n.untyped_storage()[0]),
    multi_element_branch_by_all=lambda batch: batch.y.add_(1.0 if torch.all(batch.flag) else 0.0),
)
bad(
    "data-dependent-shape",
    boolean_mask=lambda batch: batch.y.add_(batch.x[batch.flag].sum()),
    unique=lambda batch: batch.y.add_(torch.unique(batch.n).sum()),
    masked_select=lambda batch: batch.y.add_(torch.masked_select(batch.x, batch.flag[:, None]).sum()),
    repeat_interleave=lambda batch: batch.y.add_(torch.repeat_interleave(batch.n, batch.n.abs() + 1).sum()),
    bincount=lambda batch: batch.y.add_(torch.bincount(batch.ids.clamp(0, 3)).sum()),
    argwhere=lambda batch: batch.y.add_(torch.argwhere(batch.flag).sum()),
)
bad(
    "host-data",
    tensor_from_list=lambda batch: batch.x.add_(torch.tensor([1.0] * 8)),
    tensor_from_scalar=lambda batch: batch.x.mul_(torch.tensor(0.5)),
    as_tensor=lambda batch: batch.x.add_(torch.as_tensor([2.0] * 8)),
    time_as_tensor=lambda batch: batch.x.add_(torch.tensor(time.time())),
    list_as_index=lambda batch: batch.y[:2].copy_(batch.x[[0, 1]]),
)
bad(
    "undeclared-input",
    global_tensor=lambda batch: batch.x.add_(OUTSIDE),
    writes_to_a_stranger=lambda batch: OUTSIDE.copy_(batch.x),
    from_numpy=lambda batch: batch.x.add_(torch.from_numpy(OUTSIDE.numpy() * 1.0)),
    module_that_nobody_declared=lambda batch: batch.y.copy_(MODULE(batch.x)),
    sparse_that_nobody_declared=lambda batch: batch.y.copy_((OUTSIDE_SPARSE @ batch.x.t()).t()),
    weight_that_was_converted=lambda batch: batch.y.copy_(batch.x.half() @ HALF),
)
bad(
    "opaque-memory",
    sparse_sum=lambda batch: batch.y.copy_((SPARSE + SPARSE).to_dense()[:4] * batch.x),
    sparse_times_a_slot=lambda batch: batch.y.copy_((SPARSE * batch.x[0, 0]).to_dense()[:4]),
    made_sparse=lambda batch: batch.y.copy_(batch.x.to_sparse().to_dense()),
    made_compressed=lambda batch: batch.y.copy_(batch.x.to_sparse_csr().to_dense()),
    packed_sum=lambda batch: batch.y.copy_((PACKED + PACKED).to_dense()),
    packed_slot=lambda batch: batch.y.copy_(batch.x.to_mkldnn().to_dense()),
    quantized_by_tensor=lambda batch: batch.y.copy_(
        torch.quantize_per_tensor(batch.x, 0.1, 0, torch.qint8).dequantize()
    ),
    quantized_by_row=lambda batch: batch.y.copy_(
        torch.quantize_per_channel(batch.x, torch.ones(4), torch.zeros(4).long(), 0, torch.qint8).dequantize()
    ),
    zero_tensor=lambda batch: batch.y.copy_(torch._efficientzerotensor((4, 8)) + batch.x),
)
bad(
    "torch-rng",
    dropout=lambda batch: batch.y.copy_(torch.dropout(batch.x, 0.5, train=True)),
    multinomial=lambda batch: batch.ids.copy_(torch.multinomial(batch.x.abs() + 1e-3, 1)[:, 0]),
    noise=lambda batch: batch.x.add_(torch.randn_like(batch.x)),
    exponential=lambda batch: batch.y.exponential_(),
    bernoulli=lambda batch: batch.flag.copy_(torch.bernoulli(batch.x.abs().clamp(0, 1)[:, 0])),
    bernoulli_by_tensor=lambda batch: batch.y.bernoulli_(batch.x.clamp(0, 1)),
    permutation=lambda batch: batch.y.copy_(batch.x[torch.randperm(batch.size)]),
)
bad(
    "constant-written",
    weight_update=lambda batch: WEIGHT.mul_(1.0),
    weight_slice_written=lambda batch: WEIGHT[0].copy_(WEIGHT[1]),
    compressed_weight_update=lambda batch: COMPRESSED.mul_(1.0),
    packed_weight_update=lambda batch: PACKED.add_(PACKED),
    constant_as_out=lambda batch: torch.add(batch.x[0], 1.0, alpha=2, out=WEIGHT[0]),
)
bad(
    "moved",
    resizing=lambda batch: torch.empty(0).resize_(4, 8).copy_(batch.x),
    slot_reshaped_in_place=lambda batch: batch.x.unsqueeze_(0),
)
bad("unregistered-launch", bare_triton_launch=lambda batch: unregistered_kernel[(1,)](batch.x, BLOCK=32))
bad(
    "raw-pointer",
    address=lambda batch: batch.x.data_ptr(),
    address_of_storage=lambda batch: batch.x.untyped_storage().data_ptr(),
)


bad(
    "lost-result",
    product_that_is_returned=lambda batch: batch.x @ WEIGHT.T,
    returned_beside_a_slot=lambda batch: (batch.y.copy_(batch.x), {"logits": batch.x * 2}),
    nothing_written=lambda batch: (batch.x + 1) is None,
)


@bad("lost-result")
def sum_in_scratch(batch) -> None:
    scratch = torch.zeros_like(batch.x)
    scratch.add_(batch.x)


# steps that do something else each time, of which a graph would repeat the first


@bad("baked-value")
def growing_slice(batch) -> None:
    length = next(CONTEXTS)
    batch.y[:, : length % 8].add_(1.0)


@bad("baked-value")
def branch_on_python_state(batch) -> None:
    if next(COUNTER) % 2:
        batch.x.sin_()
    else:
        batch.x.cos_()


@bad("baked-value")
def loop_of_growing_length(batch) -> None:
    for _ in range(next(CONTEXTS)):
        batch.x.add_(1.0)


@bad("baked-value")
def position_in_arange(batch) -> None:
    start = next(CONTEXTS)
    batch.y.add_(torch.arange(start, start + 8))


@bad("baked-value")
def number_written_by_index(batch) -> None:
    batch.x[0] = float(next(COUNTER))


@bad("baked-value")
def chosen_slot(batch) -> None:
    chosen = batch.x if next(COUNTER) % 2 else batch.y
    chosen.add_(1.0)


@bad("baked-value")
def skipped_step(batch) -> None:
    if next(COUNTER) % 2:
        return
    batch.x.add_(1.0)


bad(
    "baked-value",
    counter=lambda batch: batch.x.mul_(float(next(COUNTER))),
    clock=lambda batch: batch.x.add_(time.perf_counter()),
    host_random=lambda batch: batch.x.mul_(random.random()),
    fill_value=lambda batch: batch.y.copy_(torch.full((8,), float(next(COUNTER)))),
    chosen_row=lambda batch: batch.y[next(COUNTER) % 4].add_(1.0),
)
