"""An answer as it was at each event: it stays so, and costs a copy only where somebody reads it."""

import copy
import pickle
import random
import tracemalloc
from dataclasses import replace

from graphdecode.engine import Event, RequestMetrics, SamplingParams, TokenLogprobs
from graphdecode.models import resolve_model_path
from graphdecode.text.outputs import CompletionOutput, RequestOutput
from graphdecode.text.request_state import RequestState
from graphdecode.text.tokenizer import load_tokenizer


def fresh(params: SamplingParams) -> RequestState:
    tokenizer = load_tokenizer(resolve_model_path("demo"))
    request = RequestOutput(0, "", [1], [CompletionOutput(0)], RequestMetrics(0.0))
    return RequestState(request.outputs[0], request, params, getattr(tokenizer, "backend_tokenizer", tokenizer))


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
