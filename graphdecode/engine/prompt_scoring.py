"""Log-probabilities of a prompt's tokens, from the logits that predict them: a piece at a time, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from graphdecode.engine.steps.row_inputs import StepLogprobs
from graphdecode.kernels.sampling.logprobs import token_logprobs
from graphdecode.kernels.sampling.sampling_slots import FLAG_LOGPROBS, LogprobOutputs
from graphdecode.models import Model

_PLACES = 128  # whose logits are held at once


class PromptScoring:
    """Reduces logits to log-probabilities on the device, with the operator that a decode step does it with.

    Args:
        max_logprobs: most likely tokens at each place that are returned at most.
        model: whose logits they are.
    """

    def __init__(self, max_logprobs: int, model: Model) -> None:
        device, width = model.device, min(max_logprobs, model.config.vocab_size)

        def empty(*sizes: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(_PLACES, *sizes, dtype=dtype, device=device)

        self._outputs = LogprobOutputs(
            sampled_logprob=empty(dtype=torch.float32),
            sampled_rank=empty(dtype=torch.int32),
            top_logprobs=empty(width, dtype=torch.float32),
            top_ids=empty(width, dtype=torch.int32),
        )
        self._flags = torch.full((_PLACES,), FLAG_LOGPROBS, dtype=torch.int32, device=device)
        self._wanted = torch.zeros(_PLACES, dtype=torch.int32, device=device)
        self._live = torch.full((1,), _PLACES, dtype=torch.int32, device=device)

    def run(
        self, logits_of: Callable[[int, int], Tensor], begin: int, tokens: Sequence[int], num_logprobs: int
    ) -> StepLogprobs:
        """Return the log-probabilities of some tokens, each at the place before it.

        Args:
            logits_of: returns the logits [end - begin, vocab] of the places `begin` to `end`.
            begin: the first place.
            tokens: what stands behind each place from there on.
            num_logprobs: most likely tokens to return for each.
        """
        found = StepLogprobs([], [], [], [])
        self._wanted.fill_(num_logprobs)
        targets = torch.tensor(tokens, dtype=torch.int64).to(self._flags.device)
        for first in range(0, len(tokens), _PLACES):
            count = min(_PLACES, len(tokens) - first)
            outputs = LogprobOutputs(*(output[:count] for output in self._outputs))
            logits = logits_of(begin + first, begin + first + count)
            asked = (self._live, self._flags[:count], self._wanted[:count])
            token_logprobs(outputs, logits, targets[first : first + count], *asked)
            found.sampled.extend(outputs.sampled_logprob.tolist())
            found.ranks.extend(outputs.sampled_rank.tolist())
            found.top.extend(outputs.top_logprobs[:, :num_logprobs].tolist())
            found.top_ids.extend(outputs.top_ids[:, :num_logprobs].tolist())
        return found
