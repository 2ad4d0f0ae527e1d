"""Log-probabilities of a long prompt: told in parts, so that nobody waits for all of them, and the same together."""

import asyncio
import json

from graphdecode.engine import Event, RequestMetrics, SamplingParams, TokenLogprobs
from graphdecode.models import resolve_model_path
from graphdecode.server.messages import in_parts
from graphdecode.server.reply import in_pieces
from graphdecode.text.outputs import CompletionOutput, RequestOutput
from graphdecode.text.request_state import RequestState
from graphdecode.text.tokenizer import load_tokenizer

PROMPT = [number % 200 for number in range(1000)]


def event() -> Event:
    top = tuple((token, -float(token)) for token in range(20))
    scores = [TokenLogprobs(-1.0 - place, 5, top) for place in range(len(PROMPT) - 1)]
    return Event(0, [5], None, "length", None, RequestMetrics(0.0), None, scores)


def answered(events: list[Event]) -> RequestOutput:
    output = RequestOutput(0, None, PROMPT, [CompletionOutput(0)], RequestMetrics(0.0))
    tokenizer = load_tokenizer(resolve_model_path("demo")).backend_tokenizer
    answer = RequestState(output.outputs[0], output, SamplingParams(prompt_logprobs=20), tokenizer)
    for each in events:
        answer.take(each)
    return output


def test_parts_say_together_what_one_event_says() -> None:
    parts = in_parts(event(), 1000)
    assert len(parts) > 20
    assert all(len(part.prompt_logprobs or ()) * 21 <= 1000 for part in parts)
    assert [part.is_part for part in parts] == [True] * (len(parts) - 1) + [False]
    together, whole = answered(parts), answered([event()])
    assert together.prompt_logprobs == whole.prompt_logprobs
    assert together.prompt_logprobs is not None
    assert len(together.prompt_logprobs) == len(PROMPT)
    assert together.outputs[0].token_ids == whole.outputs[0].token_ids == [5]
    assert together.outputs[0].finish_reason == "length"


def test_an_answer_in_parts_has_begun_with_its_last_part_alone() -> None:
    output = answered(in_parts(event(), 1000)[:-1])
    assert not output.outputs[0].token_ids
    assert not output.finished


def test_others_have_their_turn_between_two_pieces_of_the_json() -> None:
    scores, turns = answered([event()]).prompt_logprobs, 0

    async def told() -> bytes:
        nonlocal turns
        telling = asyncio.ensure_future(in_pieces({"index": 0, "prompt_logprobs": scores}))
        while not telling.done():
            turns += 1
            await asyncio.sleep(0)
        return await telling

    choice = json.loads(asyncio.run(told()))
    assert turns >= len(PROMPT) // 50
    assert scores is not None
    assert choice["prompt_logprobs"] == [
        None if each is None else {str(token): vars(entry) for token, entry in each.items()} for each in scores
    ]
    assert choice["index"] == 0
