"""How a checkpoint wants to be sampled: `generation_config.json`."""

from __future__ import annotations

from pathlib import Path

from graphdecode.errors import shown
from graphdecode.models.config import UnsupportedModelError, flag, read_json
from graphdecode.models.installable import installed_as

_SAMPLED = ("temperature", "top_k", "top_p", "min_p")  # what transformers looks at where do_sample is true
_ALWAYS = ("repetition_penalty",)
GENERATION_FILE = "generation_config.json"


def generation_defaults(folder: Path) -> dict[str, float]:
    """Return the sampling parameters that a checkpoint's folder states, as transformers understands them.

    Where the file does not say `do_sample`, the answer is greedy: temperature 0. Nothing is stated without the file,
    but for a model that `graphdecode models install` knows: its makers' recommendation.

    Raises:
        UnsupportedModelError: the file cannot be read, or states what is no number; ranges are not looked at.
    """
    package = installed_as(folder)
    if package is not None:
        return dict(package.sampling)
    file = folder / GENERATION_FILE
    if not file.exists():
        return {}
    settings = read_json(file)
    try:
        samples = flag(settings, "do_sample", False)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{file}: {error}") from error
    names = _ALWAYS + (_SAMPLED if samples else ())
    stated = {name: settings[name] for name in names if settings.get(name) is not None}
    for name, value in stated.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise UnsupportedModelError(f"{file}: {name} must be a number, got {shown(value)}")
    return stated if samples else {"temperature": 0.0, **stated}
