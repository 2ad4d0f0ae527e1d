"""Every example of docs/surfaces.md runs as it stands, and each public name of the surfaces has one."""

import re
from pathlib import Path

import pytest

from graphdecode.surfaces import flashinfer, optimum_neuron, transformer_engine

TEXT = (Path(__file__).parents[2] / "docs" / "surfaces.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_run(number):
    exec(compile(EXAMPLES[number], f"docs/surfaces.md, example {number + 1}", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("surface", [flashinfer, optimum_neuron, transformer_engine], ids=lambda s: s.__name__)
def test_each_public_name_has_an_example(surface):
    built_in = {"NonPagedKVCacheManager", "PagedKVCacheManager"}  # `InferenceParams` makes them
    missing = [name for name in surface.__all__ if name not in built_in and not any(name in text for text in EXAMPLES)]
    assert not missing
