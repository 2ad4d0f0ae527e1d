"""From prompts to requests of tokens, and to the answers that their events will fill."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphdecode.engine import Engine, Request, RequestError, RequestMetrics, SamplingParams
from graphdecode.engine.engine import derived_seed
from graphdecode.errors import ArgumentError, shown
from graphdecode.text.answer import Answer
from graphdecode.text.outputs import CompletionOutput, RequestOutput
from graphdecode.text.tokenizer import is_tokenizers_own


@dataclass(frozen=True)
class Order:
    """One prompt, ready to be handed in.

    Attributes:
        output: what its caller gets.
        requests: what the engine gets, each with the answer that its events go to; none where the prompt was refused.
    """

    output: RequestOutput
    requests: list[tuple[Request, Answer]]

    @property
    def answers(self) -> list[Answer]:
        """The answers, `n` of them, or none."""
        return [answer for _, answer in self.requests]


class Intake:
    """Encodes prompts, refuses what can never be served, and resolves what is text in the parameters.

    Args:
        engine: what will serve them.
        tokenizer: of transformers.
    """

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._encoding = threading.Lock()  # the tokenizer keeps settings of the call that runs
        self._numbers = itertools.count()

    def encode(self, prompt: str | list[int]) -> list[int]:
        """Return a prompt's token ids; ids that were given are left as they are, and `order` looks at them.

        Raises:
            ArgumentError: the tokenizer fails at this text.
        """
        if not isinstance(prompt, str):
            return prompt
        try:
            with self._encoding:
                ids = list(self._tokenizer(prompt, verbose=False).input_ids)
        except BaseException as error:
            if not is_tokenizers_own(error):
                raise
            raise ArgumentError(
                f"the tokenizer fails at the prompt {shown(prompt)}: {type(error).__name__}: {error}"
            ) from error
        if not ids and self._tokenizer.bos_token_id is not None:
            ids = [self._tokenizer.bos_token_id]
        return ids

    def order(self, prompt: str | list[int], token_ids: list[int], params: SamplingParams) -> Order:
        """Return what a prompt becomes; one that can never be served comes back refused, with `output.error` set."""
        number = next(self._numbers)
        outputs = [CompletionOutput(index) for index in range(params.n)]
        text = prompt if isinstance(prompt, str) else None
        output = RequestOutput(number, text, token_ids, outputs, RequestMetrics(time.perf_counter()))
        seed = derived_seed(self._engine.seed, number) if params.seed is None else params.seed
        requests = []
        for answer_output in outputs:
            own_seed = seed if answer_output.index == 0 else derived_seed(seed, answer_output.index)
            request = Request(token_ids, replace(params, n=1, stop=None, seed=own_seed))
            requests.append((request, Answer(answer_output, output, params, self._tokenizer.backend_tokenizer)))
        try:
            self._engine.check(requests[0][0])
        except RequestError as error:
            output.error = str(error)
            for answer_output in outputs:
                answer_output.finish_reason = "refused"
            return Order(output, [])
        return Order(output, requests)


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Return the parameters of each of some prompts.

    Args:
        params: for all prompts, or one for each; None means the defaults.
        count: of the prompts.

    Raises:
        ValueError: they are something else, or not as many.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence):
        raise ArgumentError(f"sampling_params must be SamplingParams, one or a list, got {shown(params)}")
    wrong = [type(item).__name__ for item in params if not isinstance(item, SamplingParams)]
    if wrong:
        raise ArgumentError(f"sampling_params must be SamplingParams, one or a list, got {wrong[0]}")
    if len(params) != count:
        raise ArgumentError(f"there are {count} prompts and {len(params)} sampling_params")
    return list(params)
