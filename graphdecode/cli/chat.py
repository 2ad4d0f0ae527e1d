"""`graphdecode chat`: a session, messages on the command line, or a message through a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphdecode.cli.checkpoint import find_model, fitted, load_checkpoint
from graphdecode.cli.options import (
    MODEL_OPTIONS,
    ConfigOption,
    TokenizerOption,
    ctrl_c_blocked,
    print_error,
    print_message,
    settings_of,
    stdin_text,
    with_options,
    with_settings,
)
from graphdecode.cli.terminal import (
    WrappedText,
    prompt_progress,
    repeats_at_the_end,
    run_beside,
    run_summary,
    typing_hidden,
)
from graphdecode.config.sampling_params import SamplingParams
from graphdecode.config.settings import is_in_file
from graphdecode.errors import ArgumentError, GraphdecodeError, cause

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyPressEvent

    from graphdecode.text import Conversation, RequestOutput

_COMMAND = re.compile(r"/(\w+)(?:\s+(.*))?", re.DOTALL)  # and not a path such as /etc/hosts
_HELP = """\
/system TEXT   set the system message; without TEXT: the template's default
/reset         start over
/save FILE     write the conversation to a new file: messages as JSON if its name ends in .json, else Markdown
/help          show this
/quit          leave, as exit, quit and Ctrl-D do
Enter sends; Esc and then Enter, or Alt-Enter, begins another line; Up and Down go through the history.
Ctrl-C stops the output. What is typed meanwhile is kept for the next line."""
_LEAVE = ("exit", "quit")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", *_PENALTIES, "seed", "stop", "thinking_token_budget")
_print_message = partial(print_message, style="dim")


def make_prompt_session(**options: Any) -> PromptSession[str]:
    """Return the line editor of a session, with the history of earlier ones; `options` are of `PromptSession`."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _another_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history: History
    file = history_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        file.parent.chmod(0o700)  # private
        file.chmod(0o600)
        history = FileHistory(file)
    except OSError as error:
        print_message(f"the history is not kept: {cause(error)}: {file}")
        history = InMemoryHistory()
    return PromptSession(
        "> ", history=history, key_bindings=keys, prompt_continuation="  ", reserve_space_for_menu=0, **options
    )


def history_file() -> Path:
    """Return the file of the history, in the user's folder for state."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "graphdecode" / "chat_history"


class ChatSession:
    """Reads messages and commands from `prompt`, and prints outputs, until the user leaves."""

    def __init__(self, conversation: Conversation, prompt: PromptSession[str]) -> None:
        self._conversation = conversation
        self._prompt = prompt

    def run(self) -> None:
        """Read and answer until the user leaves."""
        while True:
            try:
                with run_beside("capturing", self._capture):
                    line = self._prompt.prompt().strip()
                if line.lower() in _LEAVE:
                    return
                if line:
                    self._handle(line)
            except KeyboardInterrupt:  # drops the line, as in a shell
                continue
            except EOFError:
                return

    def _capture(self, done: threading.Event) -> None:
        while not done.is_set() and self._conversation.llm.engine.capture_waiting():
            pass

    def _handle(self, line: str) -> None:
        command = _COMMAND.fullmatch(line)
        try:
            if command is None:
                self._answer(line)
            else:
                self._command(command[1], command[2] or "")
        except OSError as error:
            print_error(f"{cause(error)}: {error.filename}" if error.filename else cause(error))
        except GraphdecodeError as error:
            print_error(" ".join(str(error).split()))

    def _answer(self, line: str) -> None:
        messages_before = len(self._conversation.messages)
        try:
            with typing_hidden():
                answer(self._conversation, line)
        except KeyboardInterrupt:
            if len(self._conversation.messages) == messages_before:
                _print_message("stopped before the first token; the message is dropped")
            else:
                _print_message("stopped; the output so far stays in the conversation")
                _warn_of_repeats(self._conversation)
        else:
            print_figures(self._conversation)

    def _command(self, name: str, text: str) -> None:
        match name:
            case "help":
                _print_message(_HELP)
            case "exit" | "quit":
                raise EOFError
            case "reset":
                self._conversation.reset()
                _print_message("the conversation starts over")
            case "system":
                self._conversation.system = text or None
                _print_message("system message: " + (text or "the template's default"))
            case "save":
                self._save(text)
            case _:
                print_error(f"unknown command /{name}; /help lists all")

    def _save(self, name: str) -> None:
        if not name:
            print_error("/save needs the name of a file")
            return
        file, messages = Path(name).expanduser(), self._conversation.all_messages()
        with file.open("x", encoding="utf-8") as opened:  # fails if it exists
            if file.suffix == ".json":
                json.dump(messages, opened, ensure_ascii=False, indent=1)
            else:
                opened.write("\n".join(f"## {each['role']}\n\n{each['content'].strip()}\n" for each in messages))
        _print_message(f"wrote {len(messages)} messages to {file}")


def answer(conversation: Conversation, text: str) -> None:
    """Send a message, and print the output as it comes."""
    from graphdecode.text.chat_formats import Content, Reasoning

    forgotten = conversation.num_forgotten
    with contextlib.closing(WrappedText()) as shown, contextlib.closing(conversation.say(text)) as pieces:
        with prompt_progress(conversation):
            first = next(pieces, Content(""))
        for piece in chain([first], pieces):
            shown.write(piece.text, is_thought=isinstance(piece, Reasoning))
    limit, request = conversation.llm.capacity.token_limit, conversation.last
    if request is not None and request.outputs[0].finish_reason == "length":
        tokens = len(request.outputs[0].token_ids)
        is_full = len(request.prompt_token_ids) + tokens >= limit
        reason = f"the limit of {limit} tokens is reached (--max-sequence-length)" if is_full else "--max-tokens"
        _print_message(f"the output was cut after {tokens} token{'s' * (tokens != 1)}: {reason}")
    _warn_of_repeats(conversation)
    if conversation.num_forgotten != forgotten:
        _print_message(
            f"the conversation has more than {limit} tokens: the oldest {conversation.num_forgotten} messages are not "
            "in the prompt; /reset starts over"
        )


def print_figures(conversation: Conversation) -> None:
    """Print the speed of the latest output, and the tokens used, on standard error."""
    request = conversation.last
    metrics = None if request is None else request.metrics
    if request is None or metrics is None or metrics.finished_time is None:
        return
    output = request.outputs[0]
    tokens, prompt, limit = len(output.token_ids), len(request.prompt_token_ids), conversation.llm.capacity.token_limit
    seconds = metrics.finished_time - metrics.arrival_time
    first = metrics.time_to_first_token
    parts = [f"{tokens} tokens, {tokens / seconds:.1f} tokens/s"]
    if first is not None:
        parts.append(f"first token after {1000 * first:.0f} ms")
    parts.append(f"{metrics.num_cached_tokens} of {prompt} prompt tokens from the cache")
    parts.append(f"{prompt + tokens} of {limit} tokens used")
    _print_message("; ".join(parts))


def _warn_of_repeats(conversation: Conversation) -> None:
    times = 0 if conversation.last is None else repeats_at_the_end(conversation.last.outputs[0].token_ids)
    if times:
        _print_message(
            f"the output repeats itself {times} times, as small models may; Ctrl-C stops it, --repetition-penalty 1.1 "
            "makes it less likely"
        )


@with_options("sampling", (SamplingParams,), *_SAMPLING_OPTIONS)
@with_settings("max_sequence_length", *MODEL_OPTIONS)
def chat(
    overrides: dict[str, Any],
    sampling: dict[str, Any],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[MESSAGE]", help="The message; none: a session, or what is piped in.")
    ] = None,
    then: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A message to send after the output; may be repeated.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="What `graphdecode models` lists, a checkpoint folder or file, or a repository id.")
    ] = "smollm2",
    system: Annotated[str | None, typer.Option(help="The system message; left out: the template's.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A template in Jinja; left out: the model's own.")
    ] = None,
    lora: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A low-rank adapter: a folder of PEFT, or a GGUF file.")
    ] = None,
    config: ConfigOption = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an output at most.")] = 1024,
    tokenizer: TokenizerOption = None,
) -> None:
    """Chat with a model. Outputs are streamed to stdout, all else goes to stderr.

    Without a message: a session in the terminal (/help lists its commands), or one message from a pipe.
    """
    began = time.perf_counter()
    if then and not words:
        raise ArgumentError("--then follows a message: give that first, or the text as the message")
    messages = [" ".join(words), *(then or [])] if words else []
    is_session = not messages and sys.stdin.isatty()
    if not messages and not is_session:
        messages = [stdin_text().strip()]
    if not all(message.strip() for message in messages):
        raise ArgumentError("there is no message: give one, pipe one in, or run this in a terminal")
    with typing_hidden():  # for the first prompt
        settings = settings_of(config, **overrides)
        if lora is not None and not settings.max_adapters:
            settings = settings.with_settings(max_adapters=1)
        sampling_args = {"seed": settings.seed, **sampling, "max_tokens": max_tokens}
        SamplingParams(**sampling_args)  # fails before the slow imports, as does a wrong model
        paths = find_model(model, tokenizer)
        with ctrl_c_blocked():
            from graphdecode import LLM, LoRARequest
            from graphdecode.memory import collector_spared
            from graphdecode.text import Conversation, render_chat

        checkpoint = load_checkpoint(paths, settings, overrides.get("max_sequence_length"))
        first = {"role": "user", "content": messages[0] if messages else "Hello"}
        render_chat(checkpoint.tokenizer, [first], chat_template=chat_template)  # fails without a template
        may_defer, length = not is_in_file(config, "capture_when"), checkpoint.trained_length
        settings = fitted(settings, [1], None, outputs=1, trained_length=length, may_defer=may_defer)
        llm = LLM(checkpoint.path, config=settings, tokenizer=checkpoint.tokenizer, progress=True)
    with llm, collector_spared():
        params = replace(llm.default_chat_params(), **sampling_args)
        conversation = Conversation(
            llm,
            system=system,
            sampling_params=params,
            chat_template=chat_template,
            lora_request=None if lora is None else LoRARequest(lora.name or "adapter", 1, lora.absolute()),
        )
        if is_session:
            print_message(
                f"{model} in {str(llm.model.dtype).removeprefix('torch.')} on {llm.device.type}, ready after "
                f"{llm.load_seconds:.2f} s, up to {llm.capacity.token_limit} tokens; /help lists commands, "
                "Ctrl-D leaves"
            )
            ChatSession(conversation, make_prompt_session()).run()
        else:
            _say(conversation, messages, time.perf_counter() - began)


def _say(conversation: Conversation, messages: list[str], load_seconds: float) -> None:
    """Print the output for each message, and one line of figures."""
    outputs: list[RequestOutput] = []
    ready = time.perf_counter()
    for message in messages:
        if len(messages) > 1:
            print(f">>> {message}", flush=True)
        answer(conversation, message)
        if conversation.last is not None:
            outputs.append(conversation.last)
    print_message(run_summary(conversation.llm, outputs, load_seconds, time.perf_counter() - ready))
