"""A folder's tokenizer is the one that transformers would choose, though less of transformers is imported for it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from graphdecode.models import resolve_model_path
from graphdecode.text import load_tokenizer
from graphdecode.text.light_tokenizer import LightTokenizer

TEXT = "417+385= <|bos|> rev wörld\n\n  日本"
CHANGES = [
    {},
    {"tokenizer_class": "PreTrainedTokenizerFast"},
    {"tokenizer_class": "LlamaTokenizerFast"},
    {"tokenizer_class": "Qwen2Tokenizer"},
    {"tokenizer_class": None},
]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", None])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change.get("tokenizer_class", "as it is")))
def test_it_is_the_one_that_transformers_chooses(tmp_path: Path, change: dict, model_type: str | None) -> None:
    folder = Path(shutil.copytree(resolve_model_path("demo"), tmp_path / "model"))
    for name, changes in (("tokenizer_config.json", change), ("config.json", {"model_type": model_type})):
        settings = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    chosen = ours.whole if isinstance(ours, LightTokenizer) else ours
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
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def changed(folder: Path, **changes: object) -> Path:
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | changes
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


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
def test_what_asks_for_more_than_its_json_says_is_left_to_transformers(
    tmp_path: Path, changes: dict, is_light: bool
) -> None:
    folder = changed(Path(shutil.copytree(resolve_model_path("demo"), tmp_path / "model")), **changes)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert isinstance(ours, LightTokenizer) is is_light
    for text in (TEXT, " rev , oceanic ."):
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.decode(ours(text).input_ids) == theirs.decode(theirs(text).input_ids)
    if ours.chat_template is not None:
        said = [{"role": "user", "content": "Hello"}]
        assert ours.apply_chat_template(said, tokenize=False) == theirs.apply_chat_template(said, tokenize=False)
