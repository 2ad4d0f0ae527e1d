"""What it takes to make of a body what the engine is asked: a tokenizer, a template, limits; here or in a child."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from graphdecode.config import ServerConfig
from graphdecode.engine import SamplingParams
from graphdecode.engine.request import RequestRules
from graphdecode.errors import GraphdecodeError
from graphdecode.kernels.sampling.sampling_slots import MASK_BITS
from graphdecode.server.http_errors import HttpError
from graphdecode.text.intake import Asked, Intake, Resolved
from graphdecode.text.prompts import as_prompt


class Serves(NamedTuple):
    """What an `Intake` asks of an engine that is elsewhere."""

    rules: RequestRules
    seed: int


class Desk:
    """Makes prompts and parameters ready for the engine; it can be sent to another process.

    Args:
        model_name: what clients call the model.
        tokenizer: of transformers.
        limits: of the server.
        sampling_defaults: of the checkpoint.
        serves: what the engine can serve.
        max_open: answers that run and wait at a time.
    """

    def __init__(
        self,
        model_name: str,
        tokenizer: Any,
        limits: ServerConfig,
        sampling_defaults: SamplingParams,
        serves: Serves,
        max_open: int,
    ) -> None:
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.limits = limits
        self.sampling_defaults = sampling_defaults
        self.serves = serves
        self.max_open = max_open
        self.intake = self._made_intake()

    def _made_intake(self) -> Intake:
        return Intake(self.serves, self.tokenizer)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "intake"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.intake = self._made_intake()

    @property
    def mask_words(self) -> int:
        """Of the mask of a token."""
        return -(-self.serves.rules.vocab_size // MASK_BITS)

    def warm(self) -> Desk:
        """Return this, with what all forms share made; where forms cannot be read, each of them says so."""
        with suppress(GraphdecodeError):
            self.intake.grammars.warm()
        return self

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model; None is this one.

        Raises:
            HttpError: it is for another one.
        """
        if name is not None and name != self.model_name:
            raise HttpError(
                404,
                f"the model {name[:200]!r} does not exist; there is {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def asked(self, params: SamplingParams, prompts: int, *, priority: int, has_form: bool) -> Asked:
        """Return what a request asks for, whatever its prompts are.

        Args:
            params: of all answers.
            prompts: as many.
            priority: the lowest is served first.
            has_form: the answers are to have a form.

        Raises:
            HttpError: there are too many prompts, or answers.
            ArgumentError: no prompt can be served with these parameters.
        """
        most = self.limits.max_prompts
        if not 1 <= prompts <= most:
            raise HttpError(400, f"prompt must be 1..{most} prompts, got {prompts}", param="prompt")
        if params.n > self.limits.max_answers:
            raise HttpError(400, f"n must be at most {self.limits.max_answers}, got {params.n}", param="n")
        if prompts * params.n > self.max_open:
            raise HttpError(
                400,
                f"n: {prompts} prompts with {params.n} answers each are {prompts * params.n}, and {self.max_open} "
                "answers at most run and wait at a time (max_batch_size and max_waiting)",
                param="n" if params.n > 1 else "prompt",
            )
        return self.intake.asked(params, priority=priority, has_form=has_form)

    def resolved(self, prompt: str | list[int], asked: Asked, *, special: bool = True) -> Resolved:
        """Return a prompt in tokens.

        Args:
            prompt: text or token ids.
            asked: of its answers.
            special: add the special tokens that the tokenizer begins a text with.

        Raises:
            ArgumentError: it is no prompt, or can never be served.
        """
        prompt = as_prompt(prompt)
        return self.intake.resolved(prompt, self.intake.encode(prompt, special=special), asked)
