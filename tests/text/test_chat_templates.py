"""What a chat template renders of an assistant's messages is what the parser reads, whatever is in them."""

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from parsed_replies import Reply, replied
from preprocessors import demo_tokenizer

from graphdecode.text.chat import render_chat
from graphdecode.text.chat_formats import ChatFormat, format_of
from graphdecode.text.chat_formats.source import words
from graphdecode.text.chat_formats.thinking import opens_thought

FOLDER = Path(__file__).with_name("chat_templates")
END = "<|end_of_turn|>"
PIECES = ("a", " b ", "ü", "漢字", "\n", '"', "'", "\\", "{", "}", "[1, ", "</", "<tool_", "0", "true", "\t", "\x7f")


class Template(NamedTuple):
    """A template: the format it has, and what its messages may have."""

    format: str
    end: str = END
    says: bool = True  # a message with calls has content, too
    several: bool = True  # a message may have several calls
    thinks: bool = False
    bare_keys: bool = False  # the keys of inner objects have no quotes
    variables: dict[str, Any] = {}  # noqa: RUF012 - of the template, without a thought


TEMPLATES = {
    "qwen3": Template("hermes", "<|im_end|>\n", thinks=True, variables={"enable_thinking": False}),
    "smollm3": Template("hermes", "<|im_end|>\n", thinks=True),
    "qwen3.5": Template("qwen_xml", "<|im_end|>\n", thinks=True, variables={"enable_thinking": False}),
    "glm4.6": Template("glm45", "", thinks=True, variables={"enable_thinking": False}),
    "glm4.7": Template("glm47", "", thinks=True, variables={"enable_thinking": False}),
    "deepseek_v3": Template("deepseek_v3"),
    "deepseek_v3.1": Template("deepseek_v31", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
    "deepseek_v3.2": Template("deepseek_v32", thinks=True),
    "gpt_oss": Template("openai", "", says=False, several=False, thinks=True),
    "gemma4": Template("gemma4", thinks=True, bare_keys=True),
    "functiongemma": Template("functiongemma", bare_keys=True),
    "granite3": Template("granite"),
    "lfm2": Template("lfm2"),
    "llama3": Template("llama3_json", says=False),
    "llama4_pythonic": Template("llama4_pythonic", says=False),
    "pythonic": Template("pythonic", says=False),
    "mistral_list": Template("mistral"),
    "mistral_named": Template("mistral_named", thinks=True),
    "mistral_nemo": Template("mistral", "<|eos|>", says=False),
    "mistral_with_ids": Template("mistral_with_ids"),
    "nemotron_nano2": Template("nemotron_json"),
    "phi4_mini": Template("phi4_mini_json"),
}


@cache
def text_of(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def tokenizer() -> Any:
    return demo_tokenizer()


class Drawn:
    """Random messages for a template."""

    def __init__(self, name: str, chat_format: ChatFormat, seed: int) -> None:
        self.draw, self.template = random.Random(seed), TEMPLATES[name]
        # what ends a text that is not escaped cannot be in it
        self._marks = [word for marker in chat_format.markers for word in words(marker)]
        self._ends = [*_text_ends(chat_format), END, "<|", "</think>", "[/THINK]", "<channel|>"]
        self.tools: dict[str, dict[str, Any]] = {}

    def text(self, *, plain: bool = False) -> str:
        """Return a text, which may have markers in it."""
        pieces = [
            "a",
            " b ",
            "ü",
            "漢字",
            "\n",
            '"',
            "'",
            "\\",
            "{",
            "}",
            "[1, ",
            "</",
            "<tool_",
            "0",
            "true",
            "\t",
            "\x7f",
        ]
        drawn = "".join(self.draw.choices([*pieces, *self._marks], k=self.draw.randint(0, 8)))
        for end in self._ends:
            drawn = drawn.replace(end, "")
        while any(end in drawn for end in self._ends):  # what was left may have become one
            drawn = drawn.translate({ord(letter): "" for letter in "<|["})
        if plain:
            drawn = "Well: " + drawn.strip() + "."
        return drawn

    def value(self, depth: int = 0) -> tuple[Any, dict[str, Any]]:
        """Return a value and its schema."""
        kind = self.draw.choice(
            ["string"] * 4 + ["integer", "number", "boolean", "null"] + ["array", "object"] * (depth < 3)
        )
        if kind == "array":
            return [self.value(depth + 1)[0] for _ in range(self.draw.randint(0, 3))], {"type": kind}
        if kind == "object":
            keys = ["k", "key2", *([] if self.template.bare_keys else ["", "a b", '"é'])]
            chosen = self.draw.sample(keys, self.draw.randint(0, len(keys)))
            return {key: self.value(depth + 1)[0] for key in chosen}, {"type": kind}
        values: dict[str, Any] = {
            "string": self.text(),
            "integer": self.draw.randint(-(10**12), 10**12),
            "number": round(self.draw.uniform(-1e3, 1e3), 4),
            "boolean": self.draw.random() < 0.5,
            "null": None,
        }
        return values[kind], {"type": kind}

    def call(self, number: int) -> dict[str, Any]:
        """Return a call of a function that is new."""
        name = f"{self.draw.choice(['f', 'get_weather', 'mcp__read-file'])}{number}"
        pairs = {key: self.value() for key in self.draw.sample(["a", "b", "path", "n"], self.draw.randint(0, 4))}
        self.tools[name] = {"type": "object", "properties": {key: schema for key, (_, schema) in pairs.items()}}
        arguments = json.dumps({key: value for key, (value, _) in pairs.items()})
        return {"id": f"call0000{number}"[-9:], "type": "function", "function": {"name": name, "arguments": arguments}}

    def conversation(self) -> list[dict[str, Any]]:
        """Return messages by turns; calls have results."""
        template, messages = self.template, list[dict[str, Any]]()
        for turn in range(self.draw.randint(1, 2)):
            messages.append({"role": "user", "content": f"Question {turn}"})
            calls = [self.call(10 * turn + n) for n in range(self.draw.randint(0, 3 if template.several else 1))]
            says = not calls or (template.says and self.draw.random() < 0.6)
            message: dict[str, Any] = {"role": "assistant", "content": self.text(plain=True) if says else ""}
            if template.thinks and self.draw.random() < 0.6:
                message["reasoning_content"] = self.text(plain=True)
            messages.append(message | ({"tool_calls": calls} if calls else {}))
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
            messages += [*results, {"role": "assistant", "content": "Done."}] if calls else []
        return messages


def _text_ends(chat_format: ChatFormat) -> list[str]:
    """Return what ends texts that are not escaped."""
    if chat_format.calls is None:
        return [] if chat_format.channels is None else list(chat_format.markers)
    arguments = getattr(chat_format.calls.call, "arguments", None)
    closing = getattr(arguments, "closing", "")
    quotes = [] if getattr(arguments, "is_escaped", True) else list(arguments.quotes)
    return [*([closing.strip()] if closing else []), *quotes]


def outputs_of(name: str, messages: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield each of the assistant's messages with the prompt before it, and what the template renders of it."""
    template = TEMPLATES[name]
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        variables = {} if "reasoning_content" in message else template.variables
        options: dict[str, Any] = {"chat_template": text_of(name), "chat_template_kwargs": variables}
        prompt = render_chat(tokenizer(), messages[:index], **options).text
        whole = render_chat(tokenizer(), messages[: index + 1], add_generation_prompt=False, **options).text
        assert whole.startswith(prompt), (prompt[-100:], whole[len(prompt) - 100 :])
        output = whole[len(prompt) :]
        assert output.endswith(template.end)
        yield message, prompt, output[: len(output) - len(template.end)]


def check_round_trips(name: str, seed: int, *, every_cut: bool = False) -> None:
    chat_format = format_of(text_of(name))
    assert chat_format is not None
    drawn = Drawn(name, chat_format, seed)
    messages = drawn.conversation()
    for message, prompt, output in outputs_of(name, messages):
        thinking = chat_format.thinking
        in_reasoning = thinking is not None and opens_thought(thinking, prompt, begins_message=True)
        calls = [call["function"] for call in message.get("tool_calls", ())]
        pairs = tuple((call["name"], json.loads(call["arguments"])) for call in calls)
        wanted = Reply(message.get("reasoning_content", ""), message["content"], pairs)
        cuts = [[output], list(output) or [""]]
        if every_cut:
            cuts += [[output[:at], output[at:]] for at in range(len(output))]
        for pieces in cuts:
            for constrained in (False, True):
                options = {"in_reasoning": in_reasoning, "is_constrained": constrained}
                found = replied(chat_format, pieces, drawn.tools or {"f": {}}, **options)
                assert found._replace(content=found.content.strip()) == wanted, (seed, output, pieces[0])


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_template_has_its_familys_format(name: str) -> None:
    chat_format = format_of(text_of(name))
    assert chat_format is not None
    assert chat_format.name == TEMPLATES[name].format
    assert chat_format.thinks >= TEMPLATES[name].thinks


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_what_is_rendered_is_read(name: str) -> None:
    for seed in range(6):
        check_round_trips(name, seed, every_cut=seed == 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_what_is_rendered_is_read_2000_times(name: str) -> None:
    for seed in range(2000):
        check_round_trips(name, seed, every_cut=seed % 100 == 0)
