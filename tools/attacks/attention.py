"""Fuzzing of FlashInfer's surface: random shapes, options, pages and entries, compared with attention in float64."""

from __future__ import annotations

import random
from typing import Any

import torch
from attention_oracle import Options, attend
from torch import Tensor

from attacks.border import RefusedCall, called, spoiled
from attacks.trial import Wrong
from graphdecode import (
    BatchDecodeWithPagedKVCacheWrapper,
    append_paged_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    merge_states,
    single_decode_with_kv_cache,
)

_FLOATS = [torch.float32, torch.float16, torch.bfloat16]
_SHORT = [torch.float8_e4m3fn, torch.float8_e5m2]
_NEAR = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
_NAMES = {torch.float16: "float16", torch.float32: "float32", torch.bfloat16: "bfloat16"}


def _is_float(value: Any) -> bool:
    """Return whether a value is a float tensor on the CPU."""
    return isinstance(value, Tensor) and value.is_cpu and value.is_floating_point()


class DecodeAttentionAttack:
    """Appends, attention and merges with a few invalid arguments; NaN must stay in its own head."""

    name = "attention (FlashInfer)"

    def run(self, rng: random.Random, folder: object) -> None:
        case = _Case(rng)
        if rng.random() < 0.25:
            case.single()
            return
        case.append()
        wrapper = case.planned()
        case.attend(wrapper)
        if rng.random() < 0.3:
            case.merge()


class _Case:
    """One batch: its shapes and options, and its pages."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        torch.manual_seed(rng.randrange(2**31))
        self._kv_heads, group = rng.randrange(1, 4), rng.choice([1, 1, 2, 3, 5, 8])
        self._heads = self._kv_heads * group
        self._dim = rng.choice([16, 24, 32, 64, 80])
        self._dtype = rng.choice(_FLOATS)
        self._kv_dtype = rng.choice([self._dtype, self._dtype, *_FLOATS, *_SHORT])
        self._mode = rng.choice(["NONE", "NONE", "ROPE_LLAMA", "ALIBI"])
        self._window = rng.choice([-1, -1, 0, 3, 40])
        self._cap = rng.choice([None, None, 0.0, 8.0])
        self._scales = {name: rng.choice([None, 0.5, 2.0]) for name in ("q_scale", "k_scale", "v_scale")}
        self._sm_scale = rng.choice([None, None, 0.3])
        self._rope = {"rope_scale": rng.choice([None, 2.0]), "rope_theta": rng.choice([None, 500.0])}
        self._layout = rng.choice(["NHD", "HND"])
        self._page, self._queries = rng.choice([1, 2, 5, 16]), rng.choice([1, 1, 1, 2, 3])
        self._lengths = [rng.choice([0, 1, self._queries, rng.randrange(60)]) for _ in range(rng.randrange(1, 5))]
        counts = [-(-length // self._page) for length in self._lengths]
        total = sum(counts) + rng.randrange(3)
        self._pages = rng.sample(range(max(total, 1)), sum(counts))
        self._indptr = [sum(counts[:row]) for row in range(len(counts) + 1)]
        self._last = [(length - 1) % self._page + 1 if length else 0 for length in self._lengths]
        inner = (self._page, self._kv_heads) if self._layout == "NHD" else (self._kv_heads, self._page)
        self._cache = [torch.zeros(max(total, 1), *inner, self._dim).to(self._kv_dtype) for _ in range(2)]
        self._rows = [[self._drawn(length, self._kv_dtype) for _ in range(2)] for length in self._lengths]
        self._row_lengths = [length if length >= self._queries else 0 for length in self._lengths]
        self._q = self._drawn(len(self._lengths) * self._queries, self._dtype, self._heads)
        self._spoil_entries()

    def _drawn(self, tokens: int, dtype: torch.dtype, heads: int | None = None) -> Tensor:
        return torch.randn(tokens, heads or self._kv_heads, self._dim).to(dtype)

    def _spoil_entries(self) -> None:
        """Put what is no number into one entry."""
        self._has_nan = False
        if self._rng.random() < 0.2:
            tensor = self._rng.choice([self._q, *(each for row in self._rows for each in row)])
            if tensor.numel() and tensor.element_size() > 1:
                at = self._rng.randrange(tensor.numel())
                value = self._rng.choice([torch.nan, torch.nan, torch.inf, -torch.inf])
                tensor.view(-1)[at], self._has_nan = value, value != value

    def _metadata(self) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(torch.tensor(each, dtype=torch.int32) for each in (self._indptr, self._pages, self._last))  # type: ignore[return-value]

    def _spoiled(self, arguments: dict[str, Any], share: float = 0.15) -> str | None:
        """Spoil one of the arguments, and return its name."""
        if self._rng.random() > share:
            return None
        name = self._rng.choice(sorted(arguments))
        good, arguments[name] = arguments[name], spoiled(self._rng, arguments[name])
        given = arguments[name]
        if isinstance(given, Tensor) and (given.shape, given.dtype, given.device) == (
            good.shape,
            good.dtype,
            good.device,
        ):
            arguments[name] = good
            return None
        return name

    def append(self) -> None:
        """Write all rows into their pages by the surface, and compare where they are."""
        indptr, indices, last = self._metadata()
        starts = torch.tensor([0, *self._lengths]).cumsum(0).to(torch.int32)
        total, pad = sum(self._lengths), self._rng.randrange(3)
        lengths = get_seq_lens(indptr, last, self._page)
        if lengths.tolist() != self._lengths:
            raise Wrong(f"get_seq_lens gives {lengths.tolist()}, not {self._lengths}")
        rows, positions = get_batch_indices_positions(starts, lengths, total + pad)
        expected = [(row, at) for row, length in enumerate(self._lengths) for at in range(length)] + [(-1, 0)] * pad
        if list(zip(rows.tolist(), positions.tolist(), strict=True)) != expected:
            raise Wrong(f"get_batch_indices_positions gives {rows.tolist()} and {positions.tolist()}, not {expected}")
        new = [torch.cat([*(row[which] for row in self._rows), self._drawn(pad, self._kv_dtype)]) for which in range(2)]
        arguments: dict[str, Any] = {
            "append_key": new[0], "append_value": new[1], "batch_indices": rows, "positions": positions,
            "paged_kv_cache": tuple(self._cache), "kv_indices": indices, "kv_indptr": indptr,
            "kv_last_page_len": last, "kv_layout": self._layout,
        }  # fmt: skip
        name = self._spoiled(arguments)
        called(append_paged_kv_cache, arguments, lambda: self._cache)
        if name is not None and name not in ("kv_last_page_len", "kv_indices") and not _is_float(arguments[name]):
            raise Wrong(f"append_paged_kv_cache takes {name}={arguments[name]!r:.300}")
        if name is not None:
            raise RefusedCall(f"it takes {name}")  # with values that are also valid
        for row, pair in enumerate(self._rows):
            for which, values in enumerate(pair):
                if not torch.equal(self._stored(row, which).double().nan_to_num(7), values.double().nan_to_num(7)):
                    raise Wrong(f"row {row} is not where it was appended: {self._layout}, pages of {self._page}")

    def _stored(self, row: int, which: int) -> Tensor:
        cache = self._cache[which] if self._layout == "NHD" else self._cache[which].transpose(1, 2)
        pages = self._pages[self._indptr[row] : self._indptr[row + 1]]
        return cache[pages].flatten(0, 1)[: self._lengths[row]] if pages else cache[0][:0]

    def planned(self) -> BatchDecodeWithPagedKVCacheWrapper:
        """Return a wrapper with its plan."""
        rng = self._rng
        made: dict[str, Any] = {"float_workspace_buffer": torch.empty(1 << 16), "kv_layout": self._layout}
        made |= {"use_tensor_cores": True, "batch_invariant": rng.random() < 0.3}
        if rng.random() < 0.4:
            sizes = {"indptr": len(self._lengths) + 2, "indices": len(self._pages) + 3}
            sizes["last_page_len"] = sizes["indptr"] - 1
            made |= {f"paged_kv_{name}_buffer": torch.zeros(size, dtype=torch.int32) for name, size in sizes.items()}
            made["use_cuda_graph"] = True
        spoilt = self._spoiled({name: made[name] for name in made.keys() - {"use_tensor_cores", "batch_invariant"}}, 0)
        assert spoilt is None
        wrapper: BatchDecodeWithPagedKVCacheWrapper = called(BatchDecodeWithPagedKVCacheWrapper, made)
        indptr, indices, last = self._metadata()
        arguments: dict[str, Any] = {
            "indptr": indptr, "indices": indices, "last_page_len": last, "num_qo_heads": self._heads,
            "num_kv_heads": self._kv_heads, "head_dim": self._dim, "page_size": self._page,
            "pos_encoding_mode": self._mode, "window_left": self._window, "logits_soft_cap": self._cap,
            "q_data_type": rng.choice([self._dtype, _NAMES[self._dtype]]), "kv_data_type": self._kv_dtype,
            "sm_scale": self._sm_scale, "q_len_per_req": self._queries, **self._rope,
        }  # fmt: skip
        self._spoil_pages(arguments)
        name = self._spoiled(arguments)
        called(wrapper.plan, arguments)
        if name is not None:
            raise RefusedCall(f"plan takes {name}={arguments[name]!r:.100}")  # its meaning is not documented
        return wrapper

    def _spoil_pages(self, arguments: dict[str, Any]) -> None:
        """Name pages that there are not."""
        if self._rng.random() > 0.05:
            return
        name = self._rng.choice(["indptr", "indices", "last_page_len"])
        tensor = arguments[name] = arguments[name].clone()
        if tensor.numel():
            tensor[self._rng.randrange(len(tensor))] = self._rng.choice([-1, -(2**31), 2**31 - 1, 10**6, 99])
        wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 16), self._layout, use_tensor_cores=True)
        called(wrapper.plan, arguments)
        called(wrapper.run, {"q": self._q, "paged_kv_cache": tuple(self._cache)})
        raise RefusedCall("pages that there are not were named, and nothing ended")

    def attend(self, wrapper: BatchDecodeWithPagedKVCacheWrapper) -> None:
        """Attend by a planned wrapper, and compare each row."""
        cache: Any = tuple(self._cache)
        if self._rng.random() < 0.3:
            cache = torch.stack(self._cache, 1)
        arguments: dict[str, Any] = {"q": self._q, "paged_kv_cache": cache, "return_lse": True, **self._scales}
        name = self._spoiled(arguments)
        given = called(wrapper.run, arguments, errors=(ValueError, RuntimeError))
        if name is not None:
            if name == "q":
                raise Wrong(f"run takes {name}={arguments[name]!r:.300}")
            raise RefusedCall(f"run takes {name}={arguments[name]!r:.100}")
        for row, (keys, values) in enumerate(self._rows):
            place = slice(row * self._queries, (row + 1) * self._queries)
            self._compare(self._q[place], keys, values, given[0][place], given[1][place])

    def single(self) -> None:
        """Attend from one query over keys that lie side by side."""
        keys, values = max(self._rows, key=lambda row: len(row[0]))
        if not len(keys):
            return
        across = self._layout == "HND"
        arguments: dict[str, Any] = {
            "q": self._q[0], "k": keys.transpose(0, 1) if across else keys,
            "v": values.transpose(0, 1) if across else values, "kv_layout": self._layout,
            "pos_encoding_mode": self._mode, "window_left": self._window, "logits_soft_cap": self._cap,
            "sm_scale": self._sm_scale, "return_lse": True, **self._scales, **self._rope,
        }  # fmt: skip
        name = self._spoiled(arguments)
        given = called(single_decode_with_kv_cache, arguments)
        if name is not None:
            if name in ("q", "k", "v"):
                raise Wrong(f"single_decode_with_kv_cache takes {name}={arguments[name]!r:.300}")
            raise RefusedCall(f"it takes {name}={arguments[name]!r:.100}")
        self._compare(self._q[:1], keys, values, given[0][None], given[1][None])

    def _compare(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor) -> None:
        """Compare what some queries got with attention in float64."""

        def scale(name: str) -> float:
            return 1.0 if self._scales[name] is None else float(self._scales[name] or 0)

        options = Options(
            sm_scale=(self._dim**-0.5 if self._sm_scale is None else self._sm_scale) * scale("q_scale")
            * scale("k_scale"),
            v_scale=scale("v_scale"), window_left=self._window, soft_cap=self._cap or 0.0, mode=self._mode,
            rope_scale=self._rope["rope_scale"] or 1.0, rope_theta=self._rope["rope_theta"] or 1e4,
        )  # fmt: skip
        exact, exact_lse = attend(q, keys, values, options)
        told = (
            f"{self._heads}/{self._kv_heads} heads of {self._dim}, {self._dtype}, {self._kv_dtype}, {len(keys)} keys, "
            f"pages of {self._page}, {self._layout}, {options}"
        )
        spoilt = [not bool(each.double().isfinite().all()) for each in (q, keys, values)]
        if any(spoilt) and not self._has_nan:
            return  # the result for infinity is not documented
        is_number, was_number = exact.isfinite(), out.isfinite()
        hidden = (was_number.all(-1) & ~is_number.all(-1)).any()
        # invisible keys have weight 0
        sees_all = not (spoilt[1] or spoilt[2]) or (self._queries == 1 and self._window < 0)
        if hidden or (sees_all and (is_number.all(-1) & ~was_number.all(-1)).any()):
            raise Wrong(f"heads of numbers are {was_number.all(-1)}, not {is_number.all(-1)}: {told}")
        near = _NEAR[self._dtype]
        apart = ((out.double() - exact).abs() - near * (exact.abs() + 1))[is_number & was_number]
        if apart.numel() and float(apart.max()) > 0:
            raise Wrong(f"the output is apart by {float(apart.max()):.3g} more than {near}: {told}")
        both = exact_lse.isfinite() & lse.isfinite()
        if not any(spoilt) and not torch.equal(exact_lse.isfinite(), lse.isfinite()):
            raise Wrong(f"the log-sum-exps are {lse}, not {exact_lse}: {told}")
        far = ((lse.double() - exact_lse).abs() - 1e-4 * (exact_lse.abs() + 1))[both]
        if far.numel() and float(far.max()) > 0:
            raise Wrong(f"the log-sum-exps are {lse}, not {exact_lse}: {told}")

    def merge(self) -> None:
        """Merge states, and compare with their weighted mean in float64."""
        shape = (2, self._rng.randrange(1, 4), 3)
        v, s = torch.randn(*shape, 8).to(self._dtype), torch.randn(shape) * 20
        s[0, 0] = self._rng.choice([-torch.inf, 0.0])
        arguments: dict[str, Any] = {"v": v, "s": s}
        name = self._spoiled(arguments)
        given, sums = called(merge_states, arguments)
        if name is not None and not _is_float(arguments[name]):
            raise Wrong(f"merge_states takes {name}={arguments[name]!r:.300}")
        if name is not None:
            raise RefusedCall(f"it takes {name}")
        weights = (s.double() * torch.log(torch.tensor(2.0, dtype=torch.float64))).softmax(1).nan_to_num(0)
        exact = (v.double() * weights[..., None]).sum(1)
        if float((given.double() - exact).abs().max()) > _NEAR[self._dtype] * 4:
            raise Wrong(f"merged are {given}, not {exact}")
        if float((sums.double().exp2() - s.double().exp2().sum(1)).abs().max() / s.double().exp2().max()) > 1e-4:
            raise Wrong(f"the merged sums are {sums}")
