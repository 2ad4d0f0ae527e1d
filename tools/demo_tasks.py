"""The three tasks of the demo model, with answers that a program can check.

The trainer, the evaluation and the tests draw their samples here::

    417+385=      -> 802        add:  two numbers of up to three digits
    rev oceanic=  -> cinaeco    rev:  a lower-case word of 2 to 8 letters, reversed
    sort zebra=   -> aberz      sort: the letters of such a word in alphabetical order

The model is given the prompt as bytes and writes the answer, greedily, followed by its end-of-sequence token.
"""

import random
import re
import string

from graphdecode.errors import ArgumentError

TASKS: tuple[str, ...] = ("add", "rev", "sort")

MIN_WORD_LENGTH = 2
MAX_WORD_LENGTH = 8

_PROMPT = re.compile(r"(?P<a>[0-9]+)\+(?P<b>[0-9]+)=|(?P<verb>rev|sort) (?P<word>[a-z]+)=")


def _number(rng: random.Random) -> int:
    # uniform numbers in 0..999 would have one digit in only 1% of the samples
    digits = rng.choices((1, 2, 3), weights=(1, 2, 5))[0]
    return rng.randrange(10**digits)


def _word(rng: random.Random) -> str:
    # One word in four is drawn from three letters only: as repetitive as "banana", and rare among random words.
    letters = "".join(rng.sample(string.ascii_lowercase, 3)) if rng.random() < 0.25 else string.ascii_lowercase
    return "".join(rng.choices(letters, k=rng.randint(MIN_WORD_LENGTH, MAX_WORD_LENGTH)))


def solve(prompt: str) -> str:
    """Return the right answer to `prompt`; raise `ValueError` if it is not one of the three tasks."""
    match = _PROMPT.fullmatch(prompt)
    if match is None:
        raise ArgumentError(f"prompt must look like '12+30=', 'rev word=' or 'sort word=', got {prompt!r}")
    if match["verb"] is None:
        return str(int(match["a"]) + int(match["b"]))
    return match["word"][::-1] if match["verb"] == "rev" else "".join(sorted(match["word"]))


def sample(task: str, rng: random.Random) -> tuple[str, str]:
    """Draw one `(prompt, answer)` of `task`; the same state of `rng` gives the same sample."""
    if task not in TASKS:
        raise ArgumentError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    prompt = f"{_number(rng)}+{_number(rng)}=" if task == "add" else f"{task} {_word(rng)}="
    return prompt, solve(prompt)


def is_correct(prompt: str, text: str) -> bool:
    """Whether `text` is exactly the answer to `prompt`: nothing before it, nothing after it."""
    return text == solve(prompt)
