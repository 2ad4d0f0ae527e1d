"""Options of the shell that say how answers are sampled; None where they were left out."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from graphdecode.errors import ArgumentError

_CHECKPOINTS = "Left out: the checkpoint's."

MinTokensOption = Annotated[int | None, typer.Option(help="Tokens before which nothing ends an answer.")]
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
