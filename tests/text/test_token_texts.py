"""Text that follows a prompt is what the tokenizer makes of both, less the prompt's; each token has its part of it."""

import asyncio
import random
from collections.abc import Iterator

import pytest
from spaced_tokenizers import KINDS, TEXT, byte_level, sentencepiece, suffixes, word_pieces
from tokenizers import Tokenizer

from graphdecode import LLM, AsyncLLM, SamplingParams
from graphdecode.text.detokenizer import Detokenizer
from graphdecode.text.light_tokenizer import LightTokenizer
from graphdecode.text.token_texts import IncrementalText, TokenTexts, text_of_tokens

HELLO, WORLD, BYTE = 3, 4, 14  # ids of `sentencepiece`


def followed(tokenizer: Tokenizer, prompt: list[int], output: list[int], **how: object) -> str:
    """Return the text of an output, piece by piece."""
    detokenizer, text = Detokenizer(TokenTexts(tokenizer), prompt=prompt, **how), ""  # type: ignore[arg-type]
    for token in output:
        detokenizer.push(token)
        text += detokenizer.take()
    detokenizer.finish()
    return text + detokenizer.take(final=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_may_be_cut_into_prompt_and_output_anywhere(kind: str) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == TEXT
    texts = TokenTexts(tokenizer)
    for cut in range(len(ids)):
        before = text_of_tokens(texts, ids[:cut])
        assert before + followed(tokenizer, ids[:cut], ids[cut:]) == TEXT, cut
        incremental, parts = IncrementalText(texts, skip_special_tokens=True), []
        incremental.follow(ids[:cut])
        for token in ids[cut:]:
            parts.append(incremental.text_of(token))
            assert incremental.push(token) == parts[-1]
        assert before + "".join(parts) == TEXT, cut
    assert b"".join(map(texts.bytes_of, ids)).strip() == TEXT.encode()


@pytest.mark.parametrize("make", [word_pieces, suffixes])
def test_a_space_that_depends_on_the_token_before_is_right_too(make) -> None:
    tokenizer, draw = make(), random.Random(5)
    for _ in range(100):
        ids = [draw.randrange(1, tokenizer.get_vocab_size()) for _ in range(8)]
        cut = draw.randrange(8)
        whole, before = tokenizer.decode(ids), tokenizer.decode(ids[:cut])
        if whole.startswith(before):
            assert followed(tokenizer, ids[:cut], ids[cut:]) == whole[len(before) :], ids


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_random_tokens_have_the_tokenizers_text(kind: str, skip: bool) -> None:
    tokenizer, draw = KINDS[kind](), random.Random(6)
    single = [t for t in range(tokenizer.get_vocab_size()) if "\ufffd" not in tokenizer.decode([t])]
    for _ in range(50):
        ids = draw.choices(single, k=12)
        cut = draw.randrange(12)
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        before = tokenizer.decode(ids[:cut], skip_special_tokens=skip)
        found = followed(tokenizer, ids[:cut], ids[cut:], skip_special_tokens=skip)
        assert before + found == whole, (ids, cut)


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        ([1, HELLO], [WORLD, WORLD], " world world"),
        ([1], [WORLD, WORLD], "world world"),  # nothing stands before it
        ([1, HELLO, 1, 2, 1], [WORLD, 1, WORLD], " world world"),
        ([HELLO, BYTE + 0xC3], [BYTE + 0xA9, WORLD], "é world"),  # the prompt ends inside a character
        ([HELLO, BYTE + 0xC3], [WORLD], "\ufffd world"),
        ([HELLO, BYTE + 0xC3], [], ""),
        ([HELLO, BYTE + 0xFF], [WORLD], " world"),  # what is wrong in a prompt stays there
        ([HELLO], [BYTE + 0xC3, BYTE + 0xA9, BYTE + 0xFF, WORLD], "é\ufffd world"),
        ([HELLO], [BYTE + 0xF0, BYTE + 0x9F], "\ufffd"),
    ],
)
def test_an_output_begins_where_its_prompt_ends(prompt: list[int], output: list[int], text: str) -> None:
    assert followed(sentencepiece(), prompt, output) == text


def test_a_stop_string_may_begin_with_the_space_of_the_first_token() -> None:
    detokenizer = Detokenizer(TokenTexts(sentencepiece()), (" world!",), prompt=[1, HELLO])
    assert detokenizer.push(WORLD) is None
    assert detokenizer.take() == ""
    assert detokenizer.push(sentencepiece().token_to_id("!")) == " world!"
    assert detokenizer.take(final=True) == ""


@pytest.mark.parametrize("make", [sentencepiece, byte_level])
def test_the_bytes_of_a_token_are_its_own(make) -> None:
    tokenizer = make()
    texts, ids = TokenTexts(tokenizer), tokenizer.encode("é😊", add_special_tokens=False).ids
    spelled = [texts.bytes_of(token) for token in ids]
    assert b"".join(spelled).strip() == "é😊".encode()
    assert b"\x9f" in b"".join(spelled[1:])
    assert all(len(part) <= 2 for part in spelled)
    assert texts.bytes_of(tokenizer.token_to_id("</s>")) == b"</s>"
    assert texts.bytes_of(10**6) == b""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    tokenizer = LightTokenizer(sentencepiece(), {"bos_token": "<s>"}, "{{ messages[0]['content'] }}", lambda: None)
    with LLM("demo", device="cpu", max_batch_size=4, max_sequence_length=64, tokenizer=tokenizer) as made:
        yield made


def only(*tokens: int, **more: object) -> SamplingParams:
    named = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, "allowed_token_ids": list(tokens), **more}
    return SamplingParams(**named)  # type: ignore[arg-type]


def test_all_fronts_show_the_space_before_the_first_token(llm: LLM) -> None:
    params, text = only(WORLD, logprobs=1, prompt_logprobs=0), " world world world"
    (output,) = llm.generate("Hello", params, use_tqdm=False)
    assert output.prompt_token_ids == [1, HELLO]
    assert output.outputs[0].text == text
    assert [entries[WORLD].decoded_token for entries in output.outputs[0].logprobs or ()] == [" world"] * 3
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[1] is not None
    assert output.prompt_logprobs[1][HELLO].decoded_token == "Hello"
    (again,) = llm.generate([[1, HELLO, WORLD]], only(WORLD, prompt_logprobs=0), use_tqdm=False)
    assert [entries[t].decoded_token for t, entries in zip([HELLO, WORLD], again.prompt_logprobs[1:], strict=True)] == [
        " Hello",
        " world",
    ]
    assert "".join(llm.stream("Hello", params)) == text
    (chat,) = llm.chat([{"role": "user", "content": "Hello"}], params, use_tqdm=False)
    assert chat.outputs[0].text == text

    async def streamed() -> str:
        found = ""
        async with AsyncLLM("demo", device="cpu", max_batch_size=4, tokenizer=llm.tokenizer) as engine:
            async for output in engine.generate("Hello", params):
                found = output.outputs[0].text
        return found

    assert asyncio.run(streamed()) == text


def test_the_parts_of_a_character_have_no_text_until_the_last(llm: LLM) -> None:
    prompt = [1, HELLO, BYTE + 0xC3, BYTE + 0xA9, WORLD, BYTE + 0xF0, BYTE + 0x9F, BYTE + 0x98]
    params = only(BYTE + 0x8A, max_tokens=1, logprobs=0, prompt_logprobs=0)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    scored = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    parts = [entries[t].decoded_token for t, entries in zip([*prompt[1:], BYTE + 0x8A], scored, strict=True)]
    assert parts == [" Hello", "", "é", " world", "", "", "", "😊"]
    assert output.outputs[0].text == "😊"
