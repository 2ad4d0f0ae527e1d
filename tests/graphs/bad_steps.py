"""Steps that a graph would replay wrongly, each with the kind of its hazard."""

import time
from collections.abc import Callable

import numpy
import torch
from step_buffers import WEIGHT

from graphdecode.kernels.native.optional_triton import tl, triton

BAD_STEPS: dict[str, tuple[Callable, str]] = {}
OUTSIDE = torch.ones(4, 8)
OUTSIDE_LIST = [torch.ones(4, 8)]


@triton.jit
def unregistered_kernel(x, BLOCK: tl.constexpr):
    """Negate, launched by nobody's operator."""
    offsets = tl.arange(0, BLOCK)
    tl.store(x + offsets, -tl.load(x + offsets))


def bad(kind: str) -> Callable[[Callable], Callable]:
    """Add a step to the corpus."""

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
def to_int(batch) -> None:
    batch.x[: int(batch.n[0])].zero_()


@bad("host-read")
def to_float(batch) -> None:
    batch.x.mul_(float(batch.y[0, 0]))


@bad("host-read")
def to_list(batch) -> None:
    for value in batch.n.tolist():
        batch.x.add_(value)


@bad("host-read")
def to_numpy(batch) -> None:
    batch.x.mul_(float(batch.y.numpy().sum()))


@bad("host-read")
def printing(batch) -> None:
    print("logits", batch.x)


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
def python_max(batch) -> None:
    batch.y.copy_(max(batch.x[0, 0], batch.x[0, 1]))


@bad("host-read")
def membership(batch) -> None:
    if 1 in batch.n:
        batch.x.zero_()


@bad("data-dependent-shape")
def boolean_mask(batch) -> None:
    batch.y.add_(batch.x[batch.flag].sum())


@bad("data-dependent-shape")
def nonzero(batch) -> None:
    rows = batch.flag.nonzero()
    batch.y.add_(rows.sum())


@bad("data-dependent-shape")
def unique(batch) -> None:
    batch.y.add_(torch.unique(batch.n).sum())


@bad("data-dependent-shape")
def where_of_one(batch) -> None:
    (rows,) = torch.where(batch.flag)
    batch.y.add_(rows.sum())


@bad("data-dependent-shape")
def masked_select(batch) -> None:
    batch.y.add_(torch.masked_select(batch.x, batch.flag[:, None]).sum())


@bad("data-dependent-shape")
def repeat_interleave(batch) -> None:
    batch.y.add_(torch.repeat_interleave(batch.n, batch.n.abs() + 1).sum())


@bad("data-dependent-shape")
def mask_assignment(batch) -> None:
    batch.x[batch.flag] = batch.y[batch.flag]


@bad("data-dependent-shape")
def bincount(batch) -> None:
    batch.y.add_(torch.bincount(batch.ids.clamp(0, 3)).sum())


@bad("host-data")
def tensor_from_list(batch) -> None:
    batch.x.add_(torch.tensor([1.0] * 8))


@bad("host-data")
def tensor_from_scalar(batch) -> None:
    batch.x.mul_(torch.tensor(0.5))


@bad("host-data")
def as_tensor(batch) -> None:
    batch.x.add_(torch.as_tensor([2.0] * 8))


@bad("host-data")
def time_as_tensor(batch) -> None:
    batch.x.add_(torch.tensor(time.time()))


@bad("undeclared-input")
def global_tensor(batch) -> None:
    batch.x.add_(OUTSIDE)


@bad("undeclared-input")
def list_of_tensors(batch) -> None:
    for tensor in OUTSIDE_LIST:
        batch.x.add_(tensor)


@bad("undeclared-input")
def writes_to_a_stranger(batch) -> None:
    OUTSIDE.copy_(batch.x)


@bad("undeclared-input")
def from_numpy(batch) -> None:
    batch.x.add_(torch.from_numpy(OUTSIDE.numpy() * 1.0))


@bad("torch-rng")
def dropout(batch) -> None:
    batch.y.copy_(torch.dropout(batch.x, 0.5, train=True))


@bad("torch-rng")
def multinomial(batch) -> None:
    batch.ids.copy_(torch.multinomial(batch.x.abs() + 1e-3, 1)[:, 0])


@bad("torch-rng")
def noise(batch) -> None:
    batch.x.add_(torch.randn_like(batch.x))


@bad("torch-rng")
def exponential(batch) -> None:
    batch.y.exponential_()


@bad("constant-written")
def weight_update(batch) -> None:
    WEIGHT.mul_(1.0)


@bad("constant-written")
def weight_slice_written(batch) -> None:
    WEIGHT[0].copy_(WEIGHT[1])


@bad("moved")
def rebinding(batch) -> None:
    batch.x = batch.x * 2.0


@bad("moved")
def resizing(batch) -> None:
    torch.empty(0).resize_(4, 8).copy_(batch.x)


@bad("moved")
def setting_data(batch) -> None:
    scratch = torch.empty(4, 8)
    scratch.set_(batch.x)


@bad("unregistered-launch")
def bare_triton_launch(batch) -> None:
    unregistered_kernel[(1,)](batch.x, BLOCK=32)


@bad("failed")
def raises(batch) -> None:
    raise ValueError("the step's own mistake")


@torch.library.custom_op("graphdecode_tests::total", mutates_args=())
def total(x: torch.Tensor) -> float:
    """Return a number: the host has to wait for it."""
    return float(x.sum())


MODULE = torch.nn.Linear(8, 8)
HALF = WEIGHT.half()
LAZY: dict[str, torch.Tensor] = {}
CARRIED = [torch.zeros(4, 8)]


@bad("host-read")
def to_cpu(batch) -> None:
    batch.x.add_(batch.y.cpu())


@bad("host-read")
def to_cpu_by_name(batch) -> None:
    batch.x.add_(batch.y.to("cpu"))


@bad("host-read")
def as_array(batch) -> None:
    numpy.asarray(batch.n)


@bad("host-read")
def range_of_a_tensor(batch) -> None:
    for _ in range(batch.n[0]):
        batch.x.add_(1.0)


@bad("host-read")
def slice_by_a_tensor(batch) -> None:
    batch.x[: batch.n[0]].zero_()


@bad("host-read")
def sorting(batch) -> None:
    sorted(batch.x[0, :3])


@bad("host-read")
def operator_that_returns_a_number(batch) -> None:
    batch.x.mul_(total(batch.y))


@bad("host-read")
def conditional_expression(batch) -> None:
    batch.x.mul_(2.0 if batch.flag[0] else 1.0)


@bad("data-dependent-shape")
def numbers_written_under_a_mask(batch) -> None:
    batch.x[batch.flag] = batch.y[0]


@bad("data-dependent-shape")
def argwhere(batch) -> None:
    batch.y.add_(torch.argwhere(batch.flag).sum())


@bad("host-data")
def list_as_index(batch) -> None:
    batch.y[:2].copy_(batch.x[[0, 1]])


@bad("undeclared-input")
def module_that_nobody_declared(batch) -> None:
    batch.y.copy_(MODULE(batch.x))


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
def bernoulli(batch) -> None:
    batch.flag.copy_(torch.bernoulli(batch.x.abs().clamp(0, 1)[:, 0]))


@bad("torch-rng")
def attention_with_dropout(batch) -> None:
    q = batch.x.view(1, 1, 4, 8)
    batch.y.copy_(torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)[0, 0])


@bad("constant-written")
def constant_as_out(batch) -> None:
    torch.add(batch.x[0], 1.0, alpha=2, out=WEIGHT[0])


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


@bad("raw-pointer")
def address(batch) -> None:
    batch.x.data_ptr()


@bad("moved")
def slot_reshaped_in_place(batch) -> None:
    batch.x.unsqueeze_(0)


@bad("torch-rng")
def bernoulli_by_tensor(batch) -> None:
    batch.y.bernoulli_(batch.x.clamp(0, 1))


@bad("torch-rng")
def permutation(batch) -> None:
    batch.y.copy_(batch.x[torch.randperm(batch.size)])


@bad("host-read")
def multi_element_branch_by_all(batch) -> None:
    batch.y.add_(1.0 if torch.all(batch.flag) else 0.0)


@bad("undeclared-input")
def weight_that_was_converted(batch) -> None:
    batch.y.copy_(batch.x.half() @ HALF)
