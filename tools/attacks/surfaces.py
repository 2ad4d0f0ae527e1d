"""Fuzzing of the surfaces' caches: random calls and arguments, compared with plain lists of tokens."""

from __future__ import annotations

import random
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attacks.border import RefusedCall, bits_of, called, spoiled
from attacks.mutation import hostile_value
from attacks.trial import Wrong
from graphdecode import CacheFullError, InferenceParams, SlotKVCacheManager

_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
_INTEGERS = {torch.int32, torch.int64}
_FORMATS = ("bshd", "sbhd", "thd")
_IDS = [0, 7, -3, 10**9, "a name", (1, 2), 2.5, None]


class SlotCacheAttack:
    """optimum-neuron's slot cache: every write is where its documentation says, and nowhere else."""

    name = "slot cache (optimum)"

    def run(self, rng: random.Random, folder: object) -> None:
        life = _SlotLife(rng)
        refused = 0
        for _ in range(rng.randrange(1, 10)):
            try:
                life.update()
            except RefusedCall as error:
                refused, last = refused + 1, error
            life.compare()
        if refused:
            raise last


class _SlotLife:
    """A cache, and plain tensors whose rows are written one by one."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._tiled = rng.random() < 0.15
        self._group = 1 if self._tiled or rng.random() < 0.7 else rng.randrange(2, 5)
        self._left = self._group == 1 and not self._tiled and rng.random() < 0.3
        length = 128 * rng.randrange(1, 3) if self._tiled else rng.randrange(1, 20)
        sizes = {name: rng.randrange(1, 4) for name in ("num_layers", "max_batch_size", "num_kv_heads", "head_dim")}
        arguments: dict[str, Any] = sizes | {
            "max_length": length, "dtype": rng.choice(_DTYPES), "device": "cpu", "tiled": self._tiled,
            "padding_side": "left" if self._left else "right", "num_cores_per_group": self._group,
            "continuous_batching": rng.random() < 0.8,
        }  # fmt: skip
        if rng.random() < 0.1:
            name = rng.choice(sorted([*sizes, "max_length", "dtype"]))
            arguments[name] = hostile_value(rng)
            if isinstance(arguments[name], int) and arguments[name] > 10**6:
                arguments[name] = 0  # valid, but too large for this machine
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._cache: SlotKVCacheManager = called(SlotKVCacheManager, arguments)
        self._continuous = arguments["continuous_batching"]
        self._sizes = {name: getattr(self._cache, name) for name in sizes}
        self._dtype = self._cache.dtype
        self._rank, self._places = rng.randrange(self._group), self._cache.length
        self._max_length = self._places * self._group
        self._exact = [self._seen(stored).clone() for stored in self._cache.past_key_values]

    def _seen(self, stored: Tensor) -> Tensor:
        """Return a stored tensor as [slots, heads, places, head_dim], without the garbage position."""
        wide = stored.flatten(2, 3) if self._tiled else stored
        return wide[:, :, : self._places]

    def update(self) -> None:
        """Write once; arguments may be invalid."""
        rng, slots = self._rng, self._sizes["max_batch_size"]
        encodes = rng.random() < 0.4
        rows = slots if encodes and not self._continuous else rng.randrange(1, slots + 1)
        masked = self._group > 1 and (not encodes or rng.random() < 0.7)
        most = self._max_length if masked else self._places
        tokens = rng.randrange(1, min(most, 6 if not encodes else most) + 1)
        new = [
            [torch.randn(rows, self._sizes["num_kv_heads"], tokens, self._sizes["head_dim"]).to(self._dtype)
             for _ in range(2)]
            for _ in range(self._sizes["num_layers"])
        ]  # fmt: skip
        if rng.random() < 0.1:
            new[0][0].view(-1)[0] = rng.choice([float("nan"), float("inf")])
        index, mask_dtype = rng.choice([torch.int32, torch.int64]), rng.choice([torch.bool, torch.int32])
        seq_ids = rng.sample(range(-1, slots + 2), rows)
        positions = [rng.sample(range(-2, most + 3), tokens) for _ in range(rows)]
        mask = [[place % self._group == self._rank for place in row] for row in positions]
        as_tensors: dict[str, Any] = {
            "is_for_context_encoding": encodes,
            "seq_ids": torch.tensor(seq_ids, dtype=index),
            "position_ids": torch.tensor(positions, dtype=index),
            "new_key_values": new,
            "seq_len": rng.choice([1, most, 10**6]),
            "active_mask": torch.tensor(mask).to(mask_dtype) if masked else None,
        }
        if not masked and encodes and rng.random() < 0.5:
            as_tensors["position_ids"] = None
        elif rng.random() < 0.2:
            as_tensors["scatter_index"] = torch.zeros_like(as_tensors["position_ids"])  # without effect
        if encodes and not masked:  # tokens at consecutive positions
            positions = [list(range(tokens))] * rows
        if encodes and self._continuous is False:
            seq_ids = list(range(rows))
        name = None
        if rng.random() < 0.3:
            name = rng.choice(sorted(as_tensors.keys() - {"scatter_index", "is_for_context_encoding"}))
            if name == "new_key_values" and rng.random() < 0.7:
                layer = rng.randrange(len(new))
                new = [list(pair) for pair in new]
                new[layer][rng.randrange(2)] = spoiled(rng, new[layer][0])
                as_tensors[name] = new
            else:
                good, as_tensors[name] = as_tensors[name], spoiled(rng, as_tensors[name])
                is_length = name == "seq_len" and isinstance(as_tensors[name], int) and as_tensors[name] >= 1
                if is_length or as_tensors[name] is None or _means_the_same(as_tensors[name], good, name):
                    as_tensors[name], name = good, None
        called(self._cache.update_cache, as_tensors, lambda: list(self._cache.past_key_values))
        if name is not None and not all(_means_the_same(each, new[0][0], name) for pair in new for each in pair):
            raise Wrong(f"{name}={as_tensors[name]!r:.300} is accepted")
        self._write(encodes, seq_ids, positions, mask if masked else None, new)

    def _write(
        self, encodes: bool, seq_ids: list[int], positions: list[list[int]], mask: list[list[bool]] | None, new: Any
    ) -> None:
        for exact, values in zip(self._exact, [each for pair in new for each in pair], strict=True):
            for row, slot in enumerate(seq_ids):
                if not 0 <= slot < len(exact):
                    continue
                tokens = values.shape[2]
                if self._left and not encodes:
                    exact[slot] = torch.cat([exact[slot], values[row]], 1)[:, tokens:]
                    continue
                for token in range(tokens):
                    place = positions[row][token]
                    if self._left:
                        place = self._places - tokens + token
                    if mask is not None:
                        if not mask[row][token]:
                            continue
                        place //= self._group
                    if 0 <= place < self._places:
                        exact[slot, :, place] = values[row, :, token]

    def compare(self) -> None:
        """Compare all stored tensors, and a step's view of them."""
        wanted = self._rng.randrange(1, self._places + 1)
        views = [each for pair in self._cache.get_cache(wanted) for each in pair]
        for number, (stored, view, exact) in enumerate(
            zip(self._cache.past_key_values, views, self._exact, strict=True)
        ):
            if not torch.equal(bits_of(self._seen(stored)), bits_of(exact)):
                raise Wrong(f"tensor {number} of {self._cache!r} differs from what was written")
            part = exact[:, :, self._places - wanted :] if self._left else exact[:, :, :wanted]
            if not torch.equal(bits_of(view), bits_of(part)):
                raise Wrong(f"the view of {wanted} positions of tensor {number} of {self._cache!r} is wrong")


def _means_the_same(value: Any, good: Any, name: str) -> bool:
    """Return whether the cache also accepts a tensor's shape, type and device."""
    if not isinstance(value, Tensor) or not isinstance(good, Tensor) or value.device != good.device:
        return False
    fits = name == "active_mask" or value.dtype == good.dtype or {value.dtype, good.dtype} == _INTEGERS
    return fits and value.shape == good.shape


class InferenceParamsAttack:
    """TransformerEngine's cache: attention finds every token, whatever sequences are added and removed."""

    name = "InferenceParams (TE)"

    def run(self, rng: random.Random, folder: object) -> None:
        life, last = _SequenceLife(rng), None
        for _ in range(rng.randrange(1, 16)):
            try:
                life.act()
            except RefusedCall as error:
                last = error
            life.compare()
        if last is not None:
            raise last


class _SequenceLife:
    """A cache, and lists of tokens: token t has key t and value -t; None was never written."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._paged = rng.random() < 0.6
        arguments: dict[str, Any] = {
            "max_batch_size": rng.randrange(1, 5), "max_sequence_length": rng.randrange(1, 30),
            "num_heads_kv": rng.randrange(1, 3), "head_dim_k": rng.randrange(1, 5), "dtype": torch.float32,
            "head_dim_v": rng.randrange(1, 5), "is_paged": self._paged, "device": "cpu",
            "qkv_format": rng.choice(_FORMATS),
        }  # fmt: skip
        if self._paged:
            arguments |= {"total_num_pages": rng.randrange(1, 20), "page_size": rng.randrange(1, 9)}
        if rng.random() < 0.1:
            name = rng.choice(sorted(arguments.keys() - {"device", "is_paged"}))
            arguments[name] = hostile_value(rng)
            if isinstance(arguments[name], int) and arguments[name] > 10**6:
                arguments[name] = 0  # valid, but too large for this machine
        self._params: InferenceParams = called(InferenceParams, arguments)
        self._rows, self._length = self._params.max_batch_size, self._params.max_sequence_length
        self._params.allocate_memory(1)
        self._tokens: OrderedDict[Any, list[int | None]] = OrderedDict()
        self._order: list[Any] = []  # of rows, after the last step
        self._pages: dict[Any, list[int]] = {}
        self._last = self._fresh = 0
        self._missing = False  # a step was prepared, but not done

    def _watched(self) -> list[Tensor]:
        return list(self._params.tensors().values())

    def act(self) -> None:
        """Do one random operation."""
        kind = self._rng.choice(["step", "step", "step", "decode", "fork", "truncate", "reset", "spoiled"])
        if self._missing and kind in ("fork", "truncate"):
            kind = "step"
        getattr(self, f"_{kind}")()

    def _reset(self) -> None:
        self._params.reset()
        self._tokens.clear()
        self._pages.clear()
        self._order, self._missing = [], False

    def _decode(self) -> None:
        self._advance(OrderedDict.fromkeys(self._tokens, 1))

    def _step(self) -> None:
        rng = self._rng
        staying = rng.sample(list(self._tokens), len(self._tokens))[rng.choice([0, 0, 0, 1, 2]) :]
        new = [each for each in rng.sample(_IDS, rng.randrange(3)) if each not in staying]
        ids = rng.choice([new + staying, staying + new])
        self._advance(OrderedDict((each, rng.choice([1, 1, 2, 5])) for each in ids))

    def _advance(self, steps: OrderedDict[Any, int]) -> None:
        before = {each: len(self._tokens.get(each, ())) for each in steps}
        pages = self._needed({each: before[each] + count for each, count in steps.items()})
        fits = len(steps) <= self._rows and all(before[each] + count <= self._length for each, count in steps.items())
        try:
            called(self._params.pre_step, {"step_dict": steps}, self._watched)
        except RefusedCall as error:
            is_full = isinstance(error.__cause__, CacheFullError)
            if fits and not (is_full and pages is None):
                raise Wrong(f"{steps} is refused: {error}") from error
            raise
        if not fits or pages is None:
            raise Wrong(f"{steps} is accepted by {self._params!r}")
        self._pages, self._order = pages, list(steps)
        self._tokens = OrderedDict((each, self._tokens.get(each, []) + [None] * steps[each]) for each in steps)
        self._compare_lengths(before, steps)
        self._missing = True
        if self._rng.random() < 0.9:
            self._write(steps)

    def _needed(self, lengths: dict[Any, int]) -> dict[Any, list[int]] | None:
        """Return the pages that only these sequences own; None if there are too few."""
        if not self._paged:
            return {}
        size, pages = self._params.page_size or 1, {each: list(self._pages.get(each, ())) for each in lengths}
        for each, length in lengths.items():
            while len(pages[each]) * size < length:
                self._fresh += 1
                pages[each].append(self._fresh)
        return pages if self._count(pages) else None

    def _count(self, pages: dict[Any, list[int]]) -> bool:
        """Return whether a number of pages is free."""
        return len({page for owned in pages.values() for page in owned}) <= (self._params.total_num_pages or 0)

    def _new(self, steps: OrderedDict[Any, int], form: str) -> tuple[Tensor, Tensor]:
        """Return keys and values of the last tokens, NaN without a token."""
        rows = [self._tokens[each][-count:] for each, count in steps.items()]
        pad = self._rng.randrange(3)
        if form == "thd":
            flat = [token for row in rows for token in row if token is not None]
            codes = torch.tensor(flat + [torch.nan] * pad, dtype=torch.float32)
        else:
            width = max(map(len, rows), default=1) + pad
            codes = torch.full((min(len(rows) + pad, self._rows), width), torch.nan)
            for row, tokens in enumerate(rows):
                codes[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.float32)
            codes = codes.T if form == "sbhd" else codes
        params = self._params
        shape = (*codes.shape, params.num_heads_kv)
        keys, values = (codes[..., None, None].expand(*shape, dim) for dim in (params.head_dim_k, params.head_dim_v))
        return keys, -values

    def _write(self, steps: OrderedDict[Any, int]) -> None:
        for each, count in steps.items():
            self._tokens[each][-count:] = range(self._last + 1, self._last + 1 + count)
            self._last += count
        form = self._rng.choice(_FORMATS)
        keys, values = self._new(steps, form)
        self._params.step(1, keys, values, form)
        self._missing = False

    def _compare_lengths(self, before: dict[Any, int], steps: OrderedDict[Any, int]) -> None:
        rest = [0] * (self._rows - len(steps))
        sums = {"cu_seqlens_q": list(steps.values()), "cu_seqlens_kv": [before[i] + n for i, n in steps.items()]}
        for name, counts in sums.items():
            expected = torch.tensor([0, *counts, *rest]).cumsum(0).tolist()
            if getattr(self._params, name).tolist() != expected:
                raise Wrong(f"{name} is {getattr(self._params, name).tolist()}, not {expected}")
        if self._params.pre_step_seqlens.tolist() != [*before.values(), *rest]:
            raise Wrong(f"pre_step_seqlens is {self._params.pre_step_seqlens.tolist()}, not {before}")

    def _fork(self) -> None:
        parent, child = self._rng.choice([*self._tokens, *_IDS]), self._rng.choice(_IDS)
        can = parent in self._tokens and child not in self._tokens and len(self._tokens) < self._rows
        pages = dict(self._pages)
        if can and self._paged:
            size, length = self._params.page_size or 1, len(self._tokens[parent])
            pages[child] = self._pages[parent][: length // size]
            if length % size:
                self._fresh += 1
                pages[child] = [*pages[child], self._fresh]
            can = self._count(pages)
        self._changed(can, self._params.fork, {"parent_id": parent, "child_id": child})
        self._tokens[child], self._pages = list(self._tokens[parent]), pages

    def _truncate(self) -> None:
        each = self._rng.choice([*self._tokens, *_IDS])
        length = self._rng.randrange(-1, len(self._tokens.get(each, ())) + 2)
        can, pages = each in self._tokens and 0 <= length <= len(self._tokens[each]), dict(self._pages)
        if can and self._paged:
            size = self._params.page_size or 1
            pages[each] = self._pages[each][: -(-length // size)]
            others = Counter(page for other, owned in self._pages.items() if other != each for page in owned)
            if length % size and others[pages[each][-1]]:
                self._fresh += 1
                pages[each] = [*pages[each][:-1], self._fresh]
            can = self._count(pages)
        self._changed(can, self._params.truncate, {"sequence_id": each, "length": length})
        self._pages = pages
        del self._tokens[each][length:]

    def _changed(self, can: bool, call: Any, arguments: dict[str, Any]) -> None:
        try:
            called(call, arguments, self._watched)
        except RefusedCall as error:
            if can:
                raise Wrong(f"{call.__name__} of {arguments} is refused: {error}") from error
            raise
        if not can:
            raise Wrong(f"{call.__name__} of {arguments} is accepted")
        self._order = []

    def _spoiled(self) -> None:
        """Call with an argument of a wrong type, which must be refused."""
        rng = self._rng
        steps = OrderedDict.fromkeys(self._order, 1)
        keys, values = torch.zeros(2, 1, 1, 1, 1)
        calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
            (self._params.pre_step, {"step_dict": steps | {0: 1}}),
            (self._params.step, {"layer_number": 1, "new_k": keys, "new_v": values, "qkv_format": "bshd"}),
            (self._params.truncate, {"sequence_id": 0, "length": 0}),
            (self._params.convert_paged_to_nonpaged, {"layer_number": 1}),
        ]
        call, arguments = rng.choice(calls)
        name = rng.choice(sorted(arguments.keys() - {"sequence_id"}))
        arguments[name] = {0: hostile_value(rng)} if name == "step_dict" and rng.random() < 0.7 else hostile_value(rng)
        taken: dict[str, tuple[Any, ...]] = {
            "layer_number": (1, 1.0, True),
            "qkv_format": (None,),
            "length": (0, 1, 2),
            "step_dict": ({},),
        }
        given = arguments[name]
        if given in taken.get(name, ()) or (isinstance(given, dict) and set(map(type, given.values())) == {int}):
            return
        called(call, arguments, self._watched)
        raise Wrong(f"{call.__name__} takes {name}={arguments[name]!r:.300}")

    def compare(self) -> None:
        """Compare every written token with the cache's entry at its position."""
        if list(self._params.sequences.items()) != [(each, len(row)) for each, row in self._tokens.items()]:
            raise Wrong(f"the sequences are {self._params.sequences}, not {self._tokens}")
        if self._missing or self._order != list(self._tokens):
            return  # the device still has the rows of the last step
        keys, values = self._params.cache_manager.cache[1]
        if self._paged:
            keys, values = self._params.convert_paged_to_nonpaged(1)
        for row, tokens in enumerate(self._tokens.values()):
            for place, token in enumerate(tokens):
                if token is None:
                    continue
                if not ((keys[row, place] == token).all() and (values[row, place] == -token).all()):
                    raise Wrong(f"row {row} has {keys[row, place].flatten()[0]} at {place}, not {token}")
