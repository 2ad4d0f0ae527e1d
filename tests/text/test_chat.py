"""Conversations through a chat template: the prompt is transformers', the answer ends with the turn."""

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from demo_copies import demo_copy
from tokenizers import AddedToken

from graphdecode import LLM, AsyncLLM, GraphdecodeError, SamplingParams
from graphdecode.models import resolve_model_path
from graphdecode.text import Conversation, load_tokenizer, render_chat
from graphdecode.text.chat_formats import Content, Reasoning

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
LAST = "{{ messages[-1].content }}"  # what the demo model can answer
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße 你好"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "12+30="},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve_model_path("demo"))


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM("demo", max_batch_size=4, max_sequence_length=256) as made:
        yield made


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}])
def test_the_prompt_is_what_transformers_makes_of_the_messages(tokenizer: Any, options: dict) -> None:
    chat = render_chat(tokenizer, TURNS, chat_template=TEMPLATE, **options)
    how = {"chat_template": TEMPLATE, "add_generation_prompt": True, **options}
    assert chat.text == tokenizer.apply_chat_template(TURNS, tokenize=False, **how)
    assert chat.token_ids == tokenizer.apply_chat_template(TURNS, return_dict=False, **how)


def test_the_last_message_can_be_gone_on_with(tokenizer: Any) -> None:
    turns = [TURNS[1], {"role": "assistant", "content": "The answer is"}]
    options = {"chat_template": TEMPLATE, "add_generation_prompt": False, "continue_final_message": True}
    assert render_chat(tokenizer, turns, **options).text.endswith("[assistant]The answer is")
    with pytest.raises(GraphdecodeError, match="add_generation_prompt"):
        render_chat(tokenizer, turns, chat_template=TEMPLATE, continue_final_message=True)


def test_arguments_of_a_call_that_are_nested_too_deep_stay_a_text(tokenizer: Any) -> None:
    arguments = "[" * 100_000
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    template = "{{ messages[0].tool_calls[0].function.arguments }}"
    messages = [{"role": "assistant", "tool_calls": [call]}]
    assert render_chat(tokenizer, messages, chat_template=template).text == arguments


def test_parts_of_text_are_joined_and_calls_of_tools_are_given_as_dicts(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    template = (
        "{{ messages[0].content }}|{{ messages[1].content }}|{{ messages[1].tool_calls[0].function.arguments.a + 1 }}"
    )
    assert render_chat(tokenizer, turns, chat_template=template).text == "one\ntwo||2"


def test_tools_and_variables_reach_the_template(tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    template = "{{ tools[0].function.name }} {{ thinking }}"
    options = {"tools": [tool], "chat_template_kwargs": {"thinking": False}}
    assert render_chat(tokenizer, TURNS, chat_template=template, **options).text == "add False"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("hello", "got 'hello'"),
        ([], "got an empty list"),
        (["hello"], "got 'hello'"),
        ([{"content": "a"}], r"messages\[0\] .*`role`"),
        ([TURNS[0], {"role": "user"}], r"messages\[1\].content "),
        ([{"role": "user", "content": 3}], r"messages\[0\].content .*got 3"),
        ([{"role": "user", "content": None}], r"messages\[0\].content "),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r"content\[0\] .*'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] "),
        ([{"role": "user", "content": "\ud83d"}], "a message "),
        ([TURNS[0], 7], r"messages\[1\] .*got 7"),
        ([[TURNS[0]], TURNS[0]], "got {"),
    ],
)
def test_malformed_messages_are_refused_by_index(llm: LLM, messages: Any, complaint: str) -> None:
    with pytest.raises(GraphdecodeError, match=complaint):
        llm.chat(messages, chat_template=TEMPLATE)


def test_other_roles_need_a_template_that_shows_their_messages(tokenizer: Any) -> None:
    turns = [TURNS[1], {"role": "critic", "content": "Too long."}]
    assert "[critic]Too long." in render_chat(tokenizer, turns, chat_template=TEMPLATE).text
    users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(GraphdecodeError, match=r"messages\[1\].role .*'critic'"):
        render_chat(tokenizer, turns, chat_template=users)


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_an_assistants_content_may_be_empty(tokenizer: Any, content: dict[str, Any]) -> None:
    turns = [TURNS[1], {"role": "assistant", **content}, TURNS[3]]
    assert "[assistant]<" in render_chat(tokenizer, turns, chat_template=TEMPLATE).text


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "tools", "messages", "conversation", "self"])
def test_variables_of_a_template_are_none_of_the_arguments(tokenizer: Any, name: str) -> None:
    with pytest.raises(GraphdecodeError, match=f"chat_template_kwargs .*'{name}'"):
        render_chat(tokenizer, TURNS, chat_template=TEMPLATE, chat_template_kwargs={name: True})


def test_what_a_template_refuses_is_an_error_in_its_words(tokenizer: Any) -> None:
    for template, words in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if", "template"),
    ):
        with pytest.raises(GraphdecodeError, match=words):
            render_chat(tokenizer, TURNS, chat_template=template)


def test_a_chat_without_a_template_names_chat_template(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(GraphdecodeError, match="chat_template"):
        llm.chat(TURNS)
    (tmp_path / "last.jinja").write_text(LAST)
    assert llm.chat(TURNS, GREEDY, chat_template=tmp_path / "last.jinja")[0].outputs[0].text == "42"
    with pytest.raises(GraphdecodeError, match=r"none\.jinja"):
        llm.chat(TURNS, chat_template=tmp_path / "none.jinja")


def test_several_conversations_are_answered_side_by_side_each_with_its_parameters(llm: LLM) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("12+30=", "rev abc=", "1+1=")]
    params = [GREEDY, SamplingParams(temperature=0.0, max_tokens=1), GREEDY]
    outputs = llm.chat(chats, params, chat_template=LAST)
    assert [output.outputs[0].text for output in outputs] == ["42", "c", "2"]
    assert [output.prompt for output in outputs] == ["12+30=", "rev abc=", "1+1="]
    assert llm.chat(chats[0], chat_template=LAST)[0].outputs[0].finish_reason == "stop", "without parameters, too"


@pytest.fixture
def unaware(tmp_path: Path) -> Path:
    """The demo as a checkpoint that calls another token its end of sequence than the one that ends its answers."""
    eos, special = {"eos_token_id": 256}, {"split_special_tokens": False}
    return demo_copy(tmp_path / "model", config=eos, generation_config=eos, tokenizer_config=special)


def test_an_answer_ends_where_the_template_ends_a_turn(unaware: Path) -> None:
    template = "{{ messages[-1].content }}{% if messages[-1].role == 'assistant' %}<|eos|>\n{% endif %}"
    with LLM(unaware, max_batch_size=1, max_sequence_length=64) as llm:
        ended = llm.chat(TURNS, GREEDY, chat_template=template)[0].outputs[0]
        assert (ended.text, ended.finish_reason, ended.stop_reason) == ("42", "stop", 257)
        on = llm.chat(TURNS, GREEDY, chat_template=LAST)[0].outputs[0]
        assert (on.finish_reason, on.token_ids[:3]) == ("length", ended.token_ids), (
            "where the template ends with nothing"
        )


def test_the_end_of_a_turn_is_found_where_there_is_one(unaware: Path) -> None:
    own = load_tokenizer(unaware)

    def end_of(template: str) -> tuple[int, ...]:
        return render_chat(own, TURNS, chat_template=template).end_of_turn_ids

    assert end_of("{% for m in messages %}{{ m.content | trim }}<|eos|>\n{% endfor %}") == (257,)
    assert end_of("{% for m in messages %}{{ m.content }}!{% endfor %}") == ()
    assert end_of("{% if messages | length != 4 %}{{ raise_exception('four') }}{% endif %}x") == ()
    ends = render_chat(own, TURNS, chat_template="{% for m in messages %}{{ m.content }}<|eos|>{% endfor %}")
    assert ends.ending(SamplingParams(stop_token_ids=[7])).stop_token_ids == (7, 257)
    assert ends.ending(SamplingParams(ignore_eos=True)).stop_token_ids is None


def test_a_turn_of_harmony_goes_on_behind_its_thought() -> None:
    tokenizer = load_tokenizer(resolve_model_path("demo"))
    backend = tokenizer.backend_tokenizer
    backend.add_special_tokens([AddedToken(f"<|{name}|>", normalized=False) for name in ("end", "return", "call")])
    tokenizer.chat_template = "{# <|channel|>analysis #}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    ends = render_chat(tokenizer, [{"role": "user", "content": "Hi"}]).end_of_turn_ids
    assert ends == tuple(map(backend.token_to_id, ("<|return|>", "<|call|>")))


def test_async_llm_chats_like_llm(llm: LLM) -> None:
    async def answer() -> tuple[str | None, str, str | None]:
        async with AsyncLLM("demo", max_batch_size=2, max_sequence_length=256) as asynchronous:
            async for output in asynchronous.chat(TURNS, GREEDY, chat_template=LAST):
                last = output
            with pytest.raises(GraphdecodeError, match="no chat template"):
                asynchronous.chat(TURNS)
        return last.prompt, last.outputs[0].text, last.outputs[0].finish_reason

    assert asyncio.run(answer()) == ("12+30=", "42", "stop")


PARAMS = SamplingParams(temperature=0.0, max_tokens=8)
LINES = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
LIMIT = 256  # tokens, which are bytes here


@pytest.fixture(scope="module")
def small_llm() -> Iterator[LLM]:
    with LLM("demo", max_batch_size=1, max_sequence_length=LIMIT) as made:
        yield made


@pytest.fixture
def conversation(small_llm: LLM) -> Conversation:
    return Conversation(small_llm, sampling_params=PARAMS, chat_template=LINES)


def said(pieces: Iterable[Reasoning | Content]) -> str:
    return "".join(piece.text for piece in pieces)


def test_the_next_turn_finds_the_turns_before_it_in_the_cache(conversation: Conversation) -> None:
    page = conversation.llm.config.page_size
    before = 0
    for number in range(5):
        answer = said(conversation.say(f"number {number}: 1{number}+30="))
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
    with pytest.raises(GraphdecodeError, match=f"501 tokens.* {LIMIT}"):
        list(conversation.say("x" * 500))
    assert conversation.messages == said
    assert conversation.num_forgotten == 0


def test_an_answer_that_is_left_stays_as_far_as_it_came(conversation: Conversation) -> None:
    pieces = conversation.say("rev abcdef=")
    begun = next(pieces)
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": begun.text}
    assert not conversation.llm.engine.has_work, "the request was given up"
    assert said(conversation.say("12+30="))


def test_reset_drops_all_messages(conversation: Conversation) -> None:
    first = said(conversation.say("12+30="))
    conversation.reset()
    assert conversation.messages == []
    assert said(conversation.say("12+30=")) == first
