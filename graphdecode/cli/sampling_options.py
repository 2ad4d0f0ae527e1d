"""Options of the shell that say how answers are sampled; None where they were left out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from graphdecode.errors import ArgumentError

_CHECKPOINTS = "Left out: the checkpoint's."

_OPTIONS: dict[str, Any] = {  # a field of `SamplingParams`, and its option
    "n": Annotated[int | None, typer.Option("-n", "--n", help="Answers to each prompt.")],
    "temperature": Annotated[float | None, typer.Option(min=0.0, help=f"0 is greedy. {_CHECKPOINTS}")],
    "top_k": Annotated[int | None, typer.Option(help=f"Of the k most likely tokens; 0 is all. {_CHECKPOINTS}")],
    "top_p": Annotated[float | None, typer.Option(help=f"Of the likeliest tokens of this much mass. {_CHECKPOINTS}")],
    "min_p": Annotated[
        float | None, typer.Option(help=f"Of the tokens at least this likely beside the likeliest. {_CHECKPOINTS}")
    ],
    "repetition_penalty": Annotated[
        float | None, typer.Option(help=f"Divides logits of tokens that occurred; 1 is off. {_CHECKPOINTS}")
    ],
    "presence_penalty": Annotated[float | None, typer.Option(help="Taken from logits of generated tokens.")],
    "frequency_penalty": Annotated[float | None, typer.Option(help="The same, for each time that they came.")],
    "logit_bias": Annotated[
        list[str] | None, typer.Option(metavar="ID=VALUE", help="Added to a token's logit; may be repeated.")
    ],
    "logprobs": Annotated[int | None, typer.Option(help="So many likely tokens at each place; with --json.")],
    "seed": Annotated[int | None, typer.Option(help="Of the sampling; left out: the configuration's.")],
    "stop": Annotated[list[str] | None, typer.Option(help="Text that ends an answer; may be repeated.")],
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
ALL = tuple(_OPTIONS)
OF_A_CHAT = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
)


def sampling(*fields: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of some fields of `SamplingParams`; those that were given come as `sampling`.

    Args:
        fields: by their names.
    """

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def taking(**given: Any) -> None:
            values = {name: given.pop(name, None) for name in fields}
            command(
                **given,
                sampling=_with_biases({name: value for name, value in values.items() if value not in (None, [])}),
            )

        own = inspect.signature(command, eval_str=True)
        parameters = [parameter for name, parameter in own.parameters.items() if name != "sampling"]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters += [inspect.Parameter(name, kind, default=None, annotation=_OPTIONS[name]) for name in fields]
        taking.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        taking.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return taking

    return with_options


def _with_biases(given: dict[str, Any]) -> dict[str, Any]:
    """Return fields of `SamplingParams`, of which the biases come as they were typed.

    Raises:
        ArgumentError: a bias is none.
    """
    return given | ({"logit_bias": dict(map(_bias, given["logit_bias"]))} if "logit_bias" in given else {})


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ArgumentError(f"--logit-bias must be a token id and a number, such as 42=-5, got {text!r}") from None
