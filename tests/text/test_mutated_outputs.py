"""Outputs that are nearly calls: nothing is lost, nothing is raised, and it does not matter how they come."""

import json
import random
import time
from pathlib import Path

import pytest
from parsed_replies import replied

from graphdecode.text.chat_formats import FAMILIES, ChatFormat, format_of, with_bare_calls
from graphdecode.text.chat_formats.source import words

FORMATS = {each.chat_format.name: each.chat_format for each in FAMILIES}
WRITTEN = json.loads(Path(__file__).with_name("written_calls.json").read_text(encoding="utf-8"))
TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}, "g-1": {}}
THINKS = format_of("<think></think><tool_call>") or with_bare_calls(None)
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"a": "1"}<|call|>'
)
OTHERS = ({"format": "openai", "text": HARMONY}, {"format": "think", "text": "<think>\nHm\n</think>\n\nHi"})


def mutated(text: str, marks: list[str], draw: random.Random) -> str:
    """Return a text with pieces cut out, doubled, moved, or put in."""
    for _ in range(draw.randint(1, 4)):
        first, last = sorted(draw.choices(range(len(text) + 1), k=2))
        last = min(last, first + draw.choice([1, 3, 30]))
        piece = draw.choice(
            [text[first:last], "", draw.choice(marks), draw.choice(["{", '"', "\\", "\n", "\0", "é", "]}", " "])]
        )
        place = draw.randint(0, len(text))
        text = [text[:first] + text[last:], text[:place] + piece + text[place:], text[:first] + piece + text[last:]][
            draw.randint(0, 2)
        ]
        text = text * 2 if draw.random() < 0.05 else text
    return text


def check_mutation(seed: int) -> None:
    draw = random.Random(seed)
    sample = draw.choice(
        [*WRITTEN, {"format": "openai", "text": HARMONY}, {"format": "think", "text": "<think>\nHm\n</think>\n\nHi"}]
    )
    chat_format: ChatFormat = FORMATS.get(sample["format"], THINKS)
    marks = [word for marker in chat_format.markers for word in words(marker)]
    text = mutated(str(sample["text"]), marks, draw)
    whole = replied(chat_format, [text], TOOLS, checks_json=False)
    cut = draw.randint(0, len(text))
    for pieces in (list(text) or [""], [text[:cut], text[cut:]]):
        assert replied(chat_format, pieces, TOOLS, checks_json=False) == whole, (seed, text, pieces[0])
    constrained = replied(chat_format, [text], TOOLS, checks_json=False, is_constrained=True)
    assert replied(chat_format, list(text) or [""], TOOLS, checks_json=False, is_constrained=True) == constrained, (
        seed,
        text,
    )
    letters = iter(text)
    assert all(letter in letters for letter in whole.content), (seed, text)  # what there is, in its order
    if not (whole.calls or whole.reasoning or chat_format.thinks):
        assert whole.content == text, (seed, text)


def test_mutated_outputs_are_read_alike_and_whole() -> None:
    for seed in range(200):
        check_mutation(seed)


@pytest.mark.slow
def test_20000_mutated_outputs_are_read_alike_and_whole() -> None:
    for seed in range(20_000):
        check_mutation(seed)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_an_attack_takes_time_in_proportion_to_its_length(name: str) -> None:
    """Texts that begin call upon call, and end none."""
    sample = next((each["text"] for each in WRITTEN if each["format"] == name), HARMONY)

    def seconds(count: int, share: float) -> float:
        text = sample[: int(len(sample) * share)] * count
        began = time.process_time()
        replied(FORMATS[name], [text], TOOLS, checks_json=False)
        return time.process_time() - began

    for share in (0.3, 0.6, 0.9):
        short = min(seconds(20, share) for _ in range(3))
        assert min(seconds(320, share) for _ in range(2)) < 64 * short + 0.05  # the square would be 256
