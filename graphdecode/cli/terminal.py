"""Terminal output: word wrap, hidden typing, progress of the prompt, figures of a run."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

from rich.cells import cell_len

if TYPE_CHECKING:
    from graphdecode.text import LLM, Conversation, RequestOutput

_SILENT_SECONDS = 1.0  # before the progress of the prompt is shown
_TAB = 8
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_LONGEST_PERIOD = 64  # tokens
_REPEATS, _REPEATED_TOKENS = 4, 48  # both at least
_CONTROLS = ("Cc", "Cs")  # Unicode categories: control characters and surrogates
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # controls of bidirectional text


class WrappedText:
    """Prints text on standard output; in a terminal words are wrapped, and control characters are shown escaped.

    Thoughts are dimmed in a terminal, and left out elsewhere.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._column = 0
        self._word = ""  # the last word on this line; a word that fills a line does not count
        self._has_begun = self._in_thought = False

    def write(self, piece: str, *, is_thought: bool = False) -> None:
        """Print a piece."""
        self._has_begun = True
        if is_thought and not self._is_terminal:
            return
        if is_thought != self._in_thought:
            self._in_thought = is_thought
            print(_DIM if is_thought else f"{_PLAIN}\n\n", end="")
            self._column, self._word = 0, ""
        if self._is_terminal:
            width = shutil.get_terminal_size().columns
            piece = "".join(self._wrapped(character, width - 1) for character in piece)
        print(piece, end="", flush=True)

    def close(self) -> None:
        """End the line, if there is one."""
        if self._has_begun:
            print(_PLAIN * self._in_thought, flush=True)

    def _wrapped(self, character: str, limit: int) -> str:
        """Return the output for a character, with at most `limit` columns of a line used."""
        if character == "\n":
            self._column, self._word = 0, ""
            return character
        if character == "\t":
            character = " " * (_TAB - self._column % _TAB)
        elif unicodedata.category(character) in _CONTROLS or character in _DIRECTIONS:
            character = character.encode("unicode_escape").decode()
        size = cell_len(character)
        if self._column + size <= limit:
            self._column += size
            self._word = "" if character.isspace() else self._word + character
            return character
        word, self._word = self._word, ""
        if character.isspace():
            self._column = 0
            return "\n"
        back = cell_len(word)
        if back == self._column:  # the word began this line
            self._column = size
            return "\n" + character
        self._column, self._word = back + size, word + character
        return (f"\x1b[{back}D\x1b[K" if back else "") + "\n" + word + character


def run_summary(llm: LLM, outputs: Sequence[RequestOutput], load_seconds: float, seconds: float) -> str:
    """Return one line about the run of an `LLM`: times, tokens/s, buckets, padding, backend and kernels."""
    from graphdecode.kernels.native import library as native
    from graphdecode.kernels.native.instructions import instructions

    tokens, device_type = llm.stats.generated_tokens, llm.device.type
    parts = [
        f"ready after {load_seconds:.2f} s",
        f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s",
    ]
    first = [time for output in outputs if (time := output.metrics.time_to_first_token) is not None]
    if first:
        parts.append(f"first token after {1000 * median(first):.1f} ms")
    parts += [*llm.stats.step_times(), *llm.stats.shares(), f"{llm.graphs.backend} backend on {device_type}"]
    reason = None if device_type == "cuda" else native.unavailable_reason()
    if reason is not None:
        parts.append(f"torch's operators ({' '.join(reason.split())})")
    else:
        parts.append("Triton kernels" if device_type == "cuda" else f"compiled kernels ({instructions().name})")
    return "; ".join(parts)


@contextmanager
def typing_hidden() -> Iterator[None]:
    """Turn echo off; what is typed stays in the terminal's buffer for the next reader."""
    if os.name != "posix" or not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    quiet = list(before)
    quiet[3] = (quiet[3] & ~(termios.ECHO | termios.ICANON)) | termios.NOFLSH  # Ctrl-C does not drop it either
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


@contextmanager
def prompt_progress(conversation: Conversation) -> Iterator[None]:
    """Show the progress of a long prompt on standard error if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    stats = conversation.llm.stats
    began = stats.prefilled_tokens

    def show(done: threading.Event) -> None:
        shown = ""
        until = time.monotonic() + _SILENT_SECONDS
        while not done.wait(max(until - time.monotonic(), 0.1)):
            if (request := conversation.last) is None or request.metrics is None:
                continue
            total = len(request.prompt_token_ids) - request.metrics.num_cached_tokens
            shown = f"reading the prompt: {min(stats.prefilled_tokens - began, total)} of {total} tokens"
            print(f"\r{shown}\x1b[K", end="", file=sys.stderr, flush=True)
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    with run_beside("reading", show):
        yield


@contextmanager
def run_beside(name: str, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread during the context; its event is set at the end, and the thread is joined."""
    done = threading.Event()
    thread = threading.Thread(target=work, args=(done,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def repeats_at_the_end(token_ids: Sequence[int]) -> int:
    """Return how often an output repeats itself at its end; 0 if it does not."""
    for period in range(1, _LONGEST_PERIOD + 1):
        run = 0
        while run + period < len(token_ids) and token_ids[-1 - run] == token_ids[-1 - run - period]:
            run += 1
        if run + period >= max(_REPEATED_TOKENS, _REPEATS * period):
            return (run + period) // period
    return 0
