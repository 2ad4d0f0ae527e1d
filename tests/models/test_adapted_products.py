"""An adapter of one product alone, for every product of every family: transformers' logits with merged weights."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from family_checkpoints import FAMILIES
from safetensors.torch import save_file
from torch import Tensor, nn

from graphdecode import LLM, BucketConfig, LoRARequest, SamplingParams
from graphdecode.models import adapter_bytes

# of each class one with all it can have, and those with other products
NAMES = {*{kind: name for name, (kind, _) in FAMILIES.items()}.values(), "gemma4-inputs", "nemotron-h", "llama4"}
TRANSPOSED = ("GptOss", "Llama4")  # whose stacks of experts are [experts, inputs, outputs]
NO_PRODUCT = (
    r"conv(1d)?\.weight$|embed_tokens_per_layer|_bias$"  # convolutions, a table beside the model, vectors of experts
)
PROMPT = [(7 * i * i + 13 * i + 5) % 250 + 3 for i in range(30)]  # a token that repeats would hide keys and values


def products_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of matrices, and of stacks of them, by their names without numbers."""
    found: dict[str, list[str]] = {}
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and not re.search(NO_PRODUCT, name):
            found.setdefault(re.sub(r"\.\d+\.", ".N.", name), []).append(name)
    if "lm_head.weight" not in found:
        found["lm_head.weight"] = ["lm_head.weight"]
    return found


def save_adapter(folder: Path, model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """Save an adapter of weights as PEFT does; return what it adds to each."""
    drawn, tensors, added, targets = torch.Generator().manual_seed(len(names)), {}, {}, []
    for name in names:
        weight, (path, _, last) = model.get_parameter(name), name.rpartition(".")
        module = model.get_submodule(path)
        experts, (outputs, inputs) = len(weight) if weight.dim() == 3 else 1, weight.shape[-2:]
        is_table, is_stack = isinstance(module, nn.Embedding), weight.dim() == 3
        if is_table or (is_stack and type(model).__name__.startswith(TRANSPOSED)):
            outputs, inputs = inputs, outputs
        a = torch.randn(2 * experts, inputs, generator=drawn) * 0.2
        b = torch.randn(outputs, 2 * experts, generator=drawn) * 0.2
        values = torch.einsum("ore,eri->eoi", b.view(outputs, 2, experts), a.view(experts, 2, inputs))
        values = values if is_stack else values[0]
        added[name] = values.mT if (outputs, inputs) != (*weight.shape[-2:],) else values
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            targets.append(f"{path.rpartition('.')[2]}.{last}")
        wrapper = f"base_model.model.{path}.lora_" + ("embedding_{}" if is_table else "{}.weight")
        tensors |= {wrapper.format("A"): a, wrapper.format("B"): b}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_parameters": targets, "peft_version": "0.21.0"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return added


def logprobs_with(model: nn.Module, added: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Return the log-probability of each token but the first, with weights changed in the meantime."""
    kept = {name: model.get_parameter(name) for name in added}
    for name, values in added.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, nn.Parameter(kept[name].detach() + values))
    with torch.no_grad():
        scores = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    for name, weight in kept.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, weight)
    return scores[range(len(tokens) - 1), tokens[1:]]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_product_can_be_adapted(checkpoint, tmp_path, name):
    base = checkpoint(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    kinds, plain = products_of(model), logprobs_with(model, {}, PROMPT)
    added = {kind: save_adapter(tmp_path / kind, model, names) for kind, names in kinds.items()}
    requests = [LoRARequest(kind, number, tmp_path / kind) for number, kind in enumerate(kinds, 1)]
    config = BucketConfig(max_batch_size=len(kinds), max_sequence_length=40, page_size=8)
    options = {"dtype": "float32", "max_adapters": len(kinds), "max_adapter_rank": 2, "backend": "eager"}
    has_experts = any("experts" in kind for kind in kinds)
    with LLM(base, config=config, skip_tokenizer_init=True, adapt_experts=has_experts, **options) as llm:
        outputs = llm.generate([PROMPT] * len(kinds), params, use_tqdm=False, lora_request=requests)
        held = sum(each.down.nbytes + each.up.nbytes for each in llm.model.adapters.products.values())
        counted = adapter_bytes(llm.model.config, len(kinds), 2, llm.model.dtype, adapt_experts=has_experts)
    assert held <= counted
    for kind, output in zip(kinds, outputs, strict=True):
        (answer,) = output.outputs
        entries = [*output.prompt_logprobs[1:], *answer.logprobs]
        found = torch.tensor([next(iter(entry.values())).logprob for entry in entries])
        wanted = logprobs_with(model, added[kind], [*PROMPT, *answer.token_ids])
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-3, msg=lambda told, kind=kind: f"{kind}: {told}")
        assert float((wanted[: len(plain)] - plain).abs().max()) > 0.01, kind  # the adapter matters
