"""A GGUF model written anew as a checkpoint folder, which is there at once or not at all."""

from __future__ import annotations

from pathlib import Path

from graphdecode.models.family import family_of
from graphdecode.models.load import check_model
from graphdecode.models.quantised.compressed_files import write_weights
from graphdecode.models.weight_map import parts
from graphdecode.text.gguf_folder import PlainGguf
from graphdecode.text.quantised_copy import at_once, bytes_of, check_out, check_room, counted


def converted_copy(
    model: str | Path, out: Path, *, dtype: str = "auto", overwrite: bool = False, progress: bool = False
) -> Path:
    """Write a GGUF model as safetensors with config.json, tokenizer and chat template.

    Args:
        model: a `.gguf` file, or what leads to one; see `resolve_model_path`.
        out: the folder to make.
        dtype: of the weights; "auto": bfloat16 for blocks of few bits, else the file's own.
        overwrite: replace the checkpoint folder that is at `out`.
        progress: show a bar on standard error.

    Returns:
        `out`.

    Raises:
        ArgumentError: the model, the path or an option cannot be used; nothing was written.
    """
    source = PlainGguf(model, dtype)
    check_out(out, source.path, "safetensors", overwrite)
    check_model(source.path, model_impl="native")
    config = source.config()
    names = [part.name for part in parts(family_of(config.architecture).weights(config))]
    check_room(out.absolute().parent, sum(bytes_of(source.tensors[name]) for name in names))
    tokenizer = source.tokenizer()
    with at_once(out) as partial:
        partial.mkdir()
        write_weights(source, partial, counted(names, progress, "converting"))
        source.write_rest(partial, tokenizer)
    return out
