"""Which keys a layer's queries see: read from the mask that transformers makes for its own attention.

A module's keywords do not say it: some pass a window to attention and mask more, others mask what they do not pass.
While a module is probed, transformers' `AttentionMaskInterface` calls `code_of_mask` in place of its own functions.
What it returns takes the mask's way to attention, and says there what the mask was.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphdecode.graphs.inspect.observer import TorchDispatchMode, mapped, tensors_of
from graphdecode.models.fields import UnsupportedModelError

_MASKS = "graphdecode_masks"  # the attribute of a configuration that holds the masks made for it
_OTHERWISE = 2**20  # positions of a model that names no number of them
_DENSE = 130  # first positions, each of which is compared
_SAMPLED = 48

# transformers' mask functions: whether a query sees a key, by batch, head, and positions of query and key
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Visible(NamedTuple):
    """The keys before its own that a query sees; see `AttentionOptions`."""

    window_left: int = -1
    is_chunked: bool = False

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether queries see keys, given their positions, which are broadcast."""
        is_visible = keys <= queries
        if self.window_left < 0:
            return is_visible
        size = self.window_left + 1
        in_window = keys // size == queries // size if self.is_chunked else keys > queries - size
        return is_visible & in_window


def code_of_mask(*, mask_function: MaskFunction, config: Any, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
    """Return a mask that `visible_of` reads, [1, 1, 1, 1]; a function of transformers' `AttentionMaskInterface`.

    Raises:
        UnsupportedModelError: the mask is neither causal nor that of a window or chunks.
    """
    if attention_mask is not None and (attention_mask.is_meta or not attention_mask.all()):
        raise UnsupportedModelError("its attention masks tokens by what they are, which this runtime does not")
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or _OTHERWISE
    visible = _visible(mask_function, longest)
    vars(config).setdefault(_MASKS, set()).add(visible)
    return torch.full((1, 1, 1, 1), 2 * visible.window_left + visible.is_chunked, dtype=torch.int64, device="cpu")


def probed_masks(module: nn.Module) -> set[Visible]:
    """Return all masks that were made in the probe of a module."""
    configs = (getattr(part, "config", None) for part in module.modules())
    return {visible for config in configs for visible in getattr(config, _MASKS, ())}


def visible_of(mask: Tensor | None) -> Visible | None:
    """Return what the mask that attention got says, None if the module has changed it; no mask: causal order."""
    if mask is None:
        return Visible()
    if mask.is_meta or mask.dtype is not torch.int64 or not mask.numel():
        return None
    window, is_chunked = divmod(int(mask.flatten()[0]), 2)
    return Visible(window, bool(is_chunked))


def _visible(mask_function: MaskFunction, longest: int) -> Visible:
    """Return what a mask function lets queries of all positions below `longest` see."""
    zero = torch.zeros((), dtype=torch.int64)

    def sees(queries: Tensor, keys: Tensor) -> Tensor:
        return mask_function(zero, zero, queries, keys).expand(torch.broadcast_shapes(queries.shape, keys.shape))

    try:
        sees_first = sees(torch.arange(longest), zero)
        hidden = sees_first.logical_not().nonzero()
        size = int(hidden[0]) if len(hidden) else 0  # the first position that does not see the first
        positions = _compared(size, longest)
        actual = sees(positions[:, None], positions)
    except (IndexError, RuntimeError) as error:  # it reads tensors of the module's inputs
        raise UnsupportedModelError(f"attention masks tokens by more than their positions: {error}") from error
    for visible in (Visible(size - 1), Visible(size - 1, is_chunked=True)) if size else (Visible(),):
        expected = visible.mask(positions[:, None], positions)
        if torch.equal(actual, expected):
            return visible
    query, key = (int(positions[at]) for at in (actual != expected).nonzero()[0])
    verb = "does not see" if expected[positions == query, positions == key] else "sees"
    supported = f"a window or chunks of {size} tokens" if size else "causal order"
    raise UnsupportedModelError(
        f"attention has neither causal order nor windows nor chunks: beside {supported}, position "
        f"{query} {verb} position {key}"
    )


def _compared(size: int, longest: int) -> Tensor:
    """Return positions below `longest`: the first and last, some between them, and those around borders of windows."""
    some = [*range(_DENSE), longest - 1, *(longest * part // _SAMPLED for part in range(_SAMPLED))]
    near = {position + times * size + step for position in some for times in (-1, 0, 1, 2) for step in (-1, 0, 1)}
    return torch.tensor(sorted(position for position in near if 0 <= position < longest))


class WithoutWeights(TorchDispatchMode):
    """Runs a module on the meta device, but what does not depend on weights, such as positions, on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._overwritten: dict[int, Tensor] = {}  # by address: tensors of a CPU that got values of the meta device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator: on the meta device if any input has no values."""
        inputs, device = (args, kwargs or {}), "cpu"
        tensors = tensors_of(inputs)
        if any(tensor.is_meta or _address(tensor) in self._overwritten for tensor in tensors):
            if func._schema.is_mutable:
                self._overwritten |= {_address(tensor): tensor for tensor in tensors[:1] if not tensor.is_meta}
            inputs = mapped(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, inputs)
            device = "meta"
        args, kwargs = inputs
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": torch.device(device)}
        return func(*args, **kwargs)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
