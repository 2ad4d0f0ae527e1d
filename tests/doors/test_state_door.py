"""Door 5: a layer's state is one file from outside, the example of docs/extend/state.md, in every kind of step."""

import json
import math
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ROOT
from safetensors.torch import load_file
from torch import Tensor

from graphdecode import LLM, SamplingParams
from graphdecode.engine.steps import step as step_module
from graphdecode.errors import ArgumentError
from graphdecode.models import resolve_model_path
from graphdecode.models.family import FAMILIES

NEAR_TIE = 1e-3
NEW_TOKENS = 16
ENGINES: dict[str, dict[str, Any]] = {
    "chunks of 7 and few pages": {"max_prefill_tokens": 7, "page_size": 4, "total_num_pages": 24},
    "mixed steps": {"max_prefill_tokens": 20},
    "three steps a launch": {"steps_per_launch": 3},
    "drafts": {"speculation": {"method": "ngram", "num_tokens": 3, "ngram_min": 1}},
    "prefixes": {"state_checkpoints": 8, "state_checkpoint_tokens": 8, "page_size": 8},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo, of another architecture, and the file that brings it."""
    folder = tmp_path_factory.mktemp("fading") / "model"
    shutil.copytree(resolve_model_path("demo"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["FadingForCausalLM"]}))
    text = (ROOT / "docs" / "extend" / "state.md").read_text()
    (file,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Fading(" in block)
    (folder.parent / "fading.py").write_text(file[: file.index("with tempfile")])
    return folder


@pytest.fixture(scope="module", autouse=True)
def families() -> Iterator[None]:
    """Take away again what the file registers when it is loaded, once."""
    existing = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(existing)


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    result = [[rng.randrange(97, 123) for _ in range(length)] for length in (1, 2, 7, 8, 15, 17, 31, 40, 60)]
    result[7][:16] = result[6][:16]
    return result


def expected_logits(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """The whole model in float64, token by token where it has a state, [tokens, vocab]."""
    count = len(ids)
    turns = torch.arange(count).double()[:, None] * 10000.0 ** (-torch.arange(0, 32, 2).double() / 32)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"model.{name}.weight"]

    def turned(x: Tensor) -> Tensor:  # [heads, tokens, 32]
        pairs = torch.complex(x[..., :16], x[..., 16:]) * torch.polar(torch.ones_like(turns), turns)
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.view(count, -1, 32).transpose(0, 1) for each in (q, k, v))
        scores = turned(q) @ turned(k).repeat_interleave(2, 0).mT / math.sqrt(32)
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -math.inf)
        return (scores.softmax(-1) @ v.repeat_interleave(2, 0)).transpose(0, 1).reshape(count, -1)

    def faded(x: Tensor) -> Tensor:
        mean, read = torch.zeros_like(x[0]), []
        for token in x:
            mean = 0.75 * mean + 0.25 * token
            read.append(mean)
        return torch.stack(read)

    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(4):
        of = f"layers.{layer}."
        q, k, v = (
            norm(x, f"{of}input_layernorm") @ weights[f"model.{of}self_attn.{name}_proj.weight"].T for name in "qkv"
        )
        mixed = attended(q, k, v) if layer % 2 else q.sigmoid() * faded(torch.cat((k, v), dim=1))
        x = x + mixed @ weights[f"model.{of}self_attn.o_proj.weight"].T
        normed = norm(x, f"{of}post_attention_layernorm")
        gate, up = (normed @ weights[f"model.{of}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ weights[f"model.{of}mlp.down_proj.weight"].T
    return norm(x, "norm") @ weights["model.embed_tokens.weight"].T


@pytest.mark.parametrize("engine", ENGINES)
def test_a_registered_state_generates_the_tokens_of_a_reference_loop(checkpoint, monkeypatch, engine):
    monkeypatch.setattr(step_module, "CACHED_BYTES", 0)  # so that steps take prompts along
    weights = {name: tensor.double() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    file = checkpoint.parent / "fading.py"
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    sizes: dict[str, Any] = {"max_batch_size": 4, "batch_sizes": [4], "max_sequence_length": 96}
    with LLM(checkpoint, load_modules=[file], dtype="float32", **sizes | ENGINES[engine]) as llm:
        assert llm.graphs.backend in ("recorded", "cuda")
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        outputs += llm.generate(prompts()[-1], params, use_tqdm=False)
        assert (llm.num_preemptions > 0) == ("pages" in engine)
        assert (llm.stats.mixed_steps > 0) == (engine != "drafts")
        assert (llm.stats.speculation.accepted > 0) == (engine == "drafts")
        assert (outputs[-1].metrics.num_cached_tokens > 0) == (engine == "prefixes")
    for output in outputs:
        answer = output.outputs[0].token_ids
        logits = expected_logits(weights, [*output.prompt_token_ids, *answer])[len(output.prompt_token_ids) - 1 : -1]
        margin = logits.amax(-1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert margin.max() < NEAR_TIE, f"token {int(margin.argmax())} is {margin.max():.4f} below the best"


def test_a_state_that_no_one_can_split_is_refused_for_several_ranks(checkpoint: Path) -> None:
    with pytest.raises(ArgumentError, match="tensor_parallel_size=2"):
        LLM(checkpoint, load_modules=[checkpoint.parent / "fading.py"], tensor_parallel_size=2)
