"""The vocabularies, lines and llama.cpp's token ids that tests compare GGUF tokenizers with.

    tools/make gguf-vocabularies --llama-python PYTHON

Needs sentencepiece here, and llama-cpp-python in PYTHON's environment. Merges of the small vocabularies ignore words,
so that a text cut in other places has other tokens.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import gguf
import typer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from checks.gguf import lines, llama_ids, real_lines
from graphdecode.models.gguf.tokenizer import PRE_TOKENIZERS
from harness import ROOT

OUT = ROOT / "tests" / "text" / "gguf_vocabularies.json"
SPECIAL = ["<|begin|>", "<|end|>"]
APPROXIMATE = ("gpt-4o", "llama4", "tekken")  # llama.cpp knows the case of only ASCII letters
NUM_LINES = 50


def byte_level(corpus: list[str]) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [1] * len(tokens) + [3] * len(SPECIAL)
    merges = [" ".join(merge) for merge in model["merges"]]
    return {"tokens": tokens + SPECIAL, "kinds": kinds, "merges": merges, "bos": len(tokens)}


def sentence_pieces(corpus: list[str]) -> dict[str, Any]:
    trained = io.BytesIO()
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_writer=trained, vocab_size=900, model_type="bpe", byte_fallback=True,
        split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=0.99,
        user_defined_symbols=SPECIAL, num_threads=1, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    ids = range(model.vocab_size())

    def kind(index: int) -> int:
        if model.is_unknown(index):
            return 2
        if model.is_byte(index):
            return 6
        return 3 if model.is_control(index) else 4 if model.id_to_piece(index) in SPECIAL else 1

    return {
        "tokens": [model.id_to_piece(index) for index in ids],
        "kinds": [kind(index) for index in ids],
        "bos": 1,
        "scores": [model.get_score(index) for index in ids],
    }


def write(path: Path, vocabulary: dict[str, Any], edit: Callable[[gguf.GGUFWriter], None]) -> None:
    """Write a file with a vocabulary, no tensors, and the fields that llama.cpp requires."""
    writer = gguf.GGUFWriter(path, "llama")
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{name}")(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["kinds"])
    writer.add_bos_token_id(vocabulary["bos"])
    writer.add_eos_token_id(vocabulary["bos"] + 1)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(llama_python: Annotated[str, typer.Option(help="The interpreter that has llama-cpp-python.")]) -> None:
    corpus = real_lines()[::7]
    texts = [line for line in lines(SPECIAL) if len(line) < 120]
    texts = texts[: NUM_LINES // 2] + texts[-NUM_LINES // 2 :]
    found: dict[str, Any] = {"lines": texts, "byte_level": byte_level(corpus), "pieces": sentence_pieces(corpus)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"

        def ids_of(vocabulary: str, edit: Callable[[gguf.GGUFWriter], None], texts: list[str]) -> list[list[int]]:
            write(path, found[vocabulary], edit)
            return llama_ids(path, texts, llama_python)

        def cut_by(name: str) -> Callable[[gguf.GGUFWriter], None]:
            def edit(writer: gguf.GGUFWriter) -> None:
                writer.add_tokenizer_model("gpt2")
                writer.add_tokenizer_pre(name)
                writer.add_token_merges(found["byte_level"]["merges"])

            return edit

        def spaced(prefix: bool) -> Callable[[gguf.GGUFWriter], None]:
            def edit(writer: gguf.GGUFWriter) -> None:
                writer.add_tokenizer_model("llama")
                writer.add_token_scores(found["pieces"]["scores"])
                writer.add_unk_token_id(0)
                writer.add_add_space_prefix(prefix)

            return edit

        plain = [text if text.isascii() else "" for text in texts]
        found["cut_by"] = {
            name: ids_of("byte_level", cut_by(name), plain if name in APPROXIMATE else texts) for name in PRE_TOKENIZERS
        }
        found["spaced"] = {str(prefix): ids_of("pieces", spaced(prefix), texts) for prefix in (True, False)}
    different = {json.dumps(ids): name for name, ids in found["cut_by"].items()}
    found["same_as"] = {name: different[json.dumps(ids)] for name, ids in found["cut_by"].items()}
    found["cut_by"] = {name: found["cut_by"][name] for name in different.values()}
    OUT.write_text(json.dumps(found, ensure_ascii=True, separators=(",", ":")) + "\n")
    print(f"{OUT}: {OUT.stat().st_size} bytes")
