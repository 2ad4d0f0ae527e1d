"""`graphdecode chat`: talk with a model, in a session, in one line, or through a pipe."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphdecode.cli.capacity import fitted
from graphdecode.cli.checkpoint import find_checkpoint
from graphdecode.cli.options import (
    OF_A_MODEL,
    STDERR,
    ConfigOption,
    TokenizerOption,
    overriding,
    settings_of,
    stdin_text,
)
from graphdecode.cli.sampling_options import OF_A_CHAT, sampling
from graphdecode.errors import ArgumentError

if TYPE_CHECKING:
    from graphdecode.text import Conversation, RequestOutput, RunSummary


@sampling(*OF_A_CHAT)
@overriding("max_sequence_length", *OF_A_MODEL)
def chat(
    overrides: dict[str, Any],
    sampling: dict[str, Any],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[MESSAGE]", help="What to say; none: a session, or what is piped in.")
    ] = None,
    then: Annotated[list[str] | None, typer.Option(help="What to say after the answer; may be repeated.")] = None,
    model: Annotated[
        str, typer.Option(help="What `graphdecode models` lists, a checkpoint folder or file, or a repository id.")
    ] = "smollm2",
    system: Annotated[str | None, typer.Option(help="How the model is to behave; left out: its template's.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A template in Jinja; left out: the model's own.")
    ] = None,
    config: ConfigOption = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 1024,
    tokenizer: TokenizerOption = None,
) -> None:
    """Talk with a model. Answers go to stdout as they come, all else to stderr.

    Without a message: a session in the terminal, where /help tells more; a text that is piped in is one message.
    """
    began = time.perf_counter()
    turns = [" ".join(words), *(then or [])] if words else list(then or [])
    is_session = not turns and sys.stdin.isatty()
    if not turns and not is_session:
        turns = [stdin_text().strip()]
    if any(not turn.strip() for turn in turns):
        raise ArgumentError("there is no message: give one, pipe one in, or run it in a terminal")
    settings = settings_of(config, **overrides)
    from graphdecode import LLM, SamplingParams
    from graphdecode.cli.chat_session import ChatSession, make_prompt_session
    from graphdecode.text import Conversation, RunSummary, render_chat

    given = {"seed": settings.seed, **sampling, "max_tokens": max_tokens}
    SamplingParams(**given)  # what cannot be is said before a model is looked for
    checkpoint = find_checkpoint(model, tokenizer, settings, overrides.get("max_sequence_length"))
    messages = [{"role": "user", "content": turns[0] if turns else "Hello"}]
    render_chat(
        checkpoint.tokenizer, messages, chat_template=chat_template
    )  # no template: said before the weights are read
    settings = fitted(settings, [1], None, answers=1, trained_length=checkpoint.trained_length)
    with LLM(checkpoint.path, config=settings, tokenizer=checkpoint.tokenizer, progress=True) as llm:
        params = replace(llm.default_chat_params(), **given)
        conversation = Conversation(llm, system=system, sampling_params=params, chat_template=chat_template)
        if is_session:
            _greet(model, conversation)
            ChatSession(conversation, make_prompt_session()).run()
        else:
            _say(conversation, turns, RunSummary(llm, load_seconds=time.perf_counter() - began))


def _greet(model: str, conversation: Conversation) -> None:
    llm = conversation.llm
    STDERR.print(
        f"{model} in {str(llm.model.dtype).removeprefix('torch.')} on {llm.device.type}, ready after "
        f"{llm.load_seconds:.2f} s, room for {llm.capacity.token_limit} tokens; /help lists commands, Ctrl-D leaves",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _say(conversation: Conversation, turns: list[str], summary: RunSummary) -> None:
    """Print the answer to each turn, under what was said where there are several, and one line of figures."""
    from graphdecode.cli.chat_session import answer

    outputs: list[RequestOutput] = []
    try:
        for turn in turns:
            if len(turns) > 1:
                print(f">>> {turn}", flush=True)
            answer(conversation, turn)
            if conversation.last is not None:
                outputs.append(conversation.last)
    except KeyboardInterrupt:
        print(flush=True)
        raise
    STDERR.print(summary.line(outputs), highlight=False, soft_wrap=True)
