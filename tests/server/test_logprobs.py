"""Log-probabilities over HTTP: each token by a name of its own, its own bytes, and its place in the text."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from served import serving
from spaced_tokenizers import byte_level, sentencepiece

from graphdecode.server.logprobs import chat_logprobs, completion_logprobs, offsets_in_prompt
from graphdecode.text.outputs import Logprob
from graphdecode.text.token_texts import IncrementalText, TokenTexts, text_of_tokens

HELLO, WORLD, BYTE = 3, 4, 14  # ids of `sentencepiece`
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
EMOJI = [BYTE + byte for byte in "é😊".encode()]


def scored(texts: TokenTexts, tokens: list[int], others: list[int]) -> list[dict[int, Logprob]]:
    """Return entries of a sequence, in which each token is likelier than some others."""
    incremental, found = IncrementalText(texts), []
    incremental.follow([HELLO])
    for token in tokens:
        ranked = dict.fromkeys([token, *others])
        found.append({t: Logprob(-float(rank), rank, incremental.text_of(t)) for rank, t in enumerate(ranked, 1)})
        incremental.push(token)
    return found


@pytest.mark.parametrize("make", [sentencepiece, byte_level])
def test_every_part_of_a_character_has_its_own_bytes_in_a_chat(make) -> None:
    tokenizer = make()
    texts, ids = TokenTexts(tokenizer), tokenizer.encode("Hello é😊", add_special_tokens=False).ids
    content = chat_logprobs(texts, ids, scored(texts, ids, [ids[-1], ids[-2]]), 2, as_ids=False)["content"]
    assert b"".join(bytes(each["bytes"]) for each in content).strip() == "Hello é😊".encode()
    for token, each in zip(ids, content, strict=True):
        own = texts.bytes_of(token)
        assert bytes(each["bytes"]) == own
        assert each["token"] == own.decode(errors="backslashreplace")
        assert bytes(each["top_logprobs"][0]["bytes"]) == own
        assert len(each["top_logprobs"]) == 2
    assert content[-1]["token"] == r"\x8a"


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_chat_has_top_logprobs_many_likely_tokens(most: int) -> None:
    texts = TokenTexts(sentencepiece())
    entries = scored(texts, [WORLD], [5, 6, 7])
    (first,) = chat_logprobs(texts, [7], entries, most, as_ids=True)["content"]
    assert [top["token"] for top in first["top_logprobs"]] == [f"token_id:{t}" for t in (WORLD, 5, 6)[:most]]
    assert (first["token"], first["logprob"]) == ("token_id:7", -4.0)


def test_tokens_with_equal_text_have_separate_logprobs_in_completions() -> None:
    tokenizer = sentencepiece()
    texts, letter = TokenTexts(tokenizer), tokenizer.token_to_id("o")
    others = [*EMOJI, letter, BYTE + ord("o"), BYTE + ord("l")]  # two are "o", and six are parts of characters
    (entries,) = scored(texts, [WORLD], others)
    assert len({entry.decoded_token for entry in entries.values()}) < len(entries)
    found = completion_logprobs(texts, [BYTE + ord("o")], [entries], [0], as_ids=False)
    assert sorted(found["top_logprobs"][0].values()) == sorted(entry.logprob for entry in entries.values())
    assert found["top_logprobs"][0]["o"] == entries[letter].logprob
    assert found["tokens"] == ["bytes:\\x6f"]
    assert found["top_logprobs"][0]["bytes:\\x6f"] == found["token_logprobs"][0]
    assert found["top_logprobs"][0]["bytes:\\xc3"] == entries[BYTE + 0xC3].logprob
    by_id = completion_logprobs(texts, [WORLD], [entries], [0], as_ids=True)
    assert by_id["tokens"] == [f"token_id:{WORLD}"]
    assert by_id["top_logprobs"] == [{f"token_id:{token}": entry.logprob for token, entry in entries.items()}]


@pytest.mark.parametrize(
    ("prompt", "tokens", "offsets"),
    [
        ("Hello world", [1, HELLO, WORLD], [0, 0, 5]),  # no <s> is in the text
        ("<s>Hello", [1, 1, HELLO], [0, 3, 3]),
        (None, [1, HELLO, WORLD], [0, 3, 9]),
        (None, [HELLO, *EMOJI, WORLD], [0, 5, 5, 6, 6, 6, 6, 7]),
    ],
)
def test_text_offsets_are_positions_in_the_prompt(prompt: str | None, tokens: list[int], offsets: list[int]) -> None:
    texts, is_given = TokenTexts(sentencepiece()), prompt is not None
    shown = text_of_tokens(texts, tokens) if prompt is None else prompt
    assert offsets_in_prompt(texts, shown, tokens, is_text=is_given) == offsets


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("tokenizer")
    sentencepiece().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with serving("--tokenizer", str(folder), "--max-batch-size", "4") as server, server.client() as client:
        yield client


FORCED = {"temperature": 0, "ignore_eos": True}


def asked(http: httpx.Client, path: str, *, stream: bool = False, **body: Any) -> Any:
    reply = http.post(path, json={**FORCED, **body, "stream": stream})
    assert reply.status_code == 200, reply.text
    if not stream:
        return reply.json()
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]


def test_an_echo_is_followed_by_a_space_and_has_text_offsets(http: httpx.Client) -> None:
    body = {"prompt": "Hello", "max_tokens": 2, "allowed_token_ids": [WORLD], "echo": True, "logprobs": 0}
    choice = asked(http, "/v1/completions", **body)["choices"][0]
    assert choice["text"] == "Hello world world"
    assert choice["logprobs"]["tokens"] == ["<s>", "Hello", " world", " world"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 5, 11]
    pieces = [chunk["choices"][0] for chunk in asked(http, "/v1/completions", stream=True, **body)]
    assert "".join(piece["text"] for piece in pieces) == "Hello world world"
    assert [at for p in pieces if p["logprobs"] for at in p["logprobs"]["text_offset"]] == [0, 0, 5, 11]
    plain = asked(http, "/v1/completions", **{**body, "echo": False, "stop": " worl"})["choices"][0]
    assert (plain["text"], plain["finish_reason"], plain["logprobs"]["tokens"]) == ("", "stop", [" world"])


def test_a_character_that_the_prompt_began_is_completed_once(http: httpx.Client) -> None:
    body = {"prompt": [1, HELLO, *EMOJI[:-1]], "max_tokens": 1, "allowed_token_ids": EMOJI[-1:], "logprobs": 0}
    choice = asked(http, "/v1/completions", **body)["choices"][0]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("😊", [0])
    assert choice["logprobs"]["tokens"] == [r"bytes:\x8a"]
    choice = asked(http, "/v1/completions", **body, echo=True)["choices"][0]
    assert choice["text"] == "<s> Helloé😊"
    assert choice["logprobs"]["text_offset"] == [0, 3, 9, 9, 10, 10, 10, 10]
    assert choice["logprobs"]["tokens"][2:] == [rf"bytes:\x{byte:02x}" for byte in "é😊".encode()]


@pytest.mark.parametrize("stream", [False, True])
def test_fields_of_the_prompt_are_where_vllm_has_them(http: httpx.Client, stream: bool) -> None:
    text = {"prompt": "Hello", "max_tokens": 3, "return_token_ids": True, "n": 2}
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "return_token_ids": True}
    completion = asked(http, "/v1/completions", stream=stream, **text)
    message = asked(http, "/v1/chat/completions", stream=stream, **chat)
    chunks, parts = (completion, message) if stream else ([completion], [message])
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c] == [[1, HELLO]]
        assert sum(len(c["token_ids"]) for c in choices) == 3
    assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [[HELLO]]
    assert sum(len(c["token_ids"]) for part in parts for c in part["choices"]) == 3
    assert not any("prompt_token_ids" in c for part in parts for c in part["choices"])
    if stream:
        reply = http.post("/v1/completions", json={"prompt": "Hello", "stream": True, "prompt_logprobs": 1})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt_logprobs")
        return
    plain = asked(http, "/v1/completions", prompt="Hello", max_tokens=1)["choices"][0]
    assert [plain[name] for name in ("prompt_logprobs", "prompt_token_ids", "token_ids")] == [None] * 3
    plain = asked(http, "/v1/chat/completions", messages=chat["messages"], max_tokens=1)
    assert plain["prompt_logprobs"] is plain["prompt_token_ids"] is plain["choices"][0]["token_ids"] is None
    scored_chat = asked(http, "/v1/chat/completions", **chat, prompt_logprobs=0)
    assert scored_chat["prompt_logprobs"] == [None]
    scored_text = asked(http, "/v1/completions", **text, prompt_logprobs=0)
    assert scored_text["choices"][1]["prompt_logprobs"][1].keys() == {str(HELLO)}


def test_chats_have_top_logprobs_by_text_or_by_id(http: httpx.Client) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "logprobs": True}
    for most in (None, 0, 1, 3):
        for as_ids in (False, True):
            more = {"top_logprobs": most, "return_tokens_as_token_ids": as_ids, "allowed_token_ids": [WORLD]}
            choice = asked(http, "/v1/chat/completions", **body, **more)["choices"][0]
            for each in choice["logprobs"]["content"]:
                assert (each["token"], bytes(each["bytes"])) == (f"token_id:{WORLD}" if as_ids else " world", b" world")
                assert len(each["top_logprobs"]) == (most or 0)
                assert all(top["token"].startswith("token_id:") for top in each["top_logprobs"]) or not as_ids
    more = {"prompt": "Hello", "max_tokens": 1, "logprobs": 2, "return_tokens_as_token_ids": True}
    logprobs = asked(http, "/v1/completions", **more)["choices"][0]["logprobs"]
    assert logprobs["tokens"][0] in logprobs["top_logprobs"][0]
    assert all(name.startswith("token_id:") for name in logprobs["top_logprobs"][0])
