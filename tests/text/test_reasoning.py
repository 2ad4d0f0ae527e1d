"""Reasoning of chat templates: budgets, and structured outputs behind it."""

import json
from collections.abc import Iterator

import pytest
from demo_copies import demo_copy

from graphdecode import LLM, SamplingParams, StructuredOutputsParams
from graphdecode.text import Conversation
from graphdecode.text.chat_formats import Content, Reasoning

TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE = TURNS + (
    "{% if add_generation_prompt %}assistant: {% if opens is defined %}<think>\n{% elif thinks is not defined %}"
    "<think>\n\n</think>\n{% endif %}{% endif %}"
)
QUESTION = [{"role": "user", "content": "417+385="}]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The demo, which writes the bytes of markers one by one."""
    folder = demo_copy(tmp_path_factory.mktemp("thinking") / "demo", tokenizer_config={"chat_template": TEMPLATE})
    with LLM(str(folder), dtype="float32", max_batch_size=4, max_sequence_length=256) as engine:
        yield engine


CLOSING = list(b"</think>")  # the demo's tokens are bytes


def answered(llm: LLM, variables: dict[str, bool], **params: object) -> list[int]:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 60, "ignore_eos": True, **params})  # type: ignore[arg-type]
    (output,) = llm.chat(QUESTION, sampling, use_tqdm=False, chat_template_kwargs=variables)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("budget", [0, 5])
def test_a_budget_closes_what_the_template_opened_and_no_other_answer(llm: LLM, budget: int) -> None:
    free = answered(llm, {"opens": True})
    assert free[budget : budget + 8] != CLOSING
    closed = answered(llm, {"opens": True}, thinking_token_budget=budget)
    assert closed[: budget + 8] == free[:budget] + CLOSING
    for variables in ({}, {"thinks": True}):  # closed in the prompt; the model opens none
        assert answered(llm, variables, thinking_token_budget=budget) == answered(llm, variables)
    assert answered(llm, {"opens": True}, thinking_token_budget=-1) == free


def test_a_structured_output_is_behind_the_reasoning(llm: LLM) -> None:
    schema = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    tokens = answered(llm, {"opens": True}, thinking_token_budget=7, structured_outputs=schema)
    assert tokens[:15] == answered(llm, {"opens": True})[:7] + CLOSING
    for answer in (tokens[15:], answered(llm, {}, thinking_token_budget=7, structured_outputs=schema)):
        assert json.loads(bytes(answer))["n"] in (1, 2)


def test_a_raw_prompt_that_ends_within_reasoning_has_the_budget_too(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, thinking_token_budget=2)
    for prompt in ("<think>abc", {"prompt_token_ids": list(b"<think>abc")}):
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.outputs[0].text[2:].startswith("</think>")


def test_a_conversation_keeps_thoughts_apart_from_answers(llm: LLM) -> None:
    opening = TURNS + "{% if add_generation_prompt %}assistant: <think>\n{% endif %}{# </think> #}"
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, thinking_token_budget=5)
    conversation = Conversation(llm, sampling_params=params, chat_template=opening)
    pieces = list(conversation.say("417+385="))
    thought, answer = ("".join(p.text for p in pieces if isinstance(p, kind)) for kind in (Reasoning, Content))
    assert thought
    assert answer
    assert "think>" not in thought + answer
    assert [type(piece) for piece in pieces] == sorted(
        [type(piece) for piece in pieces], key=[Reasoning, Content].index
    )
    said = {"role": "assistant", "content": answer, "reasoning_content": thought}
    assert conversation.messages == [{"role": "user", "content": "417+385="}, said]
