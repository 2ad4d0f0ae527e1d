"""Quantized and dequantized copies of models, written atomically."""

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from graphdecode.convert.folders import (
    CONFIG_FILE,
    DequantizedGguf,
    quantization_config,
    write_other_files,
    write_weights,
)
from graphdecode.convert.gguf_model import GgufModel
from graphdecode.errors import ArgumentError
from graphdecode.hub.gguf_files import shards_of
from graphdecode.linear.quantization.registry import online_quantizations, weight_type
from graphdecode.linear.weight_form import FLOAT_DTYPES, Stored
from graphdecode.models.checkpoint import Checkpoint
from graphdecode.models.describe import check_model
from graphdecode.models.family import family_of
from graphdecode.models.fit import fitted_config
from graphdecode.models.gguf.source import Gguf
from graphdecode.models.gguf.tokenizer import vocabulary_fields
from graphdecode.models.quantize_on_load import quantized_on_load
from graphdecode.models.source import open_source
from graphdecode.models.weight_map import parts
from graphdecode.text.tokenizer import load_tokenizer

FORMATS = ("safetensors", "gguf")


def quantized_copy(
    model: str | Path,
    out: Path,
    quantize: str,
    *,
    group_size: int | None = None,
    file_format: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Path:
    """Write a model with quantized weights, and return `out`; a failure leaves nothing.

    Args:
        model: a checkpoint folder or a repository id, of plain weights, or a GGUF file, whose blocks are dequantized
            and quantized again; see `resolve_model_path`.
        out: the folder to make, or the `.gguf` file.
        quantize: `"int4"`, `"int8"` or `"fp8"`: safetensors in the format of compressed-tensors; `"q8_0"` or `"q4_k"`:
            GGUF.
        group_size: columns that share a scale, for `"int4"` and `"int8"`; None: the usual one.
        file_format: one of FORMATS; None: that of `quantize`.
        overwrite: replace what is at `out`.
        progress: show a bar on standard error.

    Raises:
        ArgumentError: the model, the path or an option cannot be used; nothing was written.
    """
    fitting = _format_of(quantize, file_format)
    source = open_source(model)
    if isinstance(source, Gguf):
        source = DequantizedGguf(model)
    elif not isinstance(source, Checkpoint):
        raise ArgumentError(f"model {str(model)!r} is neither a checkpoint folder of safetensors nor a GGUF file")
    path = source.path if isinstance(source, DequantizedGguf) else source.folder
    _check_out(out, path, fitting, overwrite)
    check_model(path, model_impl="native")
    config = fitted_config(source, source.config())
    quantizing = quantized_on_load(source, config, quantize, group_size)
    names = [part.name for part in parts(quantizing.weight_map)]
    _check_room(out, [quantizing.tensors[name] for name in names])
    if fitting == "gguf":
        file = GgufModel(quantizing, config)
        vocabulary = vocabulary_fields(load_tokenizer(path, replaceable=False), config.vocab_size)
        with _atomically(out) as partial:
            file.write(partial, vocabulary, counted(file.names, progress))
    else:
        tokenizer = load_tokenizer(path, replaceable=False) if isinstance(source, DequantizedGguf) else None
        with _atomically(out) as partial:
            partial.mkdir()
            write_weights(quantizing, partial, counted(names, progress))
            quantization = quantization_config(quantizing)
            if isinstance(source, DequantizedGguf):
                source.write_other_files(partial, tokenizer, {"quantization_config": quantization})
            else:
                write_other_files(source, partial, quantization)
    return out


def converted_copy(
    model: str | Path, out: Path, *, dtype: str = "auto", overwrite: bool = False, progress: bool = False
) -> Path:
    """Write a GGUF model as safetensors with config.json, tokenizer and chat template, and return `out`.

    `dtype` is that of the weights; "auto": bfloat16 for quantized blocks, else the file's own. Other arguments and
    errors are those of `quantized_copy`.
    """
    source = DequantizedGguf(model, dtype)
    _check_out(out, source.path, "safetensors", overwrite)
    check_model(source.path, model_impl="native")
    config = source.config()
    names = [part.name for part in parts(family_of(config.architecture).weights(config))]
    _check_room(out, [source.tensors[name] for name in names])
    tokenizer = load_tokenizer(source.path, replaceable=False)
    with _atomically(out) as partial:
        partial.mkdir()
        write_weights(source, partial, counted(names, progress, "converting"))
        source.write_other_files(partial, tokenizer, {})
    return out


def _format_of(quantize: str, file_format: str | None) -> str:
    formats = {name: each.file_format for name, each in online_quantizations().items() if each.file_format}
    fitting = formats.get(quantize)
    if fitting is None:
        raise ArgumentError(f"quantize must be {', '.join(formats)}, got {quantize!r}")
    if file_format not in (None, fitting):
        if file_format not in FORMATS:
            raise ArgumentError(f"the format must be one of {', '.join(FORMATS)}, got {file_format!r}")
        known = ", ".join(name for name, each in formats.items() if each == file_format)
        raise ArgumentError(f"{quantize} cannot be written as {file_format}, only {known}")
    return fitting


def _check_out(out: Path, model: Path, file_format: str, overwrite: bool) -> None:
    """Refuse a path that is taken, or whose folder does not exist."""
    if (out.suffix == ".gguf") != (file_format == "gguf"):
        kind = "end in .gguf" if file_format == "gguf" else "be a folder, not a .gguf file"
        raise ArgumentError(f"{out}: a copy in the format {file_format} must {kind}")
    if out.name in ("", ".."):
        raise ArgumentError(f"the copy needs a name, got {str(out)!r}")
    if not out.absolute().parent.is_dir():
        raise ArgumentError(f"{out.absolute().parent} is not a folder, so {out.name} cannot be made in it")
    if not out.exists():
        return
    files = [model.parent / name for name in shards_of(model.name)]
    if any(file.resolve().is_relative_to(out.resolve()) for file in files):
        raise ArgumentError(f"{out} contains the model itself, which is read while the copy is written")
    if not overwrite:
        raise ArgumentError(f"{out} is there already; --overwrite (overwrite=True) replaces it, or give another name")
    if file_format == "safetensors" and not (out / CONFIG_FILE).is_file():
        raise ArgumentError(f"{out} is not a checkpoint folder, and is not replaced")


def _check_room(out: Path, tensors: list[Stored]) -> None:
    def size(stored: Stored) -> int:
        quantized = weight_type(stored.dtype)
        bits = FLOAT_DTYPES[stored.dtype].itemsize * 8 if quantized is None else quantized.bits
        return int(math.prod(stored.shape) * bits) // 8

    needed = sum(map(size, tensors))
    free = shutil.disk_usage(out.absolute().parent).free
    if free < needed:
        raise ArgumentError(
            f"{out.absolute().parent} has {free / 2**20:.0f} MiB left, and the copy needs {needed / 2**20:.0f}"
        )


@contextmanager
def _atomically(out: Path) -> Iterator[Path]:
    """Yield a path beside `out` that replaces it in the end, or is removed on errors."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    try:
        written = scratch / out.name
        yield written
        if out.exists():
            os.replace(out, scratch / "before")
        os.replace(written, out)
    finally:
        if (scratch / "before").exists() and not out.exists():
            os.replace(scratch / "before", out)
        shutil.rmtree(scratch, ignore_errors=True)


def counted(names: list[str], progress: bool, doing: str = "quantizing") -> Iterator[str]:
    """Iterate over names, with a progress bar on standard error if `progress`."""
    return iter(tqdm(names, desc=doing, unit="tensor", disable=None, leave=False) if progress else names)
