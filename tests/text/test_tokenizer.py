"""A folder's tokenizer is the one that transformers would choose, though less of transformers is imported for it."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from command_line import run_python
from demo_copies import demo_copy
from jinja2 import TemplateError
from transformers import AutoTokenizer

from graphdecode.models import resolve_model_path
from graphdecode.text import load_tokenizer
from graphdecode.text.light_tokenizer import LightTokenizer
from tests.text.test_gguf_tokenizer import LINES, Edit, write

TEXT = "417+385= <|bos|> rev wörld\n\n  日本"
CHANGES = [
    {},
    {"tokenizer_class": "PreTrainedTokenizerFast"},
    {"tokenizer_class": "LlamaTokenizerFast"},
    {"tokenizer_class": "Qwen2Tokenizer"},
    {"tokenizer_class": "missing"},
]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "missing"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change.get("tokenizer_class", "as it is")))
def test_it_is_the_one_that_transformers_chooses(tmp_path: Path, change: dict, model_type: str) -> None:
    folder = demo_copy(tmp_path / "model", tokenizer_config=change, config={"model_type": model_type})
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    chosen = ours.full if isinstance(ours, LightTokenizer) else ours
    assert type(chosen) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids


def test_it_costs_no_import_of_models() -> None:
    script = (
        "import sys\nfrom graphdecode.models import resolve_model_path\n"
        "from graphdecode.text.tokenizer import load_tokenizer\n"
        "load_tokenizer(resolve_model_path('demo'))\nprint('transformers.activations' in sys.modules)"
    )
    assert run_python(script) == "False\n"


@pytest.mark.parametrize(
    ("changes", "is_light"),
    [
        ({"clean_up_tokenization_spaces": True, "split_special_tokens": False}, True),  # which BPE does not do
        ({"chat_template": "{{ messages[0].content }}{{ eos_token }}"}, True),
        ({"add_bos_token": True}, False),
        ({"additional_special_tokens": ["rev"]}, False),
        ({"eos_token": "<|new|>"}, False),
        ({"added_tokens_decoder": {"0": {"content": "<|bos|>", "special": False}}}, False),
    ],
)
def test_settings_beyond_tokenizer_json_are_left_to_transformers(tmp_path, changes, is_light):
    folder = demo_copy(tmp_path / "model", tokenizer_config=changes)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert isinstance(ours, LightTokenizer) is is_light
    for text in (TEXT, " rev , oceanic ."):
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.decode(ours(text).input_ids) == theirs.decode(theirs(text).input_ids)
    if ours.chat_template is not None:
        said = [{"role": "user", "content": "Hello"}]
        assert ours.apply_chat_template(said, tokenize=False) == theirs.apply_chat_template(said, tokenize=False)


PLAIN = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is <|im_end|> é 日本?"}]
TEMPLATES = {
    "loop": "{% for m in messages %}\n  {% if loop.first %}\n{{ bos_token }}{% endif %}\n{{ m.role }}: "
    "{{ m['content'] | trim }}{% if m.role == 'none' %}{% break %}{% endif %}\n{% endfor %}\n"
    "{% if add_generation_prompt %}A:{% endif %}",
    "kept": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
    "{{ m | tojson }}{{ tools is none }}{{ documents is none }}{% endfor %}{{ style }}{{ absent is defined }}",
    "parts": "{% macro said(m) -%}  {{ m.content }}  {%- endmacro %}{{ messages | map(attribute='role') | join(',') }}"
    "{% for m in messages[1:] %}{{- said(m) -}}{% endfor %}{{ dict(a=1) | tojson(indent=2) }}{{ eos_token }}",
}


def pair(path: Path, vocabulary: str, edit: Edit) -> tuple[Any, Any]:
    light = load_tokenizer(write(path, vocabulary, edit))
    return light, light.full


@pytest.mark.parametrize("vocabulary", ["byte_level", "pieces"])
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_tokens_and_texts_are_those_of_transformers(tmp_path: Path, vocabulary: str, begins: bool, ends: bool) -> None:
    def edit(writer: Any) -> None:
        if vocabulary == "byte_level":
            writer.add_tokenizer_pre("gpt-2")
        writer.add_add_bos_token(begins)
        writer.add_add_eos_token(ends)

    light, whole = pair(tmp_path / "v.gguf", vocabulary, edit)
    for special in (True, False):
        alone = [light(line, add_special_tokens=special).input_ids for line in LINES]
        assert alone == [whole(line, add_special_tokens=special).input_ids for line in LINES]
        assert alone == light(LINES, add_special_tokens=special).input_ids
        for skipped in (True, False):
            texts = [light.decode(ids, skip_special_tokens=skipped) for ids in alone]
            assert texts == [whole.decode(ids, skip_special_tokens=skipped) for ids in alone]
    assert (light.bos_token_id, light.eos_token_id, len(light)) == (whole.bos_token_id, whole.eos_token_id, len(whole))
    assert light.special_tokens_map == whole.special_tokens_map


def test_truncation_of_the_full_tokenizer_does_not_persist(tmp_path: Path) -> None:
    light, _ = pair(tmp_path / "v.gguf", "pieces", lambda writer: None)
    before = light(LINES[:3]).input_ids
    light(LINES[:3], truncation=True, max_length=4)
    assert light(LINES[:3]).input_ids == before
    assert light(LINES[0]).input_ids == before[0]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
@pytest.mark.parametrize("prompted", [False, True])
def test_conversations_are_those_of_transformers(tmp_path: Path, template: str, prompted: bool) -> None:
    light, whole = pair(tmp_path / "v.gguf", "pieces", lambda writer: writer.add_chat_template(template))
    how = {"tokenize": False, "add_generation_prompt": prompted, "style": "short"}
    for messages in (PLAIN, PLAIN[1:]):
        assert light.apply_chat_template(messages, **how) == whole.apply_chat_template(messages, **how)
    with pytest.raises(ValueError, match="empty conversation"):
        light.apply_chat_template([], **how)


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no system') }}", "{{ ().__class__.__bases__ }}", "{% set ns = namespace(__x=1) %}"],
)
def test_a_template_that_refuses_or_reaches_out_fails_in_both(tmp_path: Path, template: str) -> None:
    light, whole = pair(tmp_path / "v.gguf", "pieces", lambda writer: writer.add_chat_template(template))
    for tokenizer in (light, whole):
        with pytest.raises(TemplateError):
            tokenizer.apply_chat_template(PLAIN, tokenize=False)


def test_it_goes_to_another_process_with_all_that_it_needs(tmp_path: Path) -> None:
    light, whole = pair(tmp_path / "v.gguf", "pieces", lambda writer: writer.add_chat_template(TEMPLATES["loop"]))
    for sent in (light, load_tokenizer(resolve_model_path("demo"))):
        there = pickle.loads(pickle.dumps(sent))
        assert there(LINES).input_ids == sent(LINES).input_ids
        assert there.full(LINES).input_ids == sent.full(LINES).input_ids
    assert light.full.special_tokens_map == whole.special_tokens_map
