"""Door 1: a model family is one file. This one has parallel blocks, fused products, own names and a multiplier."""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from driven_decoder import DrivenDecoder
from safetensors.torch import save_file
from test_split import on_all_ranks
from torch import Tensor

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.cache import LayerCache
from graphdecode.distributed import Collectives
from graphdecode.errors import ArgumentError
from graphdecode.kernels.linear.small_linear import SmallLinearConfig
from graphdecode.linear.forms import FORMS, register_form
from graphdecode.linear.unquantized import UnquantizedLinear
from graphdecode.linear.weight_form import FormOptions
from graphdecode.models import (
    Decoder,
    Family,
    ModelConfig,
    UnsupportedModelError,
    load_model,
    register_family,
    resolve_model_path,
)
from graphdecode.models.blocks import Addend, Attention, GatedMlp, Layer, Norm, Stem
from graphdecode.models.config import common_fields
from graphdecode.models.families.llama import head_run
from graphdecode.models.family import FAMILIES, outer_weights
from graphdecode.models.forward_context import ForwardContext, Tokens
from graphdecode.models.weight_map import Part, Run, WeightMap, product
from graphdecode.models.weights import Weights

NEAR_TIE = 1e-3
PROMPTS = [[65, 66, 67, 68, 69], [12], [7 * i % 256 for i in range(40)]]
SETTINGS = {
    "architectures": ["ToyForCausalLM"],
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "multiplier": 3.0,
}


@dataclass(frozen=True, kw_only=True)
class ToyConfig(ModelConfig):
    multiplier: float


@dataclass(frozen=True)
class ToyStem(Stem):
    inner: Stem = field(kw_only=True)  # the usual one: plain, quantized, or a rank's part
    multiplier: float = field(kw_only=True)

    def run(self, tokens: Tokens) -> Tensor:
        return self.inner.run(tokens).mul_(self.multiplier)


@dataclass(frozen=True)
class ToyLayer(Layer):
    """`x + attention(norm(x)) + mlp(norm(x))`."""

    norm: Norm
    attention: Attention
    mlp: GatedMlp

    def __call__(
        self, x: Addend, residual: Tensor, context: ForwardContext, cache: LayerCache
    ) -> tuple[Addend, Tensor]:
        hidden, residual = self.norm(x, residual, context)  # without `into`: a tensor, which both blocks read
        residual.add_(self.mlp.product(hidden, context))
        return self.attention(hidden, residual, context, cache)


class Toy(Family):
    architecture = "ToyForCausalLM"

    def config(self, settings: dict[str, Any]) -> ToyConfig:
        fields = common_fields(settings)
        windows = (-1,) * fields["num_hidden_layers"]
        return ToyConfig(architecture=self.architecture, windows=windows, multiplier=settings["multiplier"], **fields)

    def weights(self, config: ModelConfig) -> WeightMap:
        hidden, ff = config.hidden_size, config.intermediate_size
        q, kv = config.num_attention_heads * config.head_dim, head_run(config)
        positions = outer_weights(config)
        for i in range(config.num_hidden_layers):
            positions |= {
                f"{i}.norm": (Part(f"blocks.{i}.norm", (hidden,)),),
                **product(f"{i}.qkv", {f"blocks.{i}.qkv": (Run(q), kv, kv)}, hidden, split=0),
                **product(f"{i}.o", {f"blocks.{i}.out": hidden}, q, split=1),
                **product(f"{i}.gate_up", {f"blocks.{i}.gate": ff, f"blocks.{i}.up": ff}, hidden, split=0),
                **product(f"{i}.down", {f"blocks.{i}.down": hidden}, ff, split=1),
            }
        return positions

    def stem(self, config: ModelConfig, weights: Weights) -> Stem:
        assert isinstance(config, ToyConfig)
        inner = super().stem(config, weights)
        return ToyStem(inner.embedding, inner=inner, multiplier=config.multiplier)

    def layer(self, config: ModelConfig, weights: Weights, index: int) -> Layer:
        angles = weights.cos_sin(config.rope, config.head_dim)
        qkv, o = weights.linear(f"{index}.qkv"), weights.linear(f"{index}.o")
        return ToyLayer(
            weights.norm(f"{index}.norm", config.rms_norm_eps),
            Attention(qkv, None, None, o, config.head_dim, angles, config.attention_options(index)),
            GatedMlp(weights.linear(f"{index}.gate_up"), weights.linear(f"{index}.down"), config.activation),
        )


@dataclass(frozen=True)
class Fusing(UnquantizedLinear):
    """A GPU's products: norm, gate and residual sum are in their launch."""

    path = quantize = "fusing"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> UnquantizedLinear:
        return cls(weight.shape, bias, weight, config=SmallLinearConfig("dot", 32, 32, 1, 4, 1))


@pytest.fixture
def registered() -> Iterator[None]:
    register_family(Toy())
    register_form(Fusing)
    yield
    FORMS.remove(Fusing)
    del FAMILIES[Toy.architecture]


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"model.embed_tokens.weight": (259, 64), "lm_head.weight": (259, 64), "model.norm.weight": (64,)}
    for i in range(3):
        layer = {"norm": (64,), "qkv.weight": (128, 64), "out.weight": (64, 64), "gate.weight": (96, 64)}
        layer |= {"up.weight": (96, 64), "down.weight": (64, 96)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in layer.items()}
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model_path("demo") / file, tmp_path / file)
    return tmp_path, tensors


def expected_logits(tensors: dict[str, Tensor], ids: list[int]) -> Tensor:
    """The whole model in float64, without a cache, [tokens, vocab]."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    count = len(ids)
    turns = torch.arange(count).double()[:, None] * 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    def turned(x: Tensor) -> Tensor:  # [heads, tokens, 16]
        pairs = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(torch.ones_like(turns), turns)
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    x = 3.0 * weights["model.embed_tokens.weight"][ids]
    future = torch.ones(count, count).triu(1).bool()
    for i in range(3):
        of = {name.removeprefix(f"blocks.{i}."): weight for name, weight in weights.items()}
        normed = norm(x, of["norm"])
        q, k, v = (normed @ of["qkv.weight"].T).view(count, 8, 16).transpose(0, 1).split([4, 2, 2])
        scores = turned(q) @ turned(k).repeat_interleave(2, 0).mT / math.sqrt(16)
        attended = scores.masked_fill(future, -math.inf).softmax(-1) @ v.repeat_interleave(2, 0)
        gate = normed @ of["gate.weight"].T
        inner = gate * gate.sigmoid() * (normed @ of["up.weight"].T)
        x = x + attended.transpose(0, 1).reshape(count, 64) @ of["out.weight"].T + inner @ of["down.weight"].T
    return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("quantize", [None, "fusing"])
def test_a_family_from_outside_is_decoded_through_captured_graphs(
    checkpoint: tuple[Path, dict[str, Tensor]], quantize: str | None
) -> None:
    folder, tensors = checkpoint
    config = BucketConfig(max_batch_size=3, max_sequence_length=128, page_size=8)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM(folder, config=config, dtype="float32", quantize=quantize) as llm:
        outputs = llm.generate(PROMPTS, params)
    answers = [output.outputs[0].token_ids for output in outputs]
    assert len({tuple(answer) for answer in answers}) == 3
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = expected_logits(tensors, prompt + list(answer))[len(prompt) - 1 : -1]
        margin = logits.amax(-1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert margin.max() < NEAR_TIE, f"token {int(margin.argmax())} is {margin.max():.4f} below the best"


@pytest.mark.usefixtures("registered")
def test_ranks_share_a_family_from_outside(checkpoint: tuple[Path, dict[str, Tensor]]) -> None:
    folder, tensors = checkpoint
    texts = PROMPTS[:2]

    def logits(shared: Collectives) -> Tensor:
        with torch.no_grad():
            model = load_model(folder, device="cpu", dtype="float32", shared=shared)
            assert isinstance(model, Decoder)
            driven = DrivenDecoder(model, rows=2)
            driven.prefill([text[:-1] for text in texts], [0, 0])
            return driven.decode([text[-1] for text in texts], [len(text) - 1 for text in texts])

    expected = torch.stack([expected_logits(tensors, text)[-1] for text in texts]).float()
    for of_rank in on_all_ranks(2, logits):
        torch.testing.assert_close(of_rank, expected, rtol=1e-4, atol=1e-4)


class Misspelt(Toy):
    def layer(self, config: ModelConfig, weights: Weights, index: int) -> Layer:
        weights.linear(f"{index}.gateup")
        raise AssertionError("it has no such product")


def test_a_name_that_the_weight_map_lacks_is_refused_with_one_that_it_has(
    checkpoint: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, Misspelt.architecture, Misspelt())
    with pytest.raises(ArgumentError, match=r"0\.gateup.*0\.gate_up"):
        load_model(checkpoint[0], device="cpu")


def test_without_its_line_in_the_registry_it_is_refused(checkpoint: tuple[Path, dict[str, Tensor]]) -> None:
    with pytest.raises(UnsupportedModelError, match="ToyForCausalLM.*--load-module"):
        LLM(checkpoint[0], model_impl="native")
