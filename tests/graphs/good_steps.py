"""Steps that a graph replays rightly."""

from collections.abc import Callable

import torch
from step_buffers import COMPRESSED, PACKED, QUANTIZED, SPARSE, TABLE, WEIGHT
from torch.utils._pytree import tree_map

from graphdecode.kernels.model.embedding import embedding
from graphdecode.kernels.norm.rms_norm import rms_norm

GOOD_STEPS: dict[str, Callable] = {}


def good(step: Callable) -> Callable:
    """Add a step to the corpus."""
    GOOD_STEPS[step.__name__] = step
    return step


@good
def factories(batch) -> None:
    rows = torch.arange(batch.size)
    ones, zeros, full = torch.ones(8), torch.zeros(8), torch.full((8,), 0.5)
    batch.y.copy_(torch.where((rows < batch.live_rows)[:, None], ones + full, zeros))


@good
def loop_of_fixed_length(batch) -> None:
    hidden = batch.x
    for _ in range(3):
        hidden = torch.tanh(hidden @ WEIGHT)
    batch.y.copy_(hidden)


@good
def shape_branch(batch) -> None:
    if batch.x.shape[0] >= 2:
        batch.y.copy_(batch.x)


@good
def several_outputs(batch) -> None:
    values, places = torch.topk(batch.x, 3)
    batch.y[:, :3].copy_(values + places)


@good
def device_named_elsewhere(batch) -> None:
    """A step that follows its tensors: where they live, its own line does not say."""
    batch.y.add_(batch.x.to(str(batch.y.device)))


@torch.library.custom_op("graphdecode_tests::append", mutates_args={"total"})
def append(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Write into one tensor and return another."""
    total.add_(x)
    return total * 2.0


@good
def numbers_written_by_index(batch) -> None:
    batch.x[:, 0] = 1.0
    batch.n[-1] = 3
    batch.flag[0] = True


@good
def number_written_under_a_mask(batch) -> None:
    batch.x[batch.flag] = 0.0


@good
def augmented_assignment(batch) -> None:
    batch.x += batch.y
    batch.x *= 0.5


@good
def attention(batch) -> None:
    q = batch.x.view(1, 1, 4, 8)
    batch.y.copy_(torch.nn.functional.scaled_dot_product_attention(q, q, q)[0, 0])


@good
def scratch_on_the_batch(batch) -> None:
    batch.hidden = batch.x * 2.0
    batch.y.copy_(batch.hidden)


@good
def written_into_scratch(batch) -> None:
    scratch = torch.empty_like(batch.x)
    torch.mul(batch.x, batch.y, out=scratch)
    batch.y.copy_(scratch)


@good
def loop_over_rows(batch) -> None:
    for row in batch.x.unbind(0):
        row.add_(1.0)


@good
def scratch_reshaped_in_place(batch) -> None:
    scratch = batch.x * 2.0
    scratch.transpose_(0, 1).unsqueeze_(0).mul_(3.0)
    batch.y.copy_(scratch[0].t())


class Doubled(torch.Tensor):
    """A wrapper of half its value, which computes by operators of its own."""

    half: torch.Tensor

    @staticmethod
    def __new__(cls, half: torch.Tensor) -> "Doubled":
        made = torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype)
        made.half = half
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Compute with the whole value."""
        args, kwargs = tree_map(lambda leaf: leaf.half * 2 if isinstance(leaf, Doubled) else leaf, (args, kwargs or {}))
        return func(*args, **kwargs)


class Named(torch.Tensor):
    """A plain subclass."""


DOUBLED = Doubled(WEIGHT)


def pairs(batch) -> torch.Tensor:
    """Return `x` as 16 complex numbers of the step's own."""
    return torch.view_as_complex(batch.x.view(-1, 4, 2)) * 1


@good
def conjugate_of_an_intermediate(batch) -> None:
    batch.y[:, :4].copy_(pairs(batch).conj().clone().imag)


@good
def conjugate_written(batch) -> None:
    numbers = pairs(batch)
    numbers.conj().mul_(1j)
    batch.y[:, :4].copy_(numbers.real)


@good
def conjugate_as_out(batch) -> None:
    numbers = torch.empty(4, 4, dtype=torch.complex64)
    torch.mul(pairs(batch), 2j, out=numbers.conj())
    batch.y[:, :4].copy_(numbers.imag)


@good
def product_of_jagged_rows(batch) -> None:
    rows = torch.nested.nested_tensor_from_jagged(batch.x, torch.arange(0, 5, 2))
    batch.y.copy_((rows * 2).values())


GOOD_STEPS |= {
    "negative_of_an_intermediate": lambda batch: batch.y[:, :4].copy_(pairs(batch).conj().imag.clone() * 2),
    "conjugate_of_a_slot": lambda batch: batch.y[:, :4].copy_(
        (torch.view_as_complex(batch.x.view(-1, 4, 2)).conj() * 2).imag
    ),
    "conjugate_resolved": lambda batch: batch.y.copy_(
        torch.view_as_real(pairs(batch).conj().resolve_conj()).flatten(1)
    ),
    "spectrum": lambda batch: batch.y.copy_(torch.fft.irfft(torch.fft.rfft(batch.x).conj())),
    "loss_that_computes_in_its_output": lambda batch: batch.y.add_(
        torch.nn.functional.binary_cross_entropy(batch.x.sigmoid(), batch.y.sigmoid())
    ),
    "split_by_a_number": lambda batch: batch.y[:2].copy_(batch.x.tensor_split(2)[0]),
    "sparse_constant": lambda batch: batch.y.copy_(torch.sparse.mm(SPARSE, batch.x.t()).t()),
    "parts_of_a_sparse_constant": lambda batch: batch.y.copy_(batch.x * SPARSE.values()),
    "compressed_constant": lambda batch: batch.y.copy_((COMPRESSED @ batch.x.t()).t()),
    "packed_constant": lambda batch: batch.y.copy_(PACKED.to_dense() + batch.x),
    "quantized_constant": lambda batch: batch.y.copy_(QUANTIZED.dequantize() + batch.x),
    "wrapper_constant": lambda batch: batch.y.copy_(batch.x @ DOUBLED),
    "wrapper_of_an_intermediate": lambda batch: batch.y.copy_(Doubled(batch.x + 1) * 3),
    "plain_subclass": lambda batch: batch.y.copy_(batch.x.as_subclass(Named) * 2),
    "tensor_without_memory": lambda batch: batch.y.copy_(batch.x * torch.empty(3, device="meta").numel()),
    "batched_by_vmap": lambda batch: batch.y.copy_(torch.vmap(lambda row: row.softmax(-1) * 2)(batch.x)),
    "derivative": lambda batch: batch.y.copy_(torch.func.grad(lambda x: (x * x).sum())(batch.x)),
    "in_place": lambda batch: batch.x.mul_(2.0).add_(1.0),
    "product": lambda batch: batch.y.copy_(batch.x @ WEIGHT.T),
    "masked": lambda batch: batch.x.mul_(torch.where(batch.n.sum() > 3, 2.0, 1.0)),
    "gather_by_index": lambda batch: batch.y.copy_(TABLE[batch.ids]),
    "scatter_by_index": lambda batch: batch.y.index_copy_(0, batch.ids.clamp(0, 3), batch.x),
    "masked_fill": lambda batch: batch.x.masked_fill_(batch.flag[:, None], 0.0),
    "own_operator": lambda batch: rms_norm(batch.y, batch.x, WEIGHT[0], 1e-5),
    "own_operator_that_reads_in_host_memory": lambda batch: embedding(batch.y, batch.ids, TABLE, batch.live_rows),
    "views": lambda batch: batch.x.view(-1, 4)[:, 1:3].transpose(0, 1).neg_(),
    "reductions": lambda batch: batch.y.copy_(torch.softmax(batch.x, -1).cumsum(-1) - batch.x.mean(-1, keepdim=True)),
    "dtype_changes": lambda batch: batch.y.copy_(
        batch.x.to(torch.bfloat16).float() + batch.n.to(torch.float32)[:, None]
    ),
    "concatenation": lambda batch: batch.y.copy_(torch.cat([batch.x[:, 4:], batch.x[:, :4]], dim=-1)),
    "operator_that_writes_and_returns": lambda batch: batch.x.copy_(append(batch.y, batch.x)),
    "dropout_of_a_model_in_eval": lambda batch: batch.y.copy_(
        torch.nn.functional.dropout(batch.x, 0.5, training=False)
    ),
    "cast_to_a_device_that_is_given": lambda batch: batch.x.add_(torch.arange(8).to(batch.x.device)),
    "keyword_arguments": lambda batch: torch.add(batch.x, batch.y, alpha=2, out=batch.y),
    "step_that_reads_nothing": lambda batch: batch.y.zero_(),
    "einsum": lambda batch: batch.y.copy_(torch.einsum("bi,oi->bo", batch.x, WEIGHT)),
}
