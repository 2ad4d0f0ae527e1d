"""Requests that no client should send: seeded mutations of good ones, over every field that the server knows."""

import json
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic import ValidationError

from graphdecode.server.anthropic.request import Messages
from graphdecode.server.protocol import Body, ChatCompletion, Completion, Detokenize, Tokenize
from graphdecode.server.responses.request import Responses

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
GOOD: dict[str, tuple[type[Body], dict[str, object]]] = {
    "/v1/completions": (Completion, {"prompt": "12+30=", "max_tokens": 8, "temperature": 0}),
    "/v1/chat/completions": (
        ChatCompletion,
        {"messages": [{"role": "user", "content": "12+30"}], "chat_template": TEMPLATE, "max_tokens": 8},
    ),
    "/v1/messages": (Messages, {"messages": [{"role": "user", "content": "12+30"}], "max_tokens": 8}),
    "/v1/responses": (Responses, {"input": "12+30", "max_output_tokens": 8}),
    "/tokenize": (Tokenize, {"prompt": "12+30="}),
    "/detokenize": (Detokenize, {"tokens": [1, 2, 3]}),
}
SMALL = ["0", "1", "2", "3", "0.5", "-1", "1.0", "20", "-100", "100"]
NUMBERS = ["0", "-1", "1", "2", "7", "1e400", "-1e-400", "NaN", "-Infinity", "Infinity", "9" * 400, "1.5", "-0.0"]
NUMBERS += [str(2**bits + off) for bits in (31, 32, 63, 64, 200) for off in (-1, 0)]
TEXTS = ["", "x", "x" * 20_000, "\0", "\ud800", "\udfff\ud800", "\N{ZERO WIDTH JOINER}", "{{ 7 * 7 }}", "demo"]
TEXTS += ["../../etc/passwd", "none", "required", "%s%n", "\r\nSet-Cookie: a=b", "<|endoftext|>", "=" * 300]
NAMES = ["", "model", "frobnicate", "__class__", "model_config", "self", "\ud800", "x" * 5000, "guided_json"]
TYPES = [
    "application/json",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "\xff",
]


class MutatedRequest(NamedTuple):
    method: str
    path: str
    headers: dict[bytes, bytes]
    content: bytes


def mutated_request(seed: int) -> MutatedRequest:
    draw = random.Random(seed)
    path = draw.choice([*GOOD, *list(GOOD)[:4]])
    kind, good = GOOD[path]
    fields = {name: json.dumps(value) for name, value in good.items()}
    if draw.random() < 0.6:  # every type and the model are right, so that what is behind them is asked
        for name in draw.choices([*kind.model_fields][1:], k=draw.randrange(1, 6)):
            tried = (fields | {name: draw.choice([plausible, value])(name, draw)} for _ in range(30))
            fields = next((each for each in tried if fits(kind, each)), fields)
        return MutatedRequest("POST", path, {b"Content-Type": b"application/json"}, as_json(fields.items()))
    for _ in range(draw.randrange(1, 4)):
        name = draw.choice([*kind.model_fields] * 3 + NAMES)
        if draw.random() < 0.1:
            fields.pop(name, None)
        else:
            fields[name] = value(name, draw)
    items = list(fields.items())
    if draw.random() < 0.1 and items:
        items.append((items[0][0], value("", draw)))
    content = as_json(items)
    if draw.random() < 0.3:
        content = damaged(content, draw)
    headers = {b"Content-Type": (draw.choice(TYPES) if draw.random() < 0.2 else TYPES[0]).encode("latin-1")}
    if draw.random() < 0.1:
        headers |= draw.choice(
            [
                {b"Content-Encoding": b"gzip"},
                {b"Accept": b"image/png"},
                {b"Authorization": b"Bearer"},
                {b"X": b"y" * 8000},
            ]
        )
    method = "POST" if draw.random() < 0.95 else draw.choice(["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
    if draw.random() < 0.05:
        path = draw.choice([path + "/", "/." + path, path.upper(), "/v1/models/%2e%2e%2f%00", "/page/..%2f..%2fapp.py"])
    return MutatedRequest(method, path, headers, content)


def greedy_request(seed: int) -> MutatedRequest:
    """Return a request that would take time or memory which others need."""
    draw = random.Random(f"greedy {seed}")
    path = draw.choice(list(GOOD))
    if draw.random() < 0.2:
        path, fields = "/v1/completions", many_parts(draw)
    elif draw.random() < 0.4:
        path = "/v1/completions"
        fields = {"prompt": '"12+30="', "max_tokens": "8", **greedy_form(draw)}
    else:
        kind, good = GOOD[path]
        fields = {name: json.dumps(value) for name, value in good.items() if name != "chat_template"}
        fields[draw.choice([*good, *kind.model_fields])] = large_value(draw)
    return MutatedRequest("POST", path, {b"Content-Type": b"application/json"}, as_json(fields.items()))


def many_parts(draw: random.Random) -> dict[str, str]:
    """Return fields of a few kilobytes that ask for much together, each as often as there are others."""

    def numbers(most: int) -> str:
        return json.dumps(draw.choices(range(258), k=draw.randrange(1, most)))

    beside = {
        "bad_words": json.dumps([f"{draw.choice('abc')}{number}" for number in range(draw.choice([8, 60, 128, 4500]))]),
        "allowed_token_ids": numbers(9000),
        "stop_token_ids": numbers(200),
        "logit_bias": json.dumps({str(token): 1 for token in draw.sample(range(258), draw.randrange(1, 258))}),
        "stop": json.dumps([f"{draw.choice('xyz')}{number}" for number in range(draw.choice([4, 256, 2000]))]),
        "n": str(draw.choice([1, 2, 16, 128])),
        "logprobs": "20",
        "prompt_logprobs": "20",
    }
    prompt = draw.choice(['"a"', "[1]", '"12+30="'])
    prompts = "[" + ",".join([prompt] * draw.choice([1, 4, 30, 128, 260, 1024])) + "]"
    return {"prompt": prompts, "max_tokens": "2"} | dict(draw.sample(sorted(beside.items()), draw.randrange(1, 6)))


def greedy_form(draw: random.Random) -> dict[str, str]:
    count, letter = draw.choice([3, 12, 20, 30]), draw.choice("abcdefgh")
    many = draw.choice([100, 3000, 15_000])
    patterns = [{"pattern": f".*{chr(97 + number % 26)}{letter}.*"} for number in range(count)]
    nested: Any = {"type": "integer"}
    for _ in range(draw.choice([10, 100, 250])):
        nested = {"type": "object", "properties": {letter: nested}, "required": [letter]}
    schema = draw.choice(
        [
            {"type": "string", "allOf": patterns},
            {"anyOf": patterns},
            {"type": "object", "properties": {f"{letter}{number}": {"type": "integer"} for number in range(many)}},
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            {"enum": [f"{letter}{number}" for number in range(many)]},
            {"type": "array", "items": {"type": "string"}, "minItems": many, "maxItems": many * 10},
            {"type": "string", "pattern": f"({letter}|b)*{letter}({letter}|b){{{count}}}"},
            {"type": "string", "maxLength": 10 ** draw.choice([3, 6, 9])},
            nested,
        ]
    )
    regex = draw.choice(["(.{1,1000}){1,1000}", "a{1000000}", "((a{1,100}){1,100}){1,100}", r"\p{L}{1,500}"])
    rules = "\n".join(f"r{number}: r{number + 1} | r{number + 1} r{number + 1}" for number in range(many))
    form = draw.choice(
        [
            {"json": schema},
            {"json": schema, "whitespace_pattern": "(a|aa)*"},
            {"regex": letter + regex},
            {"grammar": f'start: r0\n{rules}\nr{many}: "{letter}"'},
            {"choice": [f"{letter}{number}" for number in range(many)]},
        ]
    )
    beside = {"min_tokens": "3", "stop_token_ids": "[56]", "bad_words": '["8"]', "ignore_eos": "true"}
    return {"structured_outputs": json.dumps(form)} | dict(draw.sample(sorted(beside.items()), draw.randrange(3)))


def large_value(draw: random.Random) -> str:
    size = draw.choice([5_000, 50_000, 500_000, 2_000_000])
    item = draw.choice(["null", "1", "50", '"a"', "[]", "[1,null]", "1.5", '{"role":"user","content":"a"}', '{"a":1}'])
    return draw.choice(
        [
            lambda: "[" + ",".join([item] * (size // len(item))) + "]",
            lambda: json.dumps(draw.choice(["a b ", "x", "\0", "\N{GRINNING FACE}", " "]) * (size // 4)),
            lambda: "{" + ",".join(f'"{number}":{item}' for number in range(size // (len(item) + 6))) + "}",
            lambda: "[" * (size // 2) + "]" * (size // 2),
            lambda: "9" * size,
        ]
    )()


def as_json(items: Iterable[tuple[str, str]]) -> bytes:
    return ("{" + ",".join(f"{json.dumps(name)}:{raw}" for name, raw in items) + "}").encode()


def fits(kind: type[Body], fields: dict[str, str]) -> bool:
    try:
        kind.model_validate_json(as_json(fields.items()))
    except ValidationError:
        return False
    return True


def plausible(name: str, draw: random.Random) -> str:
    """Return a value that a field may take, for other reasons to refuse it than its type."""
    if name in ("input", "system", "text", "thinking", "reasoning", "output_config") or draw.random() < 0.2:
        return parts_of_agents(draw)
    if name in ("messages", "tools", "chat_template_kwargs", "stream_options", "tool_choice"):
        part = draw.choice(
            ['"12+30"', '[{"type":"text","text":"12+30"}]', "null", '[{"type":"image_url"}]', "[]", '""']
        )
        role = draw.choice(["user", "assistant", "system", "tool", "x" * 100])
        calls = draw.choice(["null", "[]", "[1]", '[{"function":{"name":"a","arguments":"{"}}]', '[{"function":1}]'])
        message = f'{{"role":"{role}","content":{part},"tool_calls":{calls},"name":{value(name, draw, 2)}}}'
        tool = f'{{"type":"function","function":{{"name":{value(name, draw, 2)},"parameters":{value(name, draw, 2)}}}}}'
        keyword = draw.choice(["tokenize", "tools", "enable_thinking", "return_dict", "documents", "include_usage"])
        return draw.choice([f"[{message},{message}]", f"[{tool}]", f'{{"{keyword}":{value(name, draw, 2)}}}', '"auto"'])
    if name in ("prompt", "stop", "bad_words", "suffix", "user", "chat_template"):
        text = json.dumps(
            draw.choice(TEXTS + [TEMPLATE, "{{ 1 / 0 }}", "{% for", "{{ messages[9].a.b }}", "{{ x() }}"])
        )
        return draw.choice([text, f"[{text},{text}]", "[1,2,3]", "[[1],[2,3]]", "[]", "[[]]"])
    if name in ("stop_token_ids", "allowed_token_ids", "tokens", "logit_bias"):
        tokens = draw.sample(range(-1, 60), draw.randrange(1, 5))
        bias = ",".join(f'"{token}":{draw.choice(SMALL + ["1e30", "-1e30", "NaN"])}' for token in tokens)
        return draw.choice([json.dumps(tokens), f"{{{bias}}}"])
    return draw.choice([*SMALL, "true", "false"])


def parts_of_agents(draw: random.Random) -> str:
    """Return what the bodies of the two APIs of agents are made of."""
    kinds = "text input_text thinking tool_use tool_result document image message reasoning function any enabled"
    kinds += " function_call function_call_output custom custom_tool_call item_reference namespace json_schema"
    names = "role content text thinking input output arguments name call_id id tool_use_id summary source data effort"
    names += " budget_tokens format schema tools namespace encrypted_content parameters input_schema"

    def part(depth: int) -> str:
        values = [value("", draw, 3), '"user"', '"assistant"', '"{}"', "{}", '"low"', '"graphdecode:AAA"']
        inner = [part(depth - 1), f"[{part(depth - 1)},{part(depth - 1)}]"] if depth else []
        pairs = [f'"{name}":{draw.choice([*values, *inner])}' for name in draw.sample(names.split(), 4)]
        return "{" + ",".join([f'"type":"{draw.choice(kinds.split())}"', *pairs]) + "}"

    return draw.choice([part(2), f"[{part(2)}]", f"[{part(1)},{part(2)},{part(1)}]"])


def value(name: str, draw: random.Random, depth: int = 0) -> str:
    """Return a hostile value as it stands in JSON, for a field of any name."""
    choice = draw.randrange(9 if depth < 3 else 5)
    if choice == 0:
        return draw.choice(["null", "true", "false"])
    if choice in (1, 2):
        return draw.choice(NUMBERS)
    if choice in (3, 4):
        return json.dumps(draw.choice(TEXTS))
    if choice == 5:
        return "[" + ",".join(value(name, draw, depth + 1) for _ in range(draw.randrange(4))) + "]"
    if choice == 6:
        names = [*NAMES, "role", "content", "type", "text", "function", "name", "tool_calls", "0", "100"]
        pairs = [f"{json.dumps(draw.choice(names))}:{value(name, draw, depth + 1)}" for _ in range(draw.randrange(4))]
        return "{" + ",".join(pairs) + "}"
    if choice == 7:
        levels = draw.choice([10, 100, 190, 1000, 50_000])
        opening, closing = draw.choice([("[", "]"), ('{"a":', "}")])
        return opening * levels + "1" + closing * levels
    return "[" + ",".join([value(name, draw, 3)] * draw.choice([2, 1000, 5000])) + "]"


def damaged(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content))
    return draw.choice(
        [
            b"",
            content[:at],
            content[:at] + b"\xff\xfe\x80" + content[at:],
            content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :],
            content + b"}",
            b"[" + content + b"]",
            b"\xef\xbb\xbf" + content,
            content.decode().encode("utf-16"),
            b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--x--",
        ]
    )
