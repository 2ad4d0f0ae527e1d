"""Checks outputs against another implementation's logits and the documented meaning of each sampling parameter.

The logits are transformers' in float32, or, for 8-bit caches, those of a float64 Llama whose keys and values are
rounded like the cache's. Parameters are applied to them here, in float64 and by their definitions. A token is wrong if
no logits within the tolerance give it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attacks.trial import Wrong
from float64_model import Float64Model
from graphdecode import CompletionOutput, RequestOutput, SamplingParams
from graphdecode.kernels.sampling.philox import NOISE_IDS, noise_words

# of a logit of up to 20: transformers' own float32 differs by 4e-4 from float64 after 120 tokens
_APART = 1e-3
# after a key or value that a difference of 1e-6 rounds the other way in 8 bits; fp8 differs by 0.7 in the mean
_APART_BEHIND = {"auto": 1e-3, "int8": 0.6, "fp8": 12.0}
_MEAN_APART = {"auto": 1e-4, "int8": 0.02, "fp8": 0.1}  # of the log-probabilities of all tokens
_SUMS = 1e-5  # sums of probabilities


class Judge:
    """Checks the outputs of one model.

    Args:
        path: the demo's folder or file.
        cache: "auto", "int8" or "fp8".
        limit: maximum tokens of a prompt with its output.
        logits: of all tokens, given their ids; None: those of the model in `path`.
        apart: what logits may differ by.

    Attributes:
        tokens: number of compared tokens.
        unsure: those of them after a key or value that float32 may round the other way in 8 bits.
        told: number of compared log-probabilities, and `apart` the sum of their differences.
    """

    def __init__(
        self,
        path: Path,
        cache: str,
        limit: int,
        eos_token_ids: tuple[int, ...],
        logits: Callable[[list[int]], Tensor] | None = None,
        apart: float = _APART,
    ) -> None:
        from transformers import AutoTokenizer

        from graphdecode.models import resolve_model_path

        self._rounding = None if cache == "auto" else Float64Model(path, cache=cache)
        found = _by_transformers if self._rounding is None else lambda _: self._rounding.logits
        self._logits, self._apart = logits or found(path), apart
        self._apart_behind, self._mean_apart = _APART_BEHIND[cache], _MEAN_APART[cache]
        self._tokenizer: Any = AutoTokenizer.from_pretrained(resolve_model_path("demo"))
        self._limit, self._eos = limit, eos_token_ids
        self.tokens = self.unsure = self.told = 0
        self.apart = 0.0

    def compare(self, output: RequestOutput, params: SamplingParams) -> None:
        """Check all outputs of one prompt.

        Raises:
            Wrong: one of them is wrong.
        """
        if output.error is not None:
            raise Wrong(f"{params} gives {output.error}")
        for index, answer in enumerate(output.outputs):
            try:
                self._compare(output, answer, params, index)
            except Wrong as error:
                told = f"{error}; output {index} {answer.token_ids} after {output.prompt_token_ids}, {params}"
                raise Wrong(told) from None

    def compare_mean(self) -> None:
        """Check the mean difference of all log-probabilities.

        Raises:
            Wrong: it is too large.
        """
        if self.apart > self._mean_apart * self.told:
            raise Wrong(f"the mean difference of {self.told} log-probabilities is {self.apart / self.told:.3g}")

    def _compare(self, output: RequestOutput, answer: CompletionOutput, params: SamplingParams, index: int) -> None:
        prompt, tokens = output.prompt_token_ids, answer.token_ids
        logits = self._logits([*prompt, *tokens]).double()
        scores = logits.log_softmax(-1)
        sure = len(logits) if self._rounding is None else self._rounding.sure

        def apart(row: int) -> float:
            return self._apart if row < sure else self._apart_behind

        if params.prompt_logprobs is not None and output.prompt_logprobs is not None:
            if len(output.prompt_logprobs) != len(prompt):
                raise Wrong(f"{len(output.prompt_logprobs)} prompt_logprobs of {len(prompt)} tokens")
            for row, entries in enumerate(output.prompt_logprobs[1:]):
                self._compare_entries(entries, scores[row], prompt[row + 1], params.prompt_logprobs, apart(row))
        seed = (params.seed or 0) + index
        for place, token in enumerate(tokens):
            row = len(prompt) - 1 + place
            line = self._processed(logits[row], params, prompt, tokens[:place])
            self._compare_token(
                line, token, params, _exponentials(seed, len(prompt) + place, len(line)), apart(row), place
            )
            if params.logprobs is not None and answer.logprobs is not None:
                self._compare_entries(answer.logprobs[place], scores[row], token, params.logprobs, apart(row))
        if params.logprobs is not None:
            total = sum(float(scores[len(prompt) - 1 + place, token]) for place, token in enumerate(tokens))
            given = answer.cumulative_logprob
            if given is None or abs(given - total) > apart(len(logits) - 1) * len(tokens):
                raise Wrong(f"cumulative_logprob is {given}, not {total}")
        self._compare_end(answer, params, len(prompt))
        self.tokens += len(tokens)
        self.unsure += len(tokens) - max(min(sure - len(prompt) + 1, len(tokens)), 0)

    def _processed(self, logits: Tensor, params: SamplingParams, prompt: list[int], past: list[int]) -> Tensor:
        """Return the processed logits [vocab] of a token, before the temperature."""
        line, everything = logits.clone(), torch.tensor([*prompt, *past])
        for token, bias in (params.logit_bias or {}).items():
            line[token] += bias
        if params.repetition_penalty != 1.0:
            seen = everything.unique()
            by = params.repetition_penalty
            line[seen] = torch.where(line[seen] > 0, line[seen] / by, line[seen] * by)
        counts = torch.tensor(past, dtype=torch.int64).bincount(minlength=len(line)).double()
        line -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        form = None if params.structured_outputs is None else params.structured_outputs.regex
        if len(past) < params.min_tokens and form is None:
            line[[*self._eos, *(params.stop_token_ids or ())]] = -math.inf
        if params.allowed_token_ids is not None:
            forbidden = torch.ones(len(line), dtype=torch.bool)
            forbidden[list(params.allowed_token_ids)] = False
            line[forbidden] = -math.inf
        for word in params.bad_words or ():
            for spelling in (word.lstrip(), " " + word.lstrip()):
                *before, last = self._tokenizer(spelling, add_special_tokens=False).input_ids
                if past[len(past) - len(before) :] == before:
                    line[last] = -math.inf
        if form is not None:
            line[~_allowed_by(form, len(past), len(line), self._eos)] = -math.inf
        return line

    def _compare_token(
        self, line: Tensor, token: int, params: SamplingParams, exponentials: Tensor, apart: float, place: int
    ) -> None:
        """Check a token that was sampled from processed logits in a race of the vocabulary's exponential numbers."""
        apart *= 2 * max(params.repetition_penalty, 1 / params.repetition_penalty)
        if line[token] == -math.inf:
            raise Wrong(f"token {place} is forbidden")
        if params.temperature == 0:
            if line.max() - line[token] > apart:
                raise Wrong(f"token {place} is {line.max() - line[token]:.3g} below the best")
            return
        wide, apart = line / params.temperature, apart / params.temperature
        weights = (wide - wide.max()).exp()
        sure, possible = _kept(wide, weights, params, apart)
        if not possible[token]:
            raise Wrong(f"token {place} is removed by the filters")
        times = exponentials.log() - wide
        rivals = torch.where(sure, times, math.inf)
        if float(times[token] - rivals.min()) > 2 * apart + _SUMS:
            raise Wrong(f"token {place} arrives {float(times[token] - rivals.min()):.3g} behind {int(rivals.argmin())}")

    def _compare_entries(self, entries: Any, scores: Tensor, token: int, count: int, apart: float) -> None:
        """Check reported log-probabilities against scores [vocab]."""
        if entries is None or token not in entries or not max(count, 1) <= len(entries) <= count + 1:
            raise Wrong(f"{count} log-probabilities at token {token} are {entries}")
        for told, entry in entries.items():
            exact = float(scores[told])
            self.told += 1
            self.apart += abs(entry.logprob - exact)
            if abs(entry.logprob - exact) > apart:
                raise Wrong(f"the log-probability of {told} at token {token} is {entry.logprob}, not {exact}")
            above = int((scores > exact + 2 * apart).sum())
            if not above < entry.rank <= int((scores >= exact - 2 * apart).sum()):
                raise Wrong(f"the rank of {told} at token {token} is {entry.rank}, but {above} are more likely")
        if sum(entry.rank <= count for entry in entries.values()) != count:
            raise Wrong(f"not the {count} most likely are reported at token {token}: {entries}")

    def _compare_end(self, answer: CompletionOutput, params: SamplingParams, prompt: int) -> None:
        """Check an output's finish reason, its length and its text."""
        tokens, stops = answer.token_ids, set(params.stop_token_ids or ())
        if not params.ignore_eos or params.structured_outputs is not None:
            stops |= set(self._eos)
        if any(token in stops for token in tokens[:-1]):
            raise Wrong("the output continues after a stop token")
        room = self._limit - prompt
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        form = None if params.structured_outputs is None else params.structured_outputs.regex
        ended_by_token = bool(tokens) and tokens[-1] in stops
        is_full = form is not None and len(tokens) == _bounds(form)[1]
        expected = "stop" if isinstance(answer.stop_reason, str) or ended_by_token or is_full else "length"
        if answer.finish_reason != expected or (expected == "length" and len(tokens) != most) or len(tokens) > most:
            raise Wrong(
                f"the output ended by {answer.finish_reason} with {len(tokens)} of {most} tokens, not by {expected}"
            )
        shown = tokens[:-1] if ended_by_token and not params.include_stop_str_in_output else tokens
        text = str(self._tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens))
        if isinstance(answer.stop_reason, str):
            skipped = params.skip_special_tokens
            before = str(self._tokenizer.decode(tokens[: params.min_tokens], skip_special_tokens=skipped))
            at = text.find(answer.stop_reason, max(len(before) - len(answer.stop_reason) + 1, 0))
            if answer.stop_reason not in params.stop_strings or at < 0:
                raise Wrong(f"{answer.stop_reason!r} is the stop reason, but is not in {text!r}")
            text = text[: at + len(answer.stop_reason) * params.include_stop_str_in_output]
        elif not params.min_tokens and any(stop in text for stop in params.stop_strings):
            raise Wrong(f"a stop text is in {text!r}, but did not end it")
        if answer.text != text:
            raise Wrong(f"the text is {answer.text!r}, not {text!r}")
        kept = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        if form is not None and answer.finish_reason == "stop" and not re.fullmatch(form, kept):
            raise Wrong(f"{kept!r} does not match {form!r}")


def _by_transformers(path: Path) -> Callable[[list[int]], Tensor]:
    import transformers

    from graphdecode.models import resolve_model_path

    folder = resolve_model_path("demo") if path.suffix == ".gguf" else path  # the file was made from the folder
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(ids: list[int]) -> Tensor:
        return model(torch.tensor([ids])).logits[0]  # type: ignore[no-any-return, operator]

    return logits


def form_of(letters: str, least: int, most: int) -> str:
    """Return the only kind of regular expression that is checked here: a number of letters or digits of a set."""
    return f"[{letters}]{{{least},{most}}}"


def _bounds(form: str) -> tuple[int, int]:
    found = re.fullmatch(r"\[\w+\]\{(\d+),(\d+)\}", form)
    assert found is not None
    return int(found[1]), int(found[2])


def _allowed_by(form: str, length: int, vocab: int, eos_token_ids: tuple[int, ...]) -> Tensor:
    """Return bool [vocab]: the tokens that may follow a number of letters; a token is a byte."""
    least, most = _bounds(form)
    allowed = torch.zeros(vocab, dtype=torch.bool)
    if length < most:
        allowed[[ord(letter) for letter in form[1 : form.index("]")]]] = True
    allowed[list(eos_token_ids)] = length >= least
    return allowed


def _exponentials(seed: int, position: int, vocab: int) -> Tensor:
    """Return the exponential numbers of a position's race, float64 [vocab]; see `race`."""
    words = noise_words(seed, position, np.arange(-(-vocab // NOISE_IDS))).reshape(-1)[:vocab]
    return torch.from_numpy(-np.log1p(-(words + 0.5) * 2.0**-32))


def _kept(wide: Tensor, weights: Tensor, params: SamplingParams, apart: float) -> tuple[Tensor, Tensor]:
    """Return the tokens [vocab] that the filters surely and possibly keep if logits differ by at most `apart`."""
    sure = wide > -math.inf
    possible = sure.clone()
    if 0 < params.top_k < len(wide):
        least, below = wide.sort(descending=True).values[params.top_k - 1 : params.top_k + 1]
        possible &= wide >= least - apart
        sure &= (wide >= least) & ((wide > below + apart) | (below == -math.inf))
    if params.top_p < 1:
        order = wide.argsort(descending=True)
        ascending = (-wide[order]).contiguous()

        def mass_above(kept: Tensor, by: float) -> Tensor:
            """Return for each token the probability of kept tokens whose logits are larger by more than `by`."""
            sums = torch.cat([torch.zeros(1, dtype=torch.float64), (weights * kept)[order].cumsum(0)])
            return sums[torch.searchsorted(ascending, -(wide + by))]

        least_above = mass_above(sure, apart) / (weights * possible).sum()
        most_above = (mass_above(possible, -apart) - weights * (apart > 0)).clamp(min=0) / (weights * sure).sum()
        slack = apart + _SUMS
        possible = possible & (least_above < params.top_p + slack)
        sure = sure & (most_above < params.top_p - slack)
    if params.min_p > 0:
        bound = wide.max() + math.log(params.min_p)
        possible = possible & (wide >= bound - apart)
        sure = sure & (wide >= bound + apart)
    return sure, possible
