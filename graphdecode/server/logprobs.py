"""Log-probabilities in OpenAI's formats: of completions, by the names of tokens, and of chats, with their bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from graphdecode.text.outputs import Logprob
from graphdecode.text.token_texts import IncrementalText, TokenTexts

Entries = Mapping[int, Logprob]  # of one position: the most likely tokens, and the token there
_BYTES = "bytes:"  # before the name of a token that is no text, as OpenAI's completions have it


def _id_name(token: int) -> str:
    return f"token_id:{token}"


def _names(texts: TokenTexts, entries: Entries, *, as_ids: bool) -> dict[int, str]:
    """Return distinct names of the tokens of a position: their text, or bytes of a token that is none."""
    if as_ids:
        return {token: _id_name(token) for token in entries}
    names, part_of = dict[int, str](), texts.part_of
    for token, entry in entries.items():
        part = part_of(token)
        names[token] = entry.decoded_token or "" if part is None else _BYTES + part
    if len(set(names.values())) < len(names):
        used: set[str] = set()
        for token, name in names.items():
            spelled = _BYTES + "".join(f"\\x{byte:02x}" for byte in texts.bytes_of(token))
            names[token] = next(each for each in (name, spelled, _id_name(token)) if each not in used)
            used.add(names[token])
    return names


def completion_logprobs(
    texts: TokenTexts,
    tokens: Sequence[int],
    scored: Sequence[Entries | None],
    offsets: Sequence[int],
    *,
    as_ids: bool,
) -> dict[str, Any]:
    """Return the `logprobs` of a completion.

    Args:
        scored: one for each token; None for the first token of a prompt.
        offsets: where the text of each token begins.
        as_ids: name tokens by their ids, such as `token_id:5`.
    """
    shown: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token, entries in zip(tokens, scored, strict=True):
        if entries is None:
            shown.append(_id_name(token) if as_ids else IncrementalText(texts).text_of(token))
            values.append(None)
            tops.append(None)
            continue
        names = _names(texts, entries, as_ids=as_ids)
        shown.append(names[token])
        values.append(entries[token].logprob)
        tops.append({names[other]: entry.logprob for other, entry in entries.items()})
    return {"tokens": shown, "token_logprobs": values, "top_logprobs": tops, "text_offset": list(offsets)}


def chat_logprobs(
    texts: TokenTexts, tokens: Sequence[int], scored: Sequence[Entries], most: int, *, as_ids: bool
) -> dict[str, Any]:
    """Return the `logprobs` of a chat completion, with the `most` likely tokens of each position; -1: all there are."""

    def described(token: int, entry: Logprob) -> dict[str, Any]:
        part = _id_name(token) if as_ids else texts.part_of(token)
        text = entry.decoded_token or "" if part is None else part
        return {"token": text, "logprob": entry.logprob, "bytes": list(texts.bytes_of(token))}

    content = [
        described(token, entries[token])
        | {"top_logprobs": [described(*each) for each in islice(entries.items(), None if most < 0 else most)]}
        for token, entries in zip(tokens, scored, strict=True)
    ]
    return {"content": content, "refusal": None}


def offsets_in_prompt(texts: TokenTexts, prompt: str, tokens: Sequence[int], *, is_text: bool) -> list[int]:
    """Return where the text of each token of a prompt begins in it.

    `is_text`: the prompt was a text, which may not have the special tokens, and may be spaced otherwise.
    """
    offsets, at = [], 0
    text = IncrementalText(texts, skip_special_tokens=is_text)
    for token in tokens:
        offsets.append(at)
        piece = text.text_of(token)
        text.push(token)
        if prompt.startswith(piece, at):
            at += len(piece)
        elif not is_text or token not in texts.special:
            at = min(at + len(piece), len(prompt))
    return offsets
