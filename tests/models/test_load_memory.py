"""While a model is loaded, no second copy of it is in memory, whichever form its weights take."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from graphdecode.memory.pages import HUGE_PAGE, filled_pages, join_pages
from graphdecode.models import config_of
from graphdecode.models.family import family_of
from graphdecode.models.weight_map import parts

SETTINGS = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}
WITH_EXPERTS = {"architectures": ["MixtralForCausalLM"], "intermediate_size": 704, "num_local_experts": 4}
MIB = 2**20
BESIDE_BYTES = 64 * MIB  # what else a process may hold
# the process's peak while the model is loaded, over what it had before: a first product brings oneDNN's own code
SCRIPT = r"""
import re, sys, torch
from graphdecode.linear.linear_choice import LinearTuner
from graphdecode.linear.forms import linear_of
from graphdecode.linear.weight_form import FormOptions
from graphdecode.models import load_model
torch.set_num_threads(1)
dtype = getattr(torch, sys.argv[2])
warm = LinearTuner()
for rows in (1, 8):
    linear_of(torch.zeros(64, 64, dtype=dtype), None, FormOptions(torch.device("cpu"), dtype, warm)).apply(
        torch.empty(rows, 64, dtype=dtype), torch.zeros(rows, 64, dtype=dtype))
memory = lambda name: 1024 * int(re.search(name + r":\s+(\d+)", open("/proc/self/status").read())[1])
before = memory("VmRSS")
model = load_model(sys.argv[1], device="cpu", dtype=dtype)
storages = {tensor.data_ptr() if not tensor.is_mkldnn else id(tensor): tensor for tensor in model.constants}
print(memory("VmHWM") - before, memory("VmRSS") - before, sum(t.numel() * t.element_size() for t in storages.values()))
"""


def saved(folder: Path, settings: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(settings))
    config = config_of(settings)
    tensors = parts(family_of(config.architecture).weights(config))
    ones = {part.name: torch.ones(part.shape, dtype=torch.bfloat16) for part in tensors}
    save_file(ones, folder / "model.safetensors")
    return folder


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
@pytest.mark.parametrize(("dtype", "more"), [("bfloat16", {}), ("float32", {}), ("bfloat16", WITH_EXPERTS)])
def test_loading_takes_the_memory_of_the_model_and_of_one_product(tmp_path: Path, dtype: str, more: dict) -> None:
    folder = saved(tmp_path, SETTINGS | more)
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(folder), dtype], capture_output=True, text=True, check=True)
    peak, resident, model = map(int, ran.stdout.split())
    assert model > 0.8 * (folder / "model.safetensors").stat().st_size
    largest = SETTINGS["hidden_size"] * SETTINGS["intermediate_size"] * 2 * getattr(torch, dtype).itemsize
    assert resident < 1.1 * model, f"{resident / MIB:.0f} MiB are kept of a model of {model / MIB:.0f} MiB"
    # a product is fused from parts of the mapped file, and packed from that: two more copies of the largest
    most = 1.1 * model + 2 * largest + BESIDE_BYTES
    assert peak < most, f"{peak / MIB:.0f} MiB at most for a model of {model / MIB:.0f} MiB"


MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_only_pages_that_are_nearly_filled_are_taken():
    page = HUGE_PAGE
    whole = (3 * page - 100, 6 * page + 100)
    assert filled_pages([whole]) == [(3 * page, 6 * page)]
    halves = [(8 * page, 8 * page + page // 2), (8 * page + page // 2 + 4096, 9 * page)]
    assert filled_pages(halves[:1]) == []
    assert filled_pages([whole, *halves]) == [(3 * page, 6 * page), (8 * page, 9 * page)]


@pytest.mark.skipif(sys.platform != "linux" or not MODES.exists(), reason="needs Linux with huge pages")
def test_tensors_in_huge_pages_are_what_and_where_they_were():
    before = _huge_bytes()  # the system may give some of them huge pages by itself
    tensors = [torch.arange(700_000, dtype=torch.int32) + index for index in range(8)]  # of 2.8 MB
    addresses = [tensor.data_ptr() for tensor in tensors]
    join_pages(tensors)
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    for index, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.arange(700_000, dtype=torch.int32) + index)
    if "[never]" not in MODES.read_text() and _has_collapse():
        assert _huge_bytes() - before >= 4 * HUGE_PAGE


def _has_collapse() -> bool:
    major, minor = (int(part) for part in Path("/proc/sys/kernel/osrelease").read_text().split(".")[:2])
    return (major, minor) >= (6, 1)


def _huge_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0
