"""How a checkpoint wants to be sampled: `generation_config.json`."""

from __future__ import annotations

from numbers import Real
from pathlib import Path

from graphdecode.models.config import read_json
from graphdecode.models.installable import installed_as

_SAMPLED = ("temperature", "top_k", "top_p", "min_p")  # what transformers looks at where do_sample is true
_ALWAYS = ("repetition_penalty",)


def generation_defaults(folder: Path) -> dict[str, float]:
    """Return the sampling parameters that a checkpoint's folder states, as transformers understands them.

    Where the file does not say `do_sample`, the answer is greedy: temperature 0. Nothing is stated without the file,
    but for a model that `graphdecode models install` knows: its makers' recommendation.

    Raises:
        UnsupportedModelError: the file cannot be read.
    """
    package = installed_as(folder)
    if package is not None:
        return dict(package.sampling)
    file = folder / "generation_config.json"
    if not file.exists():
        return {}
    settings = read_json(file)
    names = _ALWAYS + (_SAMPLED if settings.get("do_sample") else ())
    stated = {name: settings[name] for name in names if isinstance(settings.get(name), Real)}
    return stated if settings.get("do_sample") else {"temperature": 0.0, **stated}
