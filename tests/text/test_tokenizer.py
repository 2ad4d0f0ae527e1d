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
    assert type(ours) is type(theirs)
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
