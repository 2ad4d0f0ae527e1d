"""FlashInfer's sampling from probabilities and logits, by the engine's draw: an exponential race."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphdecode.cache.errors import require_choice, require_fit, require_numbers, require_range, require_tensors
from graphdecode.errors import shown
from graphdecode.kernels.surfaces.draw_tokens import draw_tokens
from graphdecode.kernels.surfaces.filter_probs import filter_probs

from .random_streams import NoiseStream, stream_of, uniforms

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_WIDE_FLOATS = (*_FLOATS, torch.float64)
_ORDERS = ("top_k_first", "joint")
_MOST_TOKENS = 2**31 - 1


class _Draws(NamedTuple):
    """The arguments that all draws of one token a row have."""

    indices: Tensor | None
    generator: torch.Generator | None
    check_nan: bool
    seed: int | Tensor | None
    offset: int | Tensor | None

    def stream(self, values: Tensor) -> NoiseStream:
        """Return the noise of each output; raises ValueError if an argument does not fit."""
        count = values.shape[0]
        if self.indices is not None:
            require_tensors(values.device, indices=self.indices)
            require_fit("indices", self.indices, ("b",), torch.int32, torch.int64)
            count = self.indices.shape[0]
        return stream_of(count, values.device, self.generator, self.seed, self.offset)


def softmax(logits: Tensor, temperature: Tensor | float | None = None, enable_pdl: bool | None = None) -> Tensor:
    """Return the probabilities of logits over the temperature, float32 [batch, vocab].

    Args:
        logits: [batch, vocab], any float dtype.
        temperature: a number, or one of each row; None: 1. At 0 all tokens are equally likely, as in FlashInfer.
        enable_pdl: a hint, without effect.

    Raises:
        ValueError: an argument does not fit.
    """
    _check_rows("logits", logits)
    wide = logits.float()
    if isinstance(temperature, Tensor):
        require_tensors(logits.device, temperature=temperature)
        require_fit("temperature", temperature, logits.shape[:1], *_WIDE_FLOATS)
        divisor = temperature.float().unsqueeze(1)
        wide = wide * torch.where(divisor == 0, 0.0, 1.0 / divisor)
    elif temperature is not None:
        require_numbers(temperature=temperature)
        wide = wide * (1.0 / temperature if temperature else 0.0)
    return torch.softmax(wide, dim=-1)


def sampling_from_logits(
    logits: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
) -> Tensor:
    """Return a token of each row, drawn from the softmax of its logits; see `top_k_top_p_sampling_from_probs`."""
    _check_rows("logits", logits)
    stream = _Draws(indices, generator, check_nan, seed, offset).stream(logits)
    _check_nan("logits", logits, check_nan)
    return _drawn(logits, indices, stream, is_logits=True)[0]


def sampling_from_probs(
    probs: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return a token of each row, drawn from its probabilities; see `top_k_top_p_sampling_from_probs`."""
    return _sampled(probs, _Draws(indices, generator, check_nan, seed, offset), return_valid)


def top_p_sampling_from_probs(
    probs: Tensor,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return a token of each row, drawn from those that top-p keeps; see `top_k_top_p_sampling_from_probs`."""
    return _sampled(probs, _Draws(indices, generator, check_nan, seed, offset), return_valid, top_p=top_p)


def top_k_sampling_from_probs(
    probs: Tensor,
    top_k: Tensor | int,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return a token of each row, drawn from those that top-k keeps; see `top_k_top_p_sampling_from_probs`."""
    return _sampled(probs, _Draws(indices, generator, check_nan, seed, offset), return_valid, top_k=top_k)


def min_p_sampling_from_probs(
    probs: Tensor,
    min_p: Tensor | float,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return a token of each row, drawn from those at least `min_p` times as likely as the most likely one.

    See `top_k_top_p_sampling_from_probs` for the other arguments.
    """
    return _sampled(probs, _Draws(indices, generator, check_nan, seed, offset), return_valid, min_p=min_p)


def top_k_top_p_sampling_from_logits(
    logits: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
) -> Tensor:
    """Return a token of each row of logits, see `top_k_top_p_sampling_from_probs`.

    Top-k first keeps the largest logits, and top-p is of their softmax; `joint` filters the softmax of all.
    """
    require_choice("filter_apply_order", filter_apply_order, _ORDERS)
    _check_rows("logits", logits)
    _parameter("top_p", top_p, logits)
    filters: dict[str, Any] = {"top_k": top_k, "top_p": top_p}
    draws = _Draws(indices, generator, check_nan, seed, offset)
    draws._replace(seed=0 if seed is None else seed, offset=0 if offset is None else offset).stream(logits)  # checks
    if filter_apply_order == "top_k_first":
        logits = top_k_mask_logits(logits, filters.pop("top_k"))
    probs = torch.softmax(logits.float(), dim=-1)
    result = _sampled(probs, draws, False, is_joint=True, **filters)
    assert isinstance(result, Tensor)
    return result


def top_k_top_p_sampling_from_probs(
    probs: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return a token of each row, drawn from those that top-k and top-p keep; nothing is read on the host.

    Tokens as likely as the last one that a filter keeps are kept, too. Draws are functions of the seed, the offset, the
    number of the output and the probabilities; the same seed draws other tokens than FlashInfer does.

    Args:
        probs: [rows, vocab], float32, float16 or bfloat16.
        top_k: how many tokens to keep, >= 1, a number or int32 or int64 [rows]; below 0 in a tensor: all.
        top_p: keep the most likely tokens until they have so much together, a number in 0..1 or float [rows].
        indices: int32 or int64 [b], the row of each output, whose dtype it gives; None: each row once, int32.
        filter_apply_order: `top_k_first` (top_p is a share of what top-k keeps) or `joint`.
        deterministic: a hint: draws always are.
        generator: where a seed comes from if seed or offset is None; None: torch's default.
        check_nan: whether to raise an error for NaN, which reads the result on the host.
        seed, offset: two numbers, or two int64 or uint64 tensors of 1 or as many as outputs: those may change between
            two replays of a captured call.
        return_valid: whether to return which outputs could be drawn, too.

    Returns:
        The tokens, [b]; with return_valid also bool [b]: False, and token 0, for rows with NaN or inf, without any
        chance, or that do not exist.

    Raises:
        ValueError: an argument does not fit.
    """
    require_choice("filter_apply_order", filter_apply_order, _ORDERS)
    draws, is_joint = _Draws(indices, generator, check_nan, seed, offset), filter_apply_order == "joint"
    return _sampled(probs, draws, return_valid, is_joint=is_joint, top_k=top_k, top_p=top_p)


def top_p_renorm_probs(probs: Tensor, top_p: Tensor | float, is_deterministic: bool = False) -> Tensor:
    """Return the probabilities that top-p keeps, divided by their sum, and 0 for others, float32 [rows, vocab].

    See `top_k_top_p_sampling_from_probs` for the arguments; `is_deterministic` is a hint: results always are.
    """
    _check_rows("probs", probs)
    return _filtered(probs, torch.float32, {"top_p": top_p}, is_normed=True)


def top_k_renorm_probs(probs: Tensor, top_k: Tensor | int, is_deterministic: bool = False) -> Tensor:
    """Return the probabilities that top-k keeps, divided by their sum, and 0 for others, in their dtype.

    See `top_k_top_p_sampling_from_probs` for the arguments; `is_deterministic` is a hint: results always are.
    """
    _check_rows("probs", probs)
    return _filtered(probs, probs.dtype, {"top_k": top_k}, is_normed=True)


def top_k_mask_logits(logits: Tensor, top_k: Tensor | int) -> Tensor:
    """Return the `top_k` largest logits of each row, those equal to the last too, and -inf for others, in their dtype.

    Args:
        logits: [rows, vocab], float32, float16 or bfloat16.
        top_k: >= 1, a number, or int32 or int64 [rows].

    Raises:
        ValueError: an argument does not fit.
    """
    _check_rows("logits", logits)
    return _filtered(logits, logits.dtype, {"top_k": top_k}, is_logits=True)


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept drafts by rejection sampling, so that tokens are distributed as the target's (Chen et al., 2023).

    Args:
        draft_probs: [b, n, vocab], what the drafts were drawn from.
        draft_token_ids: int32 or int64 [b, n].
        target_probs: [b, n + 1, vocab].
        maybe_output_accepted_token_num: int32 [b], to which the second result is added; None: a new tensor.
        maybe_output_emitted_draft_token_num: likewise for the third.
        deterministic, generator, seed, offset: see `top_k_top_p_sampling_from_probs`.

    Returns:
        Tokens, int32 [b, n + 1]: the accepted drafts, one more of the target's, and then -1; how many drafts would be
        accepted, each looked at alone, int32 [b]; and how many were.

    Raises:
        ValueError: an argument does not fit; nothing has changed then.
    """
    require_tensors(draft_probs=draft_probs)
    device = draft_probs.device
    require_fit("draft_probs", draft_probs, ("b", "n", "vocab"), *_FLOATS)
    batch, drafts, vocab = draft_probs.shape
    require_tensors(device, draft_token_ids=draft_token_ids, target_probs=target_probs)
    require_fit("draft_token_ids", draft_token_ids, (batch, drafts), torch.int32, torch.int64)
    require_fit("target_probs", target_probs, (batch, drafts + 1, vocab), *_FLOATS)
    counts = {
        "maybe_output_accepted_token_num": maybe_output_accepted_token_num,
        "maybe_output_emitted_draft_token_num": maybe_output_emitted_draft_token_num,
    }
    for name, tensor in counts.items():
        if tensor is not None:
            require_tensors(device, **{name: tensor})
            require_fit(name, tensor, (batch,), torch.int32)
    stream = stream_of(batch, device, generator, seed, offset)
    accepted_num, emitted_num = (
        torch.zeros(batch, dtype=torch.int32, device=device) if tensor is None else tensor for tensor in counts.values()
    )
    ids = draft_token_ids.long().clamp(0, vocab - 1).unsqueeze(-1)
    p_draft, p_target = (probs[:, :drafts].gather(2, ids).squeeze(-1).double() for probs in (draft_probs, target_probs))
    accepted = uniforms(stream, drafts) * p_draft < p_target  # [b, n]
    emitted = accepted.int().cumprod(1).sum(1)  # [b]
    residual = target_probs.gather(1, emitted.view(-1, 1, 1).expand(-1, 1, vocab)).squeeze(1).float()
    if drafts:
        last = emitted.clamp(max=drafts - 1).view(-1, 1, 1).expand(-1, 1, vocab)
        drafted = draft_probs.gather(1, last).squeeze(1).float()
        residual = torch.where((emitted < drafts).unsqueeze(1), (residual - drafted).clamp(min=0.0), residual)
    token = _drawn(residual, None, stream, is_logits=False)[0]
    token_index = torch.arange(drafts + 1, device=device)
    tokens = torch.nn.functional.pad(draft_token_ids.int(), (0, 1), value=-1)
    tokens = torch.where(token_index < emitted.unsqueeze(1), tokens, -1)
    tokens = torch.where(token_index == emitted.unsqueeze(1), token.unsqueeze(1), tokens)
    accepted_num += accepted.sum(1, dtype=torch.int32)
    emitted_num += emitted.int()
    return tokens, accepted_num, emitted_num


def _check_rows(name: str, rows: Tensor) -> None:
    require_tensors(None, **{name: rows})
    require_fit(name, rows, ("rows", "vocab"), *_FLOATS)
    if not rows.shape[1]:
        raise ValueError(f"{name} must have at least one token, got {list(rows.shape)}")


def _check_nan(name: str, rows: Tensor, is_checked: bool) -> None:
    if is_checked and bool(rows.isnan().any()):
        raise ValueError(f"{name} must have no NaN with check_nan=True")


def _parameter(name: str, value: Tensor | float, rows: Tensor) -> Tensor:
    """Return a filter's parameter of each row, int32 for top_k, else float32."""
    is_count = name == "top_k"
    if isinstance(value, Tensor):
        require_tensors(rows.device, **{name: value})
        require_fit(name, value, rows.shape[:1], *((torch.int32, torch.int64) if is_count else _WIDE_FLOATS))
        if value.dtype == torch.int64:
            value = value.clamp(max=_MOST_TOKENS)
        return value.to(torch.int32 if is_count else torch.float32)
    if value is None:
        raise ValueError(f"{name} must be a number or a tensor, got None")
    if is_count:
        require_range(1, _MOST_TOKENS, top_k=value)  # type: ignore[arg-type]
    else:
        require_numbers(**{name: value})
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} must be in 0..1, got {shown(value)}")
    return torch.full(rows.shape[:1], value, dtype=torch.int32 if is_count else torch.float32, device=rows.device)


def _filtered(
    values: Tensor,
    dtype: torch.dtype,
    filters: dict[str, Any],
    *,
    is_joint: bool = False,
    is_logits: bool = False,
    is_normed: bool = False,
) -> Tensor:
    parameters = {name: _parameter(name, value, values) for name, value in filters.items()}
    top_k, top_p, min_p = (parameters.get(name) for name in ("top_k", "top_p", "min_p"))
    values = values if values.stride(1) == 1 else values.contiguous()
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    filter_probs(out, values, top_k, top_p, min_p, not is_joint, is_logits, is_normed)
    return out


def _drawn(values: Tensor, indices: Tensor | None, stream: NoiseStream, *, is_logits: bool) -> tuple[Tensor, Tensor]:
    count, device = stream.seeds.shape[0], values.device
    values = values if values.stride(1) == 1 else values.contiguous()
    rows = torch.arange(count, dtype=torch.int32, device=device) if indices is None else indices.contiguous()
    sampled = torch.empty(count, dtype=rows.dtype, device=device)
    valid = torch.empty(count, dtype=torch.bool, device=device)
    draw_tokens(sampled, valid, values, rows, stream.seeds, stream.positions, is_logits)
    return sampled, valid


def _sampled(
    probs: Tensor, draws: _Draws, return_valid: bool, *, is_joint: bool = False, **filters: Tensor | float
) -> Tensor | tuple[Tensor, Tensor]:
    _check_rows("probs", probs)
    for name, value in filters.items():
        _parameter(name, value, probs)
    stream = draws.stream(probs)
    _check_nan("probs", probs, draws.check_nan)
    if filters:
        probs = _filtered(probs, torch.float32, filters, is_joint=is_joint)
    sampled, valid = _drawn(probs, draws.indices, stream, is_logits=False)
    return (sampled, valid) if return_valid else sampled
