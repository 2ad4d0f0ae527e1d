"""FlashInfer's attention over latent keys (MLA, absorbed): planned on the device, run once a layer."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphdecode.attention.paged_decode import splits_rows
from graphdecode.cache.errors import require_choice, require_fit, require_numbers, require_tensors
from graphdecode.errors import shown
from graphdecode.kernels.attention.attention_plan import (
    PlanSizes,
    attention_plan,
    plan_size,
    work_items,
)
from graphdecode.kernels.attention.work_item import SplitPlan

from .decode_problem import (
    FP8_DTYPES,
    MAX_TOKENS,
    OUT_DTYPES,
    floats_of,
    lse_for,
    partials_of,
    planned_dtypes,
    require_neutral,
    result_for,
    sinks_of,
    wave_items_that_fit,
)
from .latent_attention import LN_2, LatentProblem, attend_to_latents, number_of
from .mla_rows import MLAPlanMetadata, MLARows

_BACKENDS = (  # all mean the same here
    *("auto", "fa2", "fa3", "cutlass", "cutile", "trtllm-gen", "xqa"),
    *("cute-dsl", "cute-dsl-monolithic", "cute-dsl-modular"),
)
_LAYOUTS, _LSE_MODES = ("packed", "split"), ("none", "base2", "basee")
_SCALE_MODES = ("default", "kv-per-tensor", "bmm-scalar", "bmm-tensor")
_CUTLASS_NOPE_DIM = 128  # without a plan, logits are divided by the root of this and head_dim_kpe

Parts = Tensor | tuple[Any, Any] | None


class _Contract(NamedTuple):
    """The options of a plan, for later runs."""

    problem: LatentProblem
    causal: bool
    sm_scale: float
    out_dtype: torch.dtype
    lse_mode: str = "none"
    use_sinks: bool = False


class _Work(NamedTuple):
    """The plan of a number of queries, each a row of its own, and its tensors."""

    starts: Tensor  # where each query's pages begin in the list of pages
    before: Tensor  # keys that each query sees, less one
    live: Tensor  # the number of queries
    kv_lens: Tensor
    plan: Tensor
    counters: Tensor
    max_items: int
    sizes: PlanSizes
    is_split: bool

    @property
    def queries(self) -> int:
        return self.starts.shape[0]


class BatchMLAPagedAttentionWrapper:
    """Attention over a paged cache of latent keys for a batch of requests: `plan` once a step, `run` once a layer.

    With tensors on a GPU, `plan` launches kernels there and reads nothing on the host; what is on the host is copied.

    Args:
        float_workspace_buffer: workspace on the cache's device, of any dtype, for partial results of split rows; rows
            are split less, or not at all, where it has no room. Unused on a CPU.
        use_cuda_graph: keep rows that are listed one after another in the four buffers, at fixed addresses, so that a
            captured `run` goes on working after any later `plan` of at most as many rows and pages. Rows as a table
            stay where they are, and `run` reads them anew: a captured one is right once they are changed in place.
        qo_indptr: int32 [max_batch + 1].
        kv_indptr: int32 [max_batch + 1].
        kv_indices: int32 [max_pages].
        kv_len_arr: int32 [max_batch].
        backend: part of the surface; all of FlashInfer's mean the same here.

    Raises:
        ValueError: the backend is unknown, or a buffer does not fit.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        require_tensors(float_workspace_buffer=float_workspace_buffer)
        require_choice("backend", backend, _BACKENDS)
        self.device = float_workspace_buffer.device
        self._workspace, self._is_captured = float_workspace_buffer, use_cuda_graph
        self._contract: _Contract | None = None
        self._rows: MLARows | None = None  # of the plan
        self._host_rows: MLARows | None = None  # the same, as far as they are on the host
        self._work: _Work | None = None
        self._least = 0  # the fewest queries of a later run, if known
        self._buffers: MLARows | None = None
        buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        if use_cuda_graph and any(each is not None for each in buffers):
            named = dict(zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), buffers, strict=True))
            require_tensors(self.device, **named)
            self._buffers = MLARows.of(None, named, self.device)

    @property
    def workspace(self) -> list[Tensor]:
        """The tensors that `plan` and `run` write besides the output, to be declared with a captured step's buffers.

        They stay where they are while later plans and runs need no more than those before; plan once before capture.
        """
        if self._work is None:
            return [self._workspace]
        return [self._workspace, *(each for each in self._work if isinstance(each, Tensor))]

    def plan(
        self,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: str | torch.dtype | None = None,
        kv_data_type: str | torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Set the rows and the parameters of later `run`s.

        Args:
            qo_indptr: int32 [b + 1], where each row's queries begin: its newest tokens, any number of them.
            kv_indptr: int32 [b + 1], where each row's pages begin in `kv_indices`.
            kv_indices: int32, pages of all rows, one row after another.
            kv_len_arr: int32 [b], tokens of each row, those of its queries included.
            num_heads: query heads.
            head_dim_ckv: channels of latent vectors, 16..512.
            head_dim_kpe: rotated channels, 0..256.
            page_size: tokens a page, >= 1.
            causal: whether a query sees no later token than its own, or else all of its row.
            sm_scale: multiplies the logits.
            q_data_type: float16, bfloat16, float32, float8_e4m3fn or float8_e5m2.
            kv_data_type: likewise.
            metadata: the rows in place of the first four arguments, or of the next three.
            cum_seq_lens_q, block_tables, seq_lens: the rows with their pages as a table, see `MLAPlanMetadata`.
            query_layout, kv_cache_layout: part of the surface; `run` takes both forms of both.
            lse_mode: `none`, or the base of log-sum-exps that `run` returns.
            output_dtype: float16, bfloat16, float32, or the queries'; None: the queries'.
            scale_mode: part of the surface; `run` takes its own scales.
            use_sinks: whether `run` has sinks.
            output_scale, skip_softmax: part of the surface; must be "none" and False.
            use_profiler, max_q_len, enable_pdl: hints, without effect.

        Raises:
            ValueError: an argument does not fit; nothing has changed then.
        """
        needed = {
            "num_heads": num_heads, "head_dim_ckv": head_dim_ckv, "head_dim_kpe": head_dim_kpe, "page_size": page_size,
            "causal": causal, "sm_scale": sm_scale, "q_data_type": q_data_type, "kv_data_type": kv_data_type,
        }  # fmt: skip
        if missing := [name for name, value in needed.items() if value is None]:
            raise ValueError(f"plan needs {', '.join(needed)}: {missing[0]} is None")
        require_neutral(output_scale=(output_scale, "none"), skip_softmax=(bool(skip_softmax), False))
        for name, layout in (("query_layout", query_layout), ("kv_cache_layout", kv_cache_layout)):
            require_choice(name, "split" if layout is None else layout, _LAYOUTS)
        require_choice("lse_mode", lse_mode, _LSE_MODES)
        require_choice("scale_mode", scale_mode, _SCALE_MODES)
        require_numbers(sm_scale=sm_scale)
        sizes: list[Any] = [num_heads, head_dim_ckv, head_dim_kpe, page_size]
        sizes += planned_dtypes(q_data_type, kv_data_type, None)
        problem = LatentProblem(*sizes)
        out_dtype = problem.q_dtype if output_dtype is None else output_dtype
        if out_dtype not in (problem.q_dtype, *OUT_DTYPES):
            raise ValueError(f"output_dtype must be float16, bfloat16, float32 or q_data_type, got {output_dtype!r}")
        contract = _Contract(problem, bool(causal), float(sm_scale), out_dtype, lse_mode, bool(use_sinks))  # type: ignore[arg-type]
        flat = {
            "qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr,
            "cum_seq_lens_q": cum_seq_lens_q, "block_tables": block_tables, "seq_lens": seq_lens,
            "max_q_len": max_q_len,
        }  # fmt: skip
        self._plan_rows(contract, MLARows.of(metadata, flat, self.device))

    def _plan_rows(self, contract: _Contract, new_rows: MLARows) -> None:
        is_listed = new_rows.kv_indptr is not None
        buffers = self._buffers if is_listed else None
        if self._is_captured and is_listed:
            if buffers is None:
                raise ValueError("use_cuda_graph needs the buffers qo_indptr, kv_indptr, kv_indices and kv_len_arr")
            new_rows.check_fit(buffers)
        if self.device.type == "cuda":
            new_rows.check_host_values(contract.problem.page_size)
        least = new_rows.queries
        planned = 0 if self._work is None or not self._is_captured else self._work.queries
        queries = max(least or 0, planned, new_rows.rows if buffers is None else buffers.rows)
        is_in_place = (
            self._is_captured and not is_listed and all(each is None or each.device == self.device for each in new_rows)
        )
        rows = new_rows if is_in_place else new_rows.on(self.device)  # these may be changed in place
        work = self._planned(contract, rows, queries, self._work)
        if buffers is not None:
            rows.copy_to(buffers)
            rows = buffers
        host_rows = new_rows.on(torch.device("cpu")) if new_rows.pages.is_cpu and self.device.type != "cpu" else rows
        self._contract, self._rows, self._host_rows = contract, rows, host_rows
        self._work, self._least = work, least or 0

    def _planned(self, contract: _Contract, rows: MLARows, queries: int, work: _Work | None = None) -> _Work:
        """Plan so many queries, into the tensors of a plan before if these are as many."""
        problem, device = contract.problem, self.device
        max_items, sizes, is_split = self._divided(problem, queries)
        if work is None or work.queries != queries or work.plan.shape[0] < plan_size(max_items):
            starts, before, kv_lens = torch.zeros(3, queries, dtype=torch.int32, device=device)
            work = _Work(
                starts, before, torch.full((1,), queries, dtype=torch.int32, device=device), kv_lens,
                torch.zeros(plan_size(max_items), dtype=torch.int32, device=device),
                torch.zeros(queries * problem.num_heads, dtype=torch.int32, device=device), max_items, sizes, is_split,
            )  # fmt: skip
        elif work.counters.shape[0] < queries * problem.num_heads:
            counters = torch.zeros(queries * problem.num_heads, dtype=torch.int32, device=device)
            work = work._replace(counters=counters)
        work = work._replace(max_items=max_items, sizes=sizes, is_split=is_split)
        rows.as_single_queries(work.starts, work.before, problem.page_size, causal=contract.causal)
        work.before.sub_(1)
        attention_plan(work.kv_lens, work.plan, work.before, work.live, sizes)
        return work

    def _divided(self, problem: LatentProblem, queries: int) -> tuple[int, PlanSizes, bool]:
        """Return the most work items of so many queries, the sizes of splits, and whether rows are split at all."""
        wave_items = problem.wave_items(self.device)
        items = work_items(queries, wave_items)
        most_items = self._workspace.nbytes // (4 * problem.floats_of_query)
        if not splits_rows(self.device) or items <= most_items:
            return items, PlanSizes(wave_items), splits_rows(self.device)
        wave_items = wave_items_that_fit(queries, wave_items, most_items)
        if wave_items <= 0:  # no room for partial results
            return queries, PlanSizes(1, MAX_TOKENS), False
        return work_items(queries, wave_items), PlanSizes(wave_items), True

    def run(
        self,
        q_nope: Tensor | None = None,
        q_pe: Tensor | None = None,
        ckv_cache: Tensor | None = None,
        kpe_cache: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Parts = None,
        kv_cache: Parts = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | None = None,
        bmm2_scale: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from each row's newest tokens to its pages.

        Args:
            q_nope: [tokens, num_heads, head_dim_ckv], absorbed queries of latent vectors, any strides.
            q_pe: [tokens, num_heads, head_dim_kpe], queries of rotated channels.
            ckv_cache: [pages, page_size, head_dim_ckv], any strides; a view of one tensor of both parts, too.
            kpe_cache: [pages, page_size, head_dim_kpe].
            out: where to write, [tokens, num_heads, head_dim_ckv], contiguous, of the planned output_dtype.
            lse: where to write the log-sum-exps, fp32 [tokens, num_heads], contiguous.
            return_lse: whether to return them.
            kv_len, page_table: int32 [tokens] and [tokens, pages], rows of one query each in place of those planned;
                with these there need be no plan: logits are divided by the root of 128 + head_dim_kpe then.
            return_lse_base_on_e: whether log-sum-exps are natural ones; else they are of base 2.
            query, kv_cache: (q_nope, q_pe) and (ckv_cache, kpe_cache), or one tensor of both parts, in their place.
            ckv_scale, kpe_scale: what cached latent vectors, and rotated channels, are multiplied with; None: 1.
            sinks: float32 [num_heads], a logit of each head that takes weight and has no value.
            bmm1_scale: multiplies the logits in place of sm_scale.
            bmm2_scale: multiplies the output.
            o_scale, ckv_scale_arr, skip_softmax_threshold_scale_factor: part of the surface; must be None.
            profiler_buffer: a hint, without effect.

        Returns:
            The output, 0 for queries without keys and behind the planned ones; with return_lse also the log-sum-exps,
            -inf for these.

        Raises:
            RuntimeError: there was no `plan`.
            ValueError: a tensor does not fit what was planned, or an argument is not supported at this value.
        """
        require_neutral(
            o_scale=(o_scale, None),
            ckv_scale_arr=(ckv_scale_arr, None),
            skip_softmax_threshold_scale_factor=(skip_softmax_threshold_scale_factor or None, None),
        )
        contract = self._contract
        ckv_dim = None if contract is None else contract.problem.head_dim_ckv
        queries = _parts_of("query", query, "q_nope", q_nope, "q_pe", q_pe, ckv_dim)
        caches = _parts_of("kv_cache", kv_cache, "ckv_cache", ckv_cache, "kpe_cache", kpe_cache, ckv_dim)
        if (kv_len is None) != (page_table is None):
            raise ValueError("kv_len and page_table need each other, got one of them")
        if contract is None:
            if kv_len is None:
                raise RuntimeError("call plan() before run()")
            contract = _unplanned(queries, caches)
        problem = contract.problem
        problem.check_queries(self.device, *queries)
        problem.check_caches(self.device, *caches)
        tokens, shape = len(queries[0]), queries[0].shape
        if kv_len is None and tokens < self._least:
            raise ValueError(f"queries must be those of {self._least} tokens as planned, got {tokens}")
        out, lse = self._results(contract, shape, out, lse, return_lse, return_lse_base_on_e)
        if contract.use_sinks and sinks is None:
            raise ValueError(f"sinks must be {problem.num_heads} numbers, as use_sinks was planned, got None")
        scales = (number_of("ckv_scale", ckv_scale), number_of("kpe_scale", kpe_scale))
        if scales[0] == 0.0:
            raise ValueError("ckv_scale must not be 0, got 0.0")
        sm_scale = number_of("bmm1_scale", bmm1_scale, contract.sm_scale)
        out_scale, sinks = number_of("bmm2_scale", bmm2_scale), sinks_of(sinks, problem.num_heads, self.device)
        rows, work = self._rows_and_work(contract, tokens, len(caches[0]), kv_len, page_table)
        plan = SplitPlan(work.kv_lens, work.plan, *self._partials(problem, work), work.counters)
        attend_to_latents(
            out, lse, queries, caches, rows.pages.reshape(-1), work.starts, plan, max_items=work.max_items,
            sm_scale=sm_scale, sinks=sinks, ckv_scale=scales[0], kpe_scale=scales[1], out_scale=out_scale,
        )  # fmt: skip
        if lse is not None and return_lse_base_on_e:
            lse.mul_(LN_2)
        return (out, lse) if return_lse and lse is not None else out

    def _rows_and_work(
        self, contract: _Contract, tokens: int, num_pages: int, kv_len: Tensor | None, page_table: Tensor | None
    ) -> tuple[MLARows, _Work]:
        """Return the planned rows, or those of a table of this run's, and their plan; pages must be of the cache."""
        if kv_len is not None and page_table is not None:
            require_tensors(self.device, kv_len=kv_len, page_table=page_table)
            require_fit("kv_len", kv_len, (tokens,), torch.int32)
            require_fit("page_table", page_table, (tokens, "pages"), torch.int32)
            each = torch.arange(tokens + 1, dtype=torch.int32, device=self.device)
            rows = MLARows(each, None, page_table.contiguous(), kv_len)
            rows.check_numbers(contract.problem.page_size, num_pages)
            return rows, self._planned(contract, rows, tokens)
        rows_planned, host_rows, work = self._rows, self._host_rows, self._work
        assert rows_planned is not None
        assert host_rows is not None
        assert work is not None
        host_rows.check_numbers(contract.problem.page_size, num_pages)
        if tokens > work.queries or (self._is_captured and rows_planned.kv_indptr is None):
            self._work = work = self._planned(contract, rows_planned, max(tokens, work.queries), work)
        return rows_planned, work

    def _results(
        self, contract: _Contract, shape: torch.Size, out: Tensor | None, lse: Tensor | None, returns: bool, on_e: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tensors to write into; raises ValueError if an argument does not fit."""
        if (returns or lse is not None) and contract.lse_mode not in ("none", "basee" if on_e else "base2"):
            raise ValueError(f"return_lse_base_on_e={on_e} is not lse_mode={contract.lse_mode!r}, as planned")
        dtypes = (contract.out_dtype, *(OUT_DTYPES if contract.out_dtype in FP8_DTYPES else ()))
        out = result_for("out", out, shape, dtypes, self.device)
        return out, lse_for(lse, shape[:2], self.device, return_lse=returns)

    def _partials(self, problem: LatentProblem, work: _Work) -> tuple[Tensor, Tensor]:
        if not work.is_split:
            return torch.empty(0, device=self.device), torch.empty(0, device=self.device)
        return partials_of(floats_of(self._workspace), (work.max_items, 1, problem.num_heads), problem.head_dim_ckv)


def _parts_of(
    name: str, whole: Parts, first_name: str, first: Tensor | None, second_name: str, second: Tensor | None,
    ckv_dim: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the two parts of queries or keys: of a pair, or views of one tensor; of both these, the pair."""
    if whole is None:
        require_tensors(None, **{first_name: first, second_name: second})
        assert first is not None
        assert second is not None
        return first, second
    if first is not None or second is not None:
        raise ValueError(f"{name} takes the place of {first_name} and {second_name}, got both")
    if isinstance(whole, tuple) and any(isinstance(each, tuple) for each in whole):
        whole = next(each for each in whole if isinstance(each, tuple))
    if isinstance(whole, tuple) and len(whole) == 2 and all(isinstance(each, Tensor) for each in whole):
        return whole
    if not isinstance(whole, Tensor) or not whole.dim():
        raise ValueError(f"{name} must be a tensor, or a pair of {first_name} and {second_name}, got {shown(whole)}")
    if ckv_dim is None:
        raise ValueError(f"{name} must be a pair of {first_name} and {second_name} without a plan, got one tensor")
    return whole[..., :ckv_dim], whole[..., ckv_dim:]


def _unplanned(queries: tuple[Tensor, Tensor], caches: tuple[Tensor, Tensor]) -> _Contract:
    """Return the options of a run without a plan, from its tensors."""
    (q_nope, q_pe), (ckv_cache, _) = queries, caches
    require_fit("q_nope", q_nope, ("tokens", "heads", "head_dim_ckv"))
    require_fit("q_pe", q_pe, ("tokens", "heads", "head_dim_kpe"))
    require_fit("ckv_cache", ckv_cache, ("pages", "page_size", "head_dim_ckv"))
    problem = LatentProblem(
        q_nope.shape[1], q_nope.shape[2], q_pe.shape[2], ckv_cache.shape[1],
        *planned_dtypes(q_nope.dtype, ckv_cache.dtype, None),
    )  # fmt: skip
    return _Contract(problem, False, 1.0 / math.sqrt(_CUTLASS_NOPE_DIM + q_pe.shape[2]), q_nope.dtype)
