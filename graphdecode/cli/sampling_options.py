"""Options of the shell that say how answers are sampled; None where they were left out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from graphdecode.errors import ArgumentError

_CHECKPOINTS = "Left out: the checkpoint's."

AnswersOption = Annotated[int | None, typer.Option("-n", "--n", help="Answers to each prompt.")]
TemperatureOption = Annotated[float | None, typer.Option(help=f"0 is greedy. {_CHECKPOINTS}")]
TopKOption = Annotated[int | None, typer.Option(help=f"Of the k most likely tokens; 0 is all. {_CHECKPOINTS}")]
TopPOption = Annotated[float | None, typer.Option(help=f"Of the likeliest tokens of this much mass. {_CHECKPOINTS}")]
MinPOption = Annotated[
    float | None, typer.Option(help=f"Of the tokens at least this likely beside the likeliest. {_CHECKPOINTS}")
]
RepetitionPenaltyOption = Annotated[
    float | None, typer.Option(help=f"Divides logits of tokens that occurred; 1 is off. {_CHECKPOINTS}")
]
PresencePenaltyOption = Annotated[float | None, typer.Option(help="Taken from logits of generated tokens.")]
FrequencyPenaltyOption = Annotated[float | None, typer.Option(help="The same, for each time that they came.")]
LogitBiasOption = Annotated[
    list[str] | None, typer.Option(metavar="ID=VALUE", help="Added to a token's logit; may be repeated.")
]
LogprobsOption = Annotated[int | None, typer.Option(help="So many likely tokens at each place; with --json.")]
SeedOption = Annotated[int | None, typer.Option(help="Of the sampling; left out: the configuration's.")]
StopOption = Annotated[list[str] | None, typer.Option(help="Text that ends an answer; may be repeated.")]

_MORE: dict[str, Any] = {  # a field of `SamplingParams`, and its option
    "min_tokens": Annotated[int | None, typer.Option(help="Tokens before which nothing ends an answer.")],
    "prompt_logprobs": Annotated[int | None, typer.Option(help="As --logprobs, at each place of the prompt.")],
    "truncate_prompt_tokens": Annotated[
        int | None, typer.Option(help="Last tokens of a longer prompt that are kept; -1: those that leave room.")
    ],
    "allowed_token_ids": Annotated[
        list[int] | None, typer.Option("--allowed-token-id", help="No others are generated; may be repeated.")
    ],
    "bad_words": Annotated[
        list[str] | None, typer.Option("--bad-word", help="Text that is not generated; may be repeated.")
    ],
    "stop_token_ids": Annotated[
        list[int] | None, typer.Option("--stop-token-id", help="Ends an answer; may be repeated.")
    ],
    "include_stop_str_in_output": Annotated[
        bool | None, typer.Option("--include-stop-str-in-output", help="Let the text end with what stopped it.")
    ],
    "skip_special_tokens": Annotated[
        bool | None, typer.Option("--skip-special-tokens/--no-skip-special-tokens", help="Out of the text.")
    ],
    "ignore_eos": Annotated[bool | None, typer.Option("--ignore-eos", help="Go on after the end of the sequence.")],
}


def more_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options above as well; those that were given come as `more`, by the fields' names."""

    @functools.wraps(command)
    def taking(**given: Any) -> None:
        values = {name: given.pop(name, None) for name in _MORE}
        command(**given, more={name: value for name, value in values.items() if value is not None and value != []})

    own = inspect.signature(command, eval_str=True)
    parameters = [parameter for name, parameter in own.parameters.items() if name != "more"]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters += [inspect.Parameter(name, kind, default=None, annotation=option) for name, option in _MORE.items()]
    taking.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    taking.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return taking


def sampling_fields(*, logit_bias: list[str] | None, **options: Any) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that were given, by their names.

    Args:
        logit_bias: as it was typed.
        options: the others; None means left out.

    Raises:
        ArgumentError: a bias is none.
    """
    given = {name: value for name, value in options.items() if value is not None}
    return given | ({"logit_bias": dict(map(_bias, logit_bias))} if logit_bias else {})


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ArgumentError(f"--logit-bias must be a token id and a number, such as 42=-5, got {text!r}") from None
