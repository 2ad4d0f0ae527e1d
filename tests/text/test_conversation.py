"""A conversation that goes on: the next turn is cheap, and the oldest turns make room."""

from collections.abc import Iterator

import pytest

from graphdecode import LLM, GraphdecodeError, SamplingParams
from graphdecode.text import Conversation

PARAMS = SamplingParams(temperature=0.0, max_tokens=8)
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
LIMIT = 256  # tokens, which are bytes here


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_batch_size=1, max_sequence_length=LIMIT) as made:
        yield made


@pytest.fixture
def conversation(llm: LLM) -> Conversation:
    return Conversation(llm, sampling_params=PARAMS, chat_template=TEMPLATE)


def test_the_next_turn_finds_the_turns_before_it_in_the_cache(conversation: Conversation) -> None:
    page = conversation.llm.config.page_size
    before = 0
    for number in range(5):
        answer = "".join(conversation.say(f"number {number}: 1{number}+30="))
        assert conversation.last is not None
        assert conversation.messages[-1] == {"role": "assistant", "content": answer}
        prompt, cached = len(conversation.last.prompt_token_ids), conversation.last.metrics.num_cached_tokens
        assert before - page <= cached <= prompt, (number, cached, before)
        before = prompt
    assert before > 3 * page


def test_what_outgrows_the_room_loses_its_oldest_turns_and_never_the_systems_message(conversation):
    conversation.system = "SYSTEM"
    for number in range(20):
        list(conversation.say(f"turn {number:02} {'x' * 20}"))
        assert conversation.last is not None
        prompt = bytes(conversation.llm.tokenizer.decode(conversation.last.prompt_token_ids), "utf-8").decode()
        assert len(conversation.last.prompt_token_ids) < LIMIT
        assert prompt.startswith("SYSTEM\nturn"), "a turn is left out whole"
        assert f"turn {number:02}" in prompt
    assert 0 < conversation.num_forgotten < len(conversation.messages) == 40
    assert conversation.messages[conversation.num_forgotten]["role"] == "user"
    assert "turn 00" not in prompt
    assert conversation.all_messages()[:2] == [
        {"role": "system", "content": "SYSTEM"},
        {"role": "user", "content": f"turn 00 {'x' * 20}"},
    ]


def test_a_message_that_is_too_long_by_itself_leaves_the_conversation_as_it_was(conversation: Conversation) -> None:
    list(conversation.say("1+1="))
    said = list(conversation.messages)
    with pytest.raises(GraphdecodeError, match=f"the message takes 501 tokens, and there is room for {LIMIT}"):
        list(conversation.say("x" * 500))
    assert conversation.messages == said
    assert conversation.num_forgotten == 0


def test_an_answer_that_is_left_stays_as_far_as_it_came(conversation: Conversation) -> None:
    pieces = conversation.say("rev abcdef=")
    begun = next(pieces)
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": begun}
    assert not conversation.llm.engine.has_work, "the request was given up"
    assert "".join(conversation.say("12+30="))


def test_reset_forgets_what_was_said(conversation: Conversation) -> None:
    first = "".join(conversation.say("12+30="))
    conversation.reset()
    assert conversation.messages == []
    assert "".join(conversation.say("12+30=")) == first
