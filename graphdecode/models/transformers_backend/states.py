"""Recurrent states of transformers' modules: what a module takes as its cache, over rows of our tensors.

A module asks its cache for a layer's convolution and recurrent states, and advances them by one token per row, in
place. It cannot take chunks: padding would advance a state, and some modules (Mamba's, Jamba's) begin a chunk with
zeros. So a mixer, the submodule that asks for states, runs once for each step of `Tokens.steps`, with one token per
row. All other modules run over the whole pass at once.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphdecode.cache import LayerState, stateful
from graphdecode.models.config import UnsupportedModelError
from graphdecode.models.forward_context import StateStep, Tokens

Shape = tuple[int, ...]


def inputs_of(module: nn.Module, ids: Tensor, positions: Tensor, cache: "PassCache | None") -> dict[str, Any]:
    """Return the arguments of a causal decoder for ids and positions [t], as one row; None: it has no states."""
    names = inspect.signature(module.forward).parameters
    inputs: dict[str, Any] = {"input_ids": ids[None], "use_cache": cache is not None}
    if cache is None or "position_ids" in names:
        inputs["position_ids"] = positions[None]
    if cache is not None:
        inputs["cache_params" if "cache_params" in names else "past_key_values"] = cache
    return inputs


class PassCache:
    """A cache for one pass, with the methods of transformers' `Cache`; our attention keeps keys and values."""

    def __init__(self) -> None:
        self._layer: int | None = None

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values unchanged, and remember their layer."""
        self._layer = layer_idx
        return keys, values

    def attending(self, layer: int) -> int:
        """Return the layer that attends now, given its module's number, which is wrong if layers share a module."""
        current, self._layer = layer if self._layer is None else self._layer, None
        return current

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are given."""
        return 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return length and offset of the mask, which only a probe makes."""
        return query_length, 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: states cannot go back."""
        return False


class StateProbe(PassCache):
    """Finds a module's states and mixers in a step of one token without weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.shapes: dict[int, dict[str, Shape]] = {}  # layer -> name of a state -> its shape for one row
        self.mixers: set[str] = set()  # paths of the modules that asked for states
        self.called: set[str] = set()  # paths of all modules that ran
        self._running: list[str] = []
        for path, part in module.named_modules():
            part.register_forward_pre_hook(partial(self._enter, path))
            part.register_forward_hook(self._leave)

    def _enter(self, path: str, *_: Any) -> None:
        self._running.append(path)
        self.called.add(path)

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: this is the first token."""
        self.mixers.add(self._running[-1])

    get_recurrent_state = get_conv_state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return False: this is the first token."""
        return False

    def update_conv_state(
        self, states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Return inputs of a convolution [1, channels, tokens] after zeros."""
        width = conv_kernel_size or states.shape[-1]
        self._record(layer_idx, f"conv_{state_idx}", (*states.shape[1:-1], width))
        return nn.functional.pad(states, (width - states.shape[-1], 0))

    def update_recurrent_state(self, states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Return the states."""
        self._record(layer_idx, f"recurrent_{state_idx}", tuple(states.shape[1:]))
        return states

    def _record(self, layer: int, name: str, shape: Shape) -> None:
        self.mixers.add(self._running[-1])
        self.shapes.setdefault(layer, {})[name] = shape


class ModuleStates(PassCache):
    """The states of a module's layers, rows of our tensors; `mixers` are the modules that ask for them.

    A mixer runs once for each step of the tokens. States are loaded when it asks for them, and stored after it ran.
    """

    def __init__(self, module: nn.Module, mixers: Sequence[str], dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._caches: Sequence[LayerState] = ()
        self._steps: list[StateStep] = []
        self._step: StateStep | None = None  # whose mixer runs
        self._loaded: dict[tuple[int, str], Tensor] = {}
        for path in mixers:
            mixer: Any = module.get_submodule(path)
            mixer.forward = partial(self._run, mixer.forward)

    def begin(self, tokens: Tokens, caches: Sequence[LayerState]) -> None:
        """Take the tokens of a pass, and the states of all layers."""
        self._caches, self._layer = caches, None
        self._steps = list(tokens.steps(next(states for states in stateful(caches) if states.tensors)))

    def _run(self, forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Run a mixer over the tokens of the pass, [1, t, ...] in its arguments and results, step by step."""
        tensors = [value for value in (*args, *keywords.values()) if isinstance(value, Tensor)]
        count, results = tensors[0].shape[1], []
        for step in self._steps:
            self._step = step
            rows = partial(_rows, count=count, at=step.at)
            results.append(forward(*map(rows, args), **{name: rows(value) for name, value in keywords.items()}))
            for (layer, name), values in self._loaded.items():
                step.store(self._tensor(layer, name), values)
            self._loaded.clear()
        self._step = None
        if not isinstance(results[0], tuple):
            return self._joined(results, count)
        return tuple(
            self._joined(parts, count) if isinstance(parts[0], Tensor) else parts[0]
            for parts in zip(*results, strict=True)
        )

    def _joined(self, parts: Sequence[Tensor], count: int) -> Tensor:
        """Return the steps' results [n, 1, ...] as [1, t, ...]."""
        joined = parts[0].new_empty((1, count, *parts[0].shape[2:]))
        for step, part in zip(self._steps, parts, strict=True):
            joined[0, step.at].copy_(part[:, 0])
        return joined

    def _tensor(self, layer: int, name: str) -> Tensor:
        (states,) = stateful([self._caches[layer]])
        return states.tensors[name]

    def _load(self, layer: int, name: str, dtype: torch.dtype) -> Tensor:
        if self._step is None:
            raise UnsupportedModelError(f"layer {layer} asks for its states outside of a mixer")
        if (layer, name) not in self._loaded:
            self._loaded[layer, name] = self._step.load(self._tensor(layer, name)).to(dtype)
        return self._loaded[layer, name]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return the last inputs of a convolution before each token of the step, [n, channels, width]."""
        return self._load(layer_idx, f"conv_{state_idx}", self._dtype)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the recurrent states before each token of the step, float32 [n, ...]; None: the layer has none."""
        name = f"recurrent_{state_idx}"
        (states,) = stateful([self._caches[layer_idx]])
        return self._load(layer_idx, name, torch.float32) if name in states.tensors else None

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return True: before a first token it is zeros."""
        return True

    def update_conv_state(self, states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Return the last inputs, followed by new ones [n, channels, 1], and keep the last of these."""
        previous = self.get_conv_state(layer_idx, state_idx)
        joined = torch.cat((previous, states), dim=-1)
        previous.copy_(joined[..., -previous.shape[-1] :])
        return joined

    def update_recurrent_state(self, states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep the states [n, ...] after the tokens."""
        return self._load(layer_idx, f"recurrent_{state_idx}", torch.float32).copy_(states)


def _rows(value: Any, count: int, at: slice) -> Any:
    """Return some tokens of an argument [1, t, ...] as rows of one token [n, 1, ...]; other arguments unchanged."""
    if isinstance(value, tuple):
        return tuple(_rows(part, count, at) for part in value)
    is_tokens = isinstance(value, Tensor) and value.shape[:2] == (1, count)
    return value[0, at][:, None] if is_tokens else value


def location_in(error: BaseException) -> str:
    """Return file and line of transformers in an error's traceback."""
    location, trace = "", error.__traceback__
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if "transformers" in file.parts[:-1] or file.name.startswith("modeling_"):
            location = f"{file.name}:{trace.tb_lineno}: "
        trace = trace.tb_next
    return location
