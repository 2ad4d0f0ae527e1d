"""A model written anew with weights in few bits: whole, in a folder or a file that is there at once or not at all."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from graphdecode.errors import ArgumentError
from graphdecode.linear.weight_form import Stored
from graphdecode.models import ModelSourceError
from graphdecode.models.checkpoint import Checkpoint
from graphdecode.models.fields import read_json
from graphdecode.models.gguf.files import shards_of
from graphdecode.models.gguf.metadata import CONTROL, NORMAL, USER_DEFINED
from graphdecode.models.gguf.source import Gguf
from graphdecode.models.gguf.writing import GgufModel
from graphdecode.models.load import check_model
from graphdecode.models.quantised.compressed_files import quantization_config, write_weights
from graphdecode.models.quantised.methods import CONFIGURATIONS
from graphdecode.models.quantised.on_load import FORMS_OF, QuantisedBlocks, QuantisedGroups, quantised_on_load
from graphdecode.models.sources import Source, open_source
from graphdecode.models.weight_map import parts
from graphdecode.text.gguf_folder import PlainGguf
from graphdecode.text.gguf_tokenizer import cut_by
from graphdecode.text.pre_tokenizers import PRE_TOKENIZERS
from graphdecode.text.tokenizer import load_tokenizer

_INSTEAD = "int4, int8 and fp8 are written as safetensors, with the tokenizer as it is"
_UNUSED = 5  # of `tokenizer.ggml.token_type`
_NAMED = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}
_PROBES = (
    "Hello, world!  What's 12345 + 67?\n\n  def f(x):\n\treturn x**2 // 3\r\n",
    "na\u00efve Stra\u00dfe \u2167 don't WE'LL i'm 1234567 \u00bd\u00b2 http://a.b/c?d=e_f",
    "\u4f60\u597d\uff0c\u4e16\u754c 2024\u5e74 \u3053\u3093\u306b\u3061\u306f \U0001f469\u200d\U0001f467",
    "   \u00a0 e\u0301 camelCaseHTTPServer\n\n\n x",
)


def vocabulary_fields(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Return what a GGUF file says of a tokenizer of transformers.

    Args:
        tokenizer: with a tokenizer.json.
        vocab_size: rows of the embedding; ids without a token get names that no text has.

    Raises:
        ModelSourceError: it is no byte-level BPE, or cuts texts in a way that has no name.
    """
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    if model.get("type") != "BPE" or (described.get("decoder") or {}).get("type") != "ByteLevel":
        raise ModelSourceError(f"the tokenizer is no byte-level BPE, which alone is written as GGUF; {_INSTEAD}")
    whole = {token["id"]: token for token in described["added_tokens"]}
    by_id = {index: token for token, index in model["vocab"].items()} | {
        index: token["content"] for index, token in whole.items()
    }
    kinds = [
        (CONTROL if whole[index]["special"] else USER_DEFINED)
        if index in whole
        else (NORMAL if index in by_id else _UNUSED)
        for index in range(vocab_size)
    ]
    template = tokenizer.chat_template
    named = {f"{use}_token_id": getattr(tokenizer, name, None) for use, name in _NAMED.items()}
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": _name_of_cuts(tokenizer, described, bool(model.get("ignore_merges"))),
        "tokens": [by_id.get(index, f"[PAD{index}]") for index in range(vocab_size)],
        "token_type": kinds,
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        **{name: index for name, index in named.items() if index is not None},
        "add_bos_token": tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id],
    }
    found = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    return found | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def _name_of_cuts(tokenizer: Any, described: dict[str, Any], ignores_merges: bool) -> str:
    """Return the name of what happens to a text before BPE: of the way that cuts some texts as the tokenizer does."""
    backend = tokenizer.backend_tokenizer
    composes = "NFC" in json.dumps(described.get("normalizer"))
    expected = [backend.pre_tokenizer.pre_tokenize_str(probe) for probe in _PROBES]
    for name, known in PRE_TOKENIZERS.items():
        if known.nfc == composes and known.ignores_merges == ignores_merges:
            cuts = cut_by(known)
            if [cuts.pre_tokenize_str(probe) for probe in _PROBES] == expected:
                return name
    raise ModelSourceError(f"the tokenizer cuts texts in a way that GGUF has no name for; {_INSTEAD}")


_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")
_CONFIG = "config.json"
FORMATS = ("safetensors", "gguf")


def quantised_copy(
    model: str | Path,
    out: Path,
    quantize: str,
    *,
    group_size: int | None = None,
    file_format: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Path:
    """Write a model with rounded weights; nothing is left of it where that fails or is interrupted.

    Args:
        model: a checkpoint folder or a repository id, of plain weights, or a GGUF file, whose blocks are expanded and
            rounded anew; see `resolve_model_path`.
        out: the folder to make, or the `.gguf` file.
        quantize: `"int4"`, `"int8"` or `"fp8"`, for compressed-tensors' form of safetensors; `"q8_0"` or `"q4_k"`, for
            GGUF.
        group_size: columns that share a scale, of `"int4"` and `"int8"`; None: what is usual.
        file_format: one of FORMATS; None: the one that `quantize` is for.
        overwrite: replace what is at `out`.
        progress: show a bar on standard error.

    Returns:
        `out`.

    Raises:
        ArgumentError: the model, the path or an option cannot be used; nothing was written.
    """
    fitting = _format_of(quantize, file_format)
    source: Source | PlainGguf = open_source(model)
    if isinstance(source, Gguf):
        source = PlainGguf(model)
        path = source.path
    elif isinstance(source, Checkpoint):
        path = source.folder
    else:
        raise ArgumentError(
            f"model {str(model)!r} is neither a checkpoint folder of safetensors nor a GGUF file, and is not copied"
        )
    check_out(out, path, fitting, overwrite)
    check_model(path, model_impl="native")
    config = source.config()
    rounded = quantised_on_load(source, config, quantize, group_size)
    names = [part.name for part in parts(rounded.weight_map)]
    check_room(out.absolute().parent, sum(bytes_of(rounded.tensors[name]) for name in names))
    if isinstance(rounded, QuantisedBlocks):
        file = GgufModel(rounded, config)
        vocabulary = vocabulary_fields(load_tokenizer(path, replaceable=False), config.vocab_size)
        with at_once(out) as partial:
            file.write(partial, vocabulary, counted(file.names, progress))
    else:
        tokenizer = source.tokenizer() if isinstance(source, PlainGguf) else None
        with at_once(out) as partial:
            partial.mkdir()
            write_weights(rounded, partial, counted(names, progress))
            if isinstance(source, PlainGguf):
                source.write_rest(partial, tokenizer, {"quantization_config": quantization_config(rounded)})
            else:
                _write_rest(source, rounded, partial)
    return out


def _write_rest(source: Checkpoint, rounded: QuantisedGroups, folder: Path) -> None:
    """Write all other files of a checkpoint, its config.json with what the weights are now."""
    for file in source.folder.iterdir():
        if file.is_file() and file.name != _CONFIG and not any(file.match(pattern) for pattern in _WEIGHTS):
            shutil.copyfile(file, folder / file.name)
    settings: dict[str, Any] = read_json(source.folder / _CONFIG)
    settings = {name: value for name, value in settings.items() if name not in CONFIGURATIONS}
    settings["quantization_config"] = quantization_config(rounded)
    (folder / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n")


def _format_of(quantize: str, file_format: str | None) -> str:
    if quantize not in FORMS_OF:
        raise ArgumentError(f"quantize must be {', '.join(FORMS_OF)}, got {quantize!r}")
    fitting = "safetensors" if FORMS_OF[quantize] is None else "gguf"
    if file_format not in (None, fitting):
        known = ", ".join(name for name, form in FORMS_OF.items() if (form is None) == (file_format == "safetensors"))
        if file_format not in FORMATS:
            raise ArgumentError(f"the format must be one of {', '.join(FORMATS)}, got {file_format!r}")
        raise ArgumentError(f"{quantize} is not written as {file_format}; what is so are {known}")
    return fitting


def check_out(out: Path, model: Path, file_format: str, overwrite: bool) -> None:
    """Refuse a place where a copy cannot be made.

    Raises:
        ArgumentError: it is taken, or there is no folder for it; the message says what to do.
    """
    if (out.suffix == ".gguf") != (file_format == "gguf"):
        kind = "a name that ends in .gguf" if file_format == "gguf" else "a folder, and no .gguf file"
        raise ArgumentError(f"{out}: what is written in the format {file_format} needs {kind}")
    if out.name in ("", ".."):
        raise ArgumentError(f"the copy needs a name of its own, got {str(out)!r}")
    if not out.absolute().parent.is_dir():
        raise ArgumentError(f"{out.absolute().parent} is no folder, so {out.name} cannot be made in it")
    if not out.exists():
        return
    files = [model.parent / name for name in shards_of(model.name)]
    if any(file.resolve().is_relative_to(out.resolve()) for file in files):
        raise ArgumentError(f"{out} holds the model itself, which is read while the copy is written")
    if not overwrite:
        raise ArgumentError(f"{out} is there already; --overwrite (overwrite=True) replaces it, or give another name")
    if file_format == "safetensors" and not (out / _CONFIG).is_file():
        raise ArgumentError(f"{out} is no checkpoint folder, and is not replaced")


def check_room(folder: Path, size: int) -> None:
    """Refuse a copy for which a folder's disk has no room."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ArgumentError(f"{folder} has {free / 2**20:.0f} MiB left, and the copy needs {size / 2**20:.0f}")


def bytes_of(stored: Stored) -> int:
    """Return about how many bytes a tensor takes."""
    wide = {"F64": 8.0, "F32": 4.0, "INT8": 1.0, "FP8": 1.0, "Q8_0": 34 / 32, "INT4": 0.5, "Q4_K": 144 / 256}
    return int(math.prod(stored.shape) * wide.get(stored.dtype, 2.0))


@contextmanager
def at_once(out: Path) -> Iterator[Path]:
    """Give a path beside `out` that takes its place in the end, and is removed if there is no such end."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    try:
        made = scratch / out.name
        yield made
        if out.exists():
            os.replace(out, scratch / "before")
        os.replace(made, out)
    finally:
        if (scratch / "before").exists() and not out.exists():
            os.replace(scratch / "before", out)
        shutil.rmtree(scratch, ignore_errors=True)


def counted(names: list[str], progress: bool, doing: str = "quantising") -> Iterator[str]:
    """Go through names, with a bar on standard error if one is wanted."""
    return iter(tqdm(names, desc=doing, unit="tensor", disable=None, leave=False) if progress else names)
