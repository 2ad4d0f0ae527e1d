"""Streaming text: whole characters only, and nothing of a stop string."""

import copy
import pickle
import random
import tracemalloc
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from graphdecode.engine import Event, RequestMetrics, SamplingParams, TokenLogprobs
from graphdecode.models import resolve_model_path
from graphdecode.text.detokenizer import Detokenizer
from graphdecode.text.outputs import CompletionOutput, RequestOutput, RequestState
from graphdecode.text.token_texts import TokenTexts
from graphdecode.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    """A token for each byte: every character beyond ASCII spans several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def stream(tokenizer: Tokenizer, text: str, stops: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    detokenizer = Detokenizer(TokenTexts(tokenizer), stops)
    pieces, hit = [], None
    for token in tokenizer.encode(text).ids:
        hit = detokenizer.push(token)
        if hit is not None:
            break
        pieces.append(detokenizer.take())
    if hit is None:
        hit = detokenizer.finish()
    pieces.append(detokenizer.take(final=True))
    return pieces, hit


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語", "a😀b🏳️‍🌈c", "ends in é", ""])
def test_pieces_are_whole_characters_and_add_up(byte_tokenizer: Tokenizer, text: str) -> None:
    pieces, _ = stream(byte_tokenizer, text)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_bytes_that_never_become_a_character_show_up_at_the_end(byte_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(TokenTexts(byte_tokenizer))
    for token in byte_tokenizer.encode("aé").ids[:-1]:
        detokenizer.push(token)
    assert detokenizer.take() == "a"
    detokenizer.finish()
    assert detokenizer.take(final=True) == "\ufffd"


@pytest.mark.parametrize(
    ("text", "stops", "shown", "hit"),
    [
        ("one\n\ntwo", ("\n\n",), "one", "\n\n"),
        ("ab<en<end>x", ("<end>",), "ab<en", "<end>"),
        ("ab<en", ("<end>",), "ab<en", None),
        ("xyz", ("yz", "z"), "x", "yz"),
        ("日本語です", ("語",), "日本", "語"),
        ("aaaab", ("aab",), "aa", "aab"),
        ("stop", ("stop",), "", "stop"),
    ],
)
def test_text_is_cut_before_a_stop_string_across_token_borders(byte_tokenizer, text, stops, shown, hit):
    pieces, found = stream(byte_tokenizer, text, stops)
    assert ("".join(pieces), found) == (shown, hit)


@pytest.mark.parametrize(
    ("stops", "min_tokens", "shown", "hit"),
    [
        (("bc", "y"), 0, "a", "bc"),
        (("bc", "y"), 2, "a", "bc"),
        (("bc", "y"), 3, "abcdxx", "y"),
        (("cd",), 4, "abcdxxyab", "cd"),
        (("cd",), 10, "abcdxxyab", "cd"),
        (("cd",), 11, "abcdxxyabcd", None),
    ],
)
def test_a_stop_string_that_is_complete_too_early_never_counts(byte_tokenizer, stops, min_tokens, shown, hit):
    detokenizer, found = Detokenizer(TokenTexts(byte_tokenizer), stops, min_tokens=min_tokens), None
    for token in byte_tokenizer.encode("abcdxxyabcd").ids:
        found = detokenizer.push(token)
        if found is not None:
            break
    assert (detokenizer.text, found) == (shown, hit)


def test_no_prefix_of_a_stop_string_is_ever_shown_too_early(byte_tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    for case in range(300):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(0, 30)))
        stops = tuple("".join(rng.choice("ab") for _ in range(rng.randint(2, 5))) for _ in range(2))
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        # the stop string that is complete first wins; of two that end together, the one that begins first
        expected = text
        if ends:
            first = min(ends)
            expected = text[: min(first - len(stop) for stop in stops if text[:first].endswith(stop))]
        pieces, _ = stream(byte_tokenizer, text, stops)
        assert "".join(pieces) == expected, (case, text, stops)


def fresh(params: SamplingParams) -> RequestState:
    tokenizer = load_tokenizer(resolve_model_path("demo"))
    request = RequestOutput(0, "", [1], [CompletionOutput(0)], RequestMetrics(0.0))
    return RequestState(request.outputs[0], request, params, TokenTexts(tokenizer.backend_tokenizer))


def event(token: int, *, ends: bool = False, scored: bool = True) -> Event:
    logprobs = [TokenLogprobs(-0.5, 1, ((token, -0.5),))] if scored else None
    return Event(0, [token], logprobs, "length" if ends else None, None, RequestMetrics(0.0))


def test_a_snapshot_is_what_there_was_whenever_it_is_read() -> None:
    draw = random.Random(4)
    answer = fresh(SamplingParams(max_tokens=200, logprobs=1))
    tokens = [draw.randrange(97, 123) for _ in range(200)]
    taken, texts = [answer.snapshot()], [""]
    for place, token in enumerate(tokens):
        answer.take(event(token, ends=place == 199))
        taken.append(answer.snapshot())
        texts.append(texts[-1] if draw.random() < 0.5 else answer.output.text)  # others are not read as they come
    assert taken[0] == CompletionOutput(0)
    for count in draw.sample(range(201), 201):
        found = taken[count]
        assert found.token_ids == tokens[:count]
        assert found.token_ids is found.token_ids
        assert len(found.text) == count
        assert answer.output.text.startswith(found.text)
        assert len(found.logprobs or []) == count
        for again in (copy.copy(found), pickle.loads(pickle.dumps(found)), replace(found)):
            assert again == found
    assert answer.output == taken[-1]
    assert all(answer.output.text.startswith(text) for text in texts)


def test_snapshots_of_every_event_take_memory_that_grows_with_the_events() -> None:
    kept, peaks = [], []
    for count in (500, 2000):
        answer = fresh(SamplingParams(max_tokens=count + 1))
        tracemalloc.start()
        for _ in range(count):
            answer.take(event(97, scored=False))
            kept.append(answer.snapshot())
        peaks.append(tracemalloc.get_traced_memory()[1] / count)
        tracemalloc.stop()
        kept.clear()
    assert peaks[1] < 1.5 * peaks[0], f"{peaks} bytes an event"
