"""Adapters in slots: transformers' tokens with merged weights, in any mixture; what cannot be used is refused."""

import copy
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import gguf_checkpoints
import pytest
import torch
import transformers
from compiled_kernels import compiled_or_gpu
from family_checkpoints import SMALL
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from adopted_models import ADOPTED, TINY, save_random
from graphdecode import LLM, BucketConfig, EngineConfig, LoRARequest, Request, SamplingParams
from graphdecode.distributed import Leader
from graphdecode.engine.capacity import paired_adapter_bytes_of
from graphdecode.engine.loading import load_engine, start_ranks_of
from graphdecode.engine.request import RequestError
from graphdecode.errors import ArgumentError
from graphdecode.models import adapter_bytes, load_model
from graphdecode.models.adapters import AdapterError
from graphdecode.models.family import known_families

# split and fused names, norms of heads, windows, scaled residuals, a shared expert that every token takes; experts one
# by one, and in stacks whose gates alternate with their inputs
MODELS = ("llama-biases", "qwen3", "gemma3", "phi3", "granite", "qwen3.5", "qwen2-moe", "mixtral", "gpt-oss")
# run by transformers: fused queries, keys and values with biases, norms of heads, transposed weights
MODULES = ("gpt-neox", "stablelm", "gpt2")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
NUM_ADAPTERS = 4
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")  # names of stacks


def linear_modules(model: Any) -> dict[str, Tensor]:
    """Return the weights of the layers' products by module, [out_features, in_features]."""
    return {
        name: module.weight.data.T if isinstance(module, Conv1D) else module.weight.data
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D))
        and re.search(r"\.(layers|h)\.", f".{name}")
        and not re.search(r"gate$|router", name)
    }


def routers(model: Any) -> dict[str, Tensor]:
    """Return the weights of the layers' routers by module, and those of the gates of shared experts."""
    names = {name.removesuffix(".weight"): weight for name, weight in model.named_parameters()}
    return {name: weight for name, weight in names.items() if re.search(r"mlp\.(gate|shared_expert_gate)$", name)}


def stacks(model: Any) -> dict[str, Tensor]:
    """Return views of the experts' weights by name, [experts, out_features, in_features]."""
    names = {name: weight.data for name, weight in model.named_parameters()}
    found = {name: weight for name, weight in names.items() if re.search(r"\.experts\.(gate_up|down)_proj$", name)}
    return {n: w.transpose(1, 2) if "GptOss" in type(model).__name__ else w for n, w in found.items()}


def single_experts(model: Any) -> dict[str, Tensor]:
    """Return views of every other expert's weights by module, as models had them that have no stacks of their own."""
    gate, up, down, mlp = "gate_proj", "up_proj", "down_proj", "mlp"
    if "Mixtral" in type(model).__name__:
        gate, up, down, mlp = "w1", "w3", "w2", "block_sparse_moe"
    found: dict[str, Tensor] = {}
    for name, weight in {} if "GptOss" in type(model).__name__ else stacks(model).items():
        module = name.rpartition(".")[0].replace("mlp", mlp)
        for expert in range(0, len(weight), 2):
            halves = {gate: weight[expert].chunk(2)[0], up: weight[expert].chunk(2)[1]}
            of_module = halves if name.endswith("gate_up_proj") else {down: weight[expert]}
            found |= {f"{module}.{expert}.{each}": values for each, values in of_module.items()}
    return found


def edges(model: Any) -> dict[str, Tensor]:
    """Return the embedding and the output layer; nothing of a model that transformers runs."""
    if model.config.architectures and model.config.architectures[0] not in known_families():
        return {}
    return {name: model.get_submodule(name).weight for name in ("model.embed_tokens", "lm_head")}


def merged_with(model: Any, added: dict[str, Tensor]) -> Any:
    """Return a copy of a model with other weights; as with PEFT, a tied output layer is adapted by itself."""
    merged = copy.deepcopy(model)
    if "lm_head" in added or "model.embed_tokens" in added:
        merged.lm_head.weight = torch.nn.Parameter(merged.lm_head.weight.detach().clone())
    of_experts = stacks(merged) | single_experts(merged)
    for module, values in added.items():
        if module in of_experts:
            of_experts[module] += values
            continue
        part = merged.get_submodule(module)
        part.weight.data += values.T if isinstance(part, Conv1D) else values
    return merged


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def write_adapter(folder: Path, shapes: dict[str, Tensor], seed: int, rank: int, **settings: Any) -> dict[str, Tensor]:
    """Save an adapter as PEFT does; return what it adds to the weights."""
    drawn, tensors, added = torch.Generator().manual_seed(seed), {}, {}
    alpha, patterns = settings.get("lora_alpha", 2 * rank), settings.get("rank_pattern", {})
    for module, weight in shapes.items():
        of_names = settings.get("alpha_pattern", {}).items()
        of_module = next((v for n, v in of_names if re.match(rf"(.*\.)?({n})$", module)), alpha)
        own = next((patterns[name] for name in patterns if re.match(rf"(.*\.)?({name})$", module)), rank)
        scale = of_module / (math.sqrt(own) if settings.get("use_rslora") else own)
        if weight.dim() == 3:
            found, added[module] = stacked_halves(weight, own, drawn, is_old=settings.get("peft_version") == "0.18.1")
            inner = ".base_layer" if module.endswith("gate_up_proj") else ""
            name = f"base_model.model.{module.rpartition('.')[0]}{inner}.lora_{{}}.weight"
            tensors |= {name.format(half): matrix for half, matrix in found.items()}
            added[module] *= scale
            continue
        is_table = module.endswith("embed_tokens")
        out_features, in_features = weight.shape[::-1] if is_table else weight.shape
        a = torch.randn(own, in_features, generator=drawn) * 0.2
        b = torch.randn(out_features, own, generator=drawn) * 0.2
        name = "base_model.model." + module + (".lora_embedding_{}" if is_table else ".lora_{}.weight")
        tensors |= {name.format("A"): a, name.format("B"): b}
        if module in ("model.embed_tokens", "lm_head"):  # PEFT saves them beside their adapters
            kept = weight.detach().to(torch.bfloat16 if seed % 2 else weight.dtype, copy=True)
            tensors[f"base_model.model.{module}.base_layer.weight"] = kept
        values = scale * b @ a
        added[module] = values.T if is_table else values
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return added


def stacked_halves(
    weight: Tensor, rank: int, drawn: torch.Generator, *, is_old: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """Return A and B of a stack of experts, and their products; old ones are of the transposed weights."""
    experts, outputs, inputs = weight.mT.shape if is_old else weight.shape
    a = torch.randn(rank * experts, inputs, generator=drawn) * 0.2
    b = torch.randn(outputs, rank * experts, generator=drawn) * 0.2
    products = torch.einsum("ore,eri->eoi", b.view(outputs, rank, experts), a.view(experts, rank, inputs))
    return {"A": a, "B": b}, products.mT if is_old else products


class Adapted:
    """A checkpoint, adapters of it, and transformers' models with each one's weights merged."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.base = base
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        every, outer = linear_modules(model), edges(model)
        experts, self.has_experts = stacks(model), bool(stacks(model))
        of_experts = {"target_parameters": [*EXPERTS, "gate.weight"]}
        of_attention = {name: weight for name, weight in every.items() if re.search(r"q_proj|v_proj|qkv", name)}
        kinds: list[tuple[dict[str, Tensor], int, dict[str, Any]]] = [
            (
                every | routers(model) | outer | experts,
                4,
                of_experts
                | {
                    "rank_pattern": {r"layers\.\d+\.mlp\.down_proj": 2, "down_proj": 3},
                    "alpha_pattern": {"[a-o]_proj": 1},
                },
            ),
            ((of_attention or every) | experts, 8, of_experts | {"use_rslora": True, "peft_version": "0.18.1"}),
            ({n: w for n, w in (every | outer).items() if ".1." in n or n == "lm_head"}, 1, {"lora_alpha": 3}),
            (
                every | {n: w for n, w in outer.items() if n != "lm_head"} | single_experts(model),
                3,
                {"fan_in_fan_out": True},
            ),  # of GPT-2's layers, and nothing to A and B
        ]
        self.models, self.requests = {None: model}, [None]
        for number, (shapes, rank, settings) in enumerate(kinds[:NUM_ADAPTERS], 1):
            name = f"adapter-{number}"
            self.models[name] = merged_with(model, write_adapter(folder / name, shapes, number, rank, **settings))
            self.requests.append(LoRARequest(name, number, folder / name))

    def wanted(self, request: LoRARequest | None, prompt: list[int], count: int) -> list[int]:
        return greedy(self.models[request and request.lora_name], prompt, count)


@pytest.fixture(scope="module")
def adapted(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapted]:
    made: dict[str, Adapted] = {}

    def of(name: str) -> Adapted:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            base = save_random(ADOPTED[name](TINY), folder / "base") if name in ADOPTED else checkpoint(name)
            made[name] = Adapted(base, folder)
        return made[name]

    return of


def make(adapted: Adapted, **options: Any) -> LLM:
    buckets = {"max_batch_size": 4, "max_sequence_length": 96, "page_size": 8}
    config = BucketConfig(**buckets | {name: options.pop(name) for name in list(options) if name == "batch_sizes"})
    options = {"dtype": "float32", "max_adapters": 2, "max_adapter_rank": 8, **options}
    options = {"adapt_experts": adapted.has_experts, **options}
    return LLM(adapted.base, config=config, skip_tokenizer_init=True, **options)


def drawn_requests(adapted: Adapted, count: int, seed: int = 0) -> list[tuple[LoRARequest | None, list[int]]]:
    rng = random.Random(seed)
    common = [rng.randrange(3, 250) for _ in range(17)]
    lengths = [1, 2, 7, 9, 20, 31]
    return [
        (
            adapted.requests[index % len(adapted.requests)],
            common + [rng.randrange(3, 250) for _ in range(lengths[index % len(lengths)])],
        )
        for index in range(count)
    ]


def gguf_adapter(
    path: Path, folder: Path, name: str, edit: Callable[[dict[str, Any]], object] = lambda _: None
) -> Path:
    """Write an adapter as llama.cpp converts it from PEFT's folder.

    Args:
        path: of the file.
        folder: of the adapter.
        name: of the base in `gguf_checkpoints`.
        edit: changes metadata and tensors.
    """
    architecture, kind, _ = (gguf_checkpoints.ARCHITECTURES | gguf_checkpoints.RECURRENT)[name]
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names, written = gguf.get_tensor_name_map(number, 9), {}
    written |= {"general.type": "adapter", "adapter.type": "lora", "general.architecture": architecture}
    written["adapter.lora.alpha"] = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"] * 1.0
    for tensor_name, tensor in load_file(folder / "adapter_model.safetensors").items():
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?", tensor_name)
        if found is not None:
            module, half = found.groups()
            if kind in ("Llama", "Mixtral") and half == "B" and module.endswith(("q_proj", "k_proj")):
                tensor = tensor.view(-1, 2, 8, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)  # heads of 16
            if kind == "Qwen3_5" and (half == "A") == module.endswith("out_proj"):
                tensor = gguf_checkpoints.tiled(gguf_checkpoints.random_model(name).config, module, tensor)
            if module.endswith("embed_tokens") and half == "A":
                tensor = tensor.T
            written[f"{names.get_name(module)}.weight.lora_{half.lower()}"] = tensor.contiguous()
    edit(written)
    writer = gguf.GGUFWriter(path, written.pop("general.architecture"))
    for key, value in written.items():
        if isinstance(value, Tensor):
            writer.add_tensor(key, value.numpy())
        else:
            getattr(writer, "add_string" if isinstance(value, str) else "add_float32")(key, value)
    gguf_checkpoints.finish(writer)
    return path


def generated(llm: LLM, requests: list[tuple[LoRARequest | None, list[int]]]) -> list[list[int]]:
    adapters, prompts = [each for each, _ in requests], [prompt for _, prompt in requests]
    return [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapters)]


@pytest.mark.parametrize("name", MODELS + MODULES)
def test_any_mixture_has_the_tokens_of_merged_weights(adapted, name):
    of_model = adapted(name)
    with make(of_model, max_prefill_tokens=9) as llm:
        captured = dict(llm.graphs.graphs)
        requests = drawn_requests(of_model, 10)
        for (request, prompt), tokens in zip(requests, generated(llm, requests), strict=True):
            assert tokens == of_model.wanted(request, prompt, 8), request
        assert llm.graphs.graphs == captured
        stats = llm.engine.adapters.stats
        assert (stats.slots, stats.requests.total()) == (2, 8)
        assert stats.evictions > 0  # four adapters shared two slots
        held = [*llm.model.adapters.products.values()]
        counted = adapter_bytes(llm.model.config, 2, 8, llm.model.dtype, adapt_experts=of_model.has_experts)
        assert counted == sum(product.down.nbytes + product.up.nbytes for product in held)


@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "gemma3", "phi3", "granite"])
def test_five_adapters_of_ranks_1_to_64_and_none_share_a_batch(checkpoint, tmp_path, name):
    base, prompt = checkpoint(name), [5, 9, 70, 33, 120]
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    models, requests = [model], [None]
    for number, rank in enumerate((1, 4, 16, 33, 64), 1):
        added = write_adapter(tmp_path / str(rank), linear_modules(model), number, rank, lora_alpha=1)
        models.append(merged_with(model, added))
        requests.append(LoRARequest(f"rank-{rank}", number, tmp_path / str(rank)))
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, ignore_eos=True)
    config = BucketConfig(max_batch_size=6, max_sequence_length=32, page_size=8)
    options = {"config": config, "dtype": "float32", "max_adapters": 5, "max_adapter_rank": 64}
    with LLM(base, skip_tokenizer_init=True, **options) as llm:
        outputs = llm.generate([prompt] * 6, params, use_tqdm=False, lora_request=requests)
    for merged, output in zip(models, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert tokens == greedy(merged, prompt, 6)
        with torch.no_grad():
            wanted = merged(torch.tensor([prompt + tokens])).logits[0, 4:-1].log_softmax(-1)[range(6), tokens]
        found = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
        torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options", [{"speculation": "ngram"}, {"speculation": "model"}, {"backend": "eager"}, {"batch_invariant": True}]
)
@compiled_or_gpu
def test_every_kind_of_step_takes_adapters(adapted, options):
    of_model = adapted("qwen3")
    options |= {"draft_model": str(of_model.base)} if options.get("speculation") == "model" else {}
    requests = drawn_requests(of_model, 6, seed=3)
    with make(of_model, **options) as llm:
        for (request, prompt), tokens in zip(requests, generated(llm, requests), strict=True):
            assert tokens == of_model.wanted(request, prompt, 8), request


@pytest.mark.parametrize("name", ["qwen3-tied", "gemma3", "mixtral", "gpt-oss", "stablelm", "cohere", "exaone4"])
def test_prompt_log_probabilities_are_those_of_merged_weights(adapted, name):
    of_model = adapted(name)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    requests = drawn_requests(of_model, 5)
    with make(of_model) as llm:
        prompts, adapters = [prompt for _, prompt in requests], [request for request, _ in requests]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
        for (request, prompt), output in zip(requests, outputs, strict=True):
            found = [next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]]
            with torch.no_grad():
                logits = of_model.models[request and request.lora_name](torch.tensor([prompt])).logits[0, :-1]
            wanted = logits.log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
            torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "qwen35"])
def test_gguf_adapters_are_those_of_peft_on_either_base(name, tmp_path):
    model = gguf_checkpoints.random_model(name)
    model.save_pretrained(tmp_path / "base")
    write = gguf_checkpoints.write_recurrent if name in gguf_checkpoints.RECURRENT else gguf_checkpoints.write
    base = write(model, name, tmp_path / "base.gguf")
    added = write_adapter(tmp_path / "peft", linear_modules(model) | edges(model), 1, 3)
    file = gguf_adapter(tmp_path / "adapter.gguf", tmp_path / "peft", name)
    of_model, requests = Adapted(tmp_path / "base", tmp_path), [LoRARequest("one", 1, tmp_path / "peft")]
    requests.append(LoRARequest("two", 2, file))
    wanted = greedy(merged_with(model, added), [3, 4, 5, 6, 7], 8)
    for of_model.base in (tmp_path / "base", base):
        with make(of_model) as llm:
            assert generated(llm, [(request, [3, 4, 5, 6, 7]) for request in requests]) == [wanted] * 2


GGUF_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a model": (lambda w: w.update({"general.type": "model"}), "general.type is 'model', and should be 'adapter'"),
    "a vector": (lambda w: w.update({"adapter.type": "control_vector"}), "adapter.type is 'control_vector', and"),
    "another base": (lambda w: w.update({"general.architecture": "qwen3"}), "is 'qwen3', and should be 'llama'"),
    "no alpha": (lambda w: w.pop("adapter.lora.alpha"), "the field adapter.lora.alpha is missing"),
    "NaN as alpha": (lambda w: w.update({"adapter.lora.alpha": math.nan}), "must be a number other than 0, got nan"),
    "half of it": (lambda w: w.pop("blk.0.attn_q.weight.lora_b"), "blk.0.attn_q.weight has only one of A and B"),
    "a norm": (
        lambda w: w.update({"blk.0.attn_norm.weight": torch.ones(64)}),
        "blk.0.attn_norm.weight is not the A or",
    ),
    "a tensor of another model": (
        lambda w: w.update({f"blk.7.attn_q.weight.lora_{each}": torch.ones(64, 1) for each in "ab"}),
        r"layers.7.self_attn.q_proj is no product that adapters can change",
    ),
    "experts": (
        lambda w: w.update({"blk.0.ffn_up_exps.weight.lora_a": torch.ones(2, 3, 4)}),
        "adapters of experts are",
    ),
    "another size": (
        lambda w: w.update({"blk.0.attn_q.weight.lora_b": torch.ones(32, 3)}),
        r"q_proj has A \[3, 64\] and B \[32, 3\]",
    ),
    "no heads": (lambda w: w.update({"blk.0.attn_q.weight.lora_b": torch.ones(17, 3)}), "has a B of 17 rows for heads"),
    "NaN": (
        lambda w: w.update({"blk.0.attn_q.weight.lora_b": torch.full((64, 3), math.nan)}),
        "numbers that are not finite",
    ),
}


@pytest.mark.parametrize(("edit", "message"), GGUF_FAULTS.values(), ids=GGUF_FAULTS)
def test_a_gguf_adapter_that_cannot_be_used_is_refused(small, tmp_path, edit, message):
    write_adapter(tmp_path, {"model.layers.0.self_attn.q_proj": torch.empty(64, 64)}, 1, 3)
    file = gguf_adapter(tmp_path / "broken.gguf", tmp_path, "llama", edit)
    with pytest.raises(AdapterError, match=message) as refused:
        small.load_lora_adapter("broken", file)
    assert str(refused.value).count(str(file)) == 1
    assert small.engine.adapters.names == []
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(AdapterError, match=r"is truncated|broken\.gguf"):
        small.load_lora_adapter("broken", file)


def test_a_stack_of_square_weights_is_read_as_its_version_of_peft_wrote_it(tmp_path):
    sizes = SMALL | {"intermediate_size": 32, "num_local_experts": 5}
    base = save_random(transformers.MixtralConfig(**sizes), tmp_path / "base")
    weights = stacks(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    slots = load_model(base, device="cpu", dtype="float32", max_adapters=1, adapt_experts=True).adapters
    square = {"model.layers.0.mlp.experts.gate_up_proj": weights["model.layers.0.mlp.experts.gate_up_proj"]}
    for version in ("0.18.1", "0.21.2"):
        added = write_adapter(tmp_path / version, square, 1, 2, target_parameters=EXPERTS, peft_version=version)
        ((down, up),) = slots.read(tmp_path / version).matrices.values()
        found = torch.cat([half.mT @ down[:, at] for at, half in enumerate(up.chunk(2, dim=2))], dim=1)
        torch.testing.assert_close(found, *added.values())
    write_adapter(tmp_path / "other", square, 1, 2, target_parameters=EXPERTS, peft_version="0.19.0")
    with pytest.raises(AdapterError, match="is of square weights, and PEFT '0.19.0' may transpose them"):
        slots.read(tmp_path / "other")
    write_adapter(tmp_path / "parts", {"model.layers.0.mlp.experts.down_proj": torch.empty(5, 64, 32)}, 1, 2)
    with pytest.raises(AdapterError, match=r"mlp\.experts is no product that adapters can change"):
        slots.read(tmp_path / "parts")  # without the names of parameters


def test_a_gguf_adapter_of_tensors_that_are_joined_is_refused(tmp_path):
    """GGUF stores `kv_b_proj` as two tensors; an adapter of one of them would be dropped."""
    gguf_checkpoints.random_model("deepseek2").save_pretrained(tmp_path / "base")
    write_adapter(tmp_path, {"model.layers.0.self_attn.o_proj": torch.empty(64, 48)}, 1, 3)
    halves = {f"blk.0.attn_k_b.weight.lora_{half}": torch.ones(3, 3) for half in "ab"}
    file = gguf_adapter(tmp_path / "adapter.gguf", tmp_path, "deepseek2", lambda written: written.update(halves))
    slots = load_model(tmp_path / "base", device="cpu", dtype="float32", max_adapters=1).adapters
    with pytest.raises(AdapterError, match=r"blk\.0\.attn_k_b\.weight is one of several tensors of a product"):
        slots.read(file)


def test_what_adapters_of_heads_add_in_a_pass_is_part_of_the_plan(checkpoint):
    model = load_model(checkpoint("deepseek-v3"), device="cpu", dtype="float32").config
    sizes = {"max_batch_size": 4, "max_prefill_tokens": 60, "max_adapter_rank": 8}
    taken = [
        paired_adapter_bytes_of(
            EngineConfig.of(None, max_adapters=slots, **sizes), model, torch.float32, torch.device("cpu")
        )
        for slots in (0, 1)
    ]
    rotated, latent = 32, 32
    assert taken == [0, 64 * 4 * 4 * (rotated + latent + 8)]  # of each token and head: its queries, and the inner sums


@pytest.fixture(scope="module")
def ranks() -> Iterator[Leader]:
    """Processes that load one model after the other."""
    leader = start_ranks_of(EngineConfig.of(None, tensor_parallel_size=2))
    yield leader
    leader.close()


# runs of fused products, biases that one rank adds, a shared expert whose sum is that of all experts, stacks, heads of
# an absorbed weight, keys that are values, scaled products
SPLIT = ("phi3", "granite", "qwen2-moe", "gpt-oss", "deepseek-v3", "gemma4-experts", "falcon-h1-multipliers")


@pytest.mark.parametrize("name", SPLIT)
def test_ranks_have_the_tokens_of_merged_weights(adapted, ranks, name):
    of_model, requests = adapted(name), drawn_requests(adapted(name), 6)
    sizes = {"max_batch_size": 4, "max_sequence_length": 96, "page_size": 8, "max_prefill_tokens": 9}
    options = {"dtype": "float32", "max_adapters": 2, "max_adapter_rank": 8, "tensor_parallel_size": 2, **sizes}
    options["adapt_experts"] = of_model.has_experts
    engine = load_engine(of_model.base, EngineConfig.of(None, **options), ranks=ranks)
    for request in of_model.requests[1:]:
        engine.adapters.load(request.lora_name, request.lora_path)
    captured = dict(engine.graphs.graphs)
    given = {engine.add(Request(ids, GREEDY, adapter=each and each.lora_name)): (each, ids) for each, ids in requests}
    tokens: dict[int, list[int]] = {number: [] for number in given}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    for number, (request, prompt) in given.items():
        assert tokens[number] == of_model.wanted(request, prompt, 8), request
    assert engine.graphs.graphs == captured
    assert engine.adapters.stats.evictions > 0
    held = engine.model.adapters.products.values()
    experts = {"adapt_experts": of_model.has_experts}
    counted = adapter_bytes(engine.model.config, 2, 8, engine.model.dtype, **experts)
    assert counted >= sum(product.down.nbytes + product.up.nbytes for product in held)
    engine.close()


def test_prefixes_are_shared_by_requests_of_one_adapter_alone(adapted):
    of_model = adapted("qwen3")
    prompt = list(range(5, 45))
    with make(of_model) as llm:

        def cached(request: LoRARequest | None) -> int:
            output = llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=request)[0]
            assert output.outputs[0].token_ids == of_model.wanted(request, prompt, 8)
            return output.metrics.num_cached_tokens

        first, second = of_model.requests[1:3]
        assert [cached(each) for each in (None, first, second, first, None)] == [0, 0, 0, 32, 32]
        llm.unload_lora_adapter(first.lora_name)  # the next one of this name may be another
        assert cached(first) == 0


def test_an_adapter_can_go_while_requests_have_it(adapted):
    of_model = adapted("qwen3")
    with make(of_model) as llm:
        request = of_model.requests[1]
        stream = llm.stream([7, 8, 9], GREEDY, lora_request=request)
        for _ in range(3):
            llm.step()
        assert 0 < len(stream.request.outputs[0].token_ids) < 8
        llm.unload_lora_adapter(request.lora_name)
        list(stream)
        assert stream.request.outputs[0].token_ids == of_model.wanted(request, [7, 8, 9], 8)
        with pytest.raises(RequestError, match=r"there is no adapter 'adapter-1'"):
            llm.engine.adapters.named(request.lora_name)


class Lives:
    """Forty adapters and four slots: requests join, leave early, and each has the bits of its run alone."""

    def __init__(self, adapted: Adapted, folder: Path) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(adapted.base, dtype=torch.float32)
        self.requests: list[LoRARequest] = []
        for number in range(1, 41):
            outer, experts = (given if number % 3 == 0 else {} for given in (edges(model), stacks(model)))
            shapes, settings = linear_modules(model) | outer | experts, {"target_parameters": EXPERTS}
            write_adapter(folder / str(number), shapes, number, 1 + number % 8, **settings)
            self.requests.append(LoRARequest(f"life-{number}", number, folder / str(number)))
        self.llm = make(adapted, max_adapters=4, batch_invariant=True, batch_sizes=[1, 3])
        self.alone = [self.tokens_of(None), *map(self.tokens_of, self.requests)]

    def tokens_of(self, request: LoRARequest | None) -> list[int]:
        return self.llm.generate([[3, 4, 5, 6]], GREEDY, use_tqdm=False, lora_request=request)[0].outputs[0].token_ids

    def live(self, seed: int) -> None:
        rng, streams = random.Random(seed), []
        for _ in range(8):
            number = rng.randrange(41)
            request = None if number == 0 else self.requests[number - 1]
            streams.append((number, self.llm.stream([3, 4, 5, 6], GREEDY, lora_request=request)))
            for _ in range(rng.randrange(4)):
                self.llm.step()
            if rng.random() < 0.2:
                rng.choice(streams)[1].close()
        for number, stream in streams:
            list(stream)
            tokens = stream.request.outputs[0].token_ids
            assert tokens == self.alone[number][: len(tokens)], f"life {seed}, adapter {number}"


@pytest.fixture(scope="module")
def lives(
    request: pytest.FixtureRequest, adapted: Callable[[str], Adapted], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lives]:
    made = Lives(adapted(request.param), tmp_path_factory.mktemp("lives"))
    yield made
    made.llm.close()


@pytest.mark.parametrize("lives", ["qwen3"], indirect=True)
@compiled_or_gpu
def test_a_request_has_its_bits_whichever_adapters_come_and_go(lives):
    assert len(set(map(tuple, lives.alone))) > 30
    for seed in range(20):
        lives.live(seed)
    assert lives.llm.engine.adapters.stats.evictions > 40


@pytest.mark.parametrize("lives", ["qwen3", "mixtral"], indirect=True)
@compiled_or_gpu
@pytest.mark.slow
def test_a_request_has_its_bits_in_five_hundred_lives(lives):
    for seed in range(500):
        lives.live(1000 + seed)


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def _tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        save_file(change(load_file(file)), file)

    return changed


def _all(value: Callable[[Tensor], Tensor], which: str = "lora_") -> Callable[[Path], None]:
    return _tensors(lambda found: {n: value(t).contiguous() if which in n else t for n, t in found.items()})


def _cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no configuration": (lambda folder: (folder / "adapter_config.json").unlink(), "holds no adapter_config.json"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json"),
    "a pickle": (_pickled, "holds no adapter_model.safetensors; pickles are not read"),
    "cut": (_cut, "adapter_model.safetensors"),
    "empty": (_tensors(lambda _: {}), "it is empty"),
    "another kind": (_config(peft_type="IA3"), "peft_type is 'IA3'; adapters are LORA"),
    "DoRA": (_config(use_dora=True), "use_dora is True, and adapters change products alone"),
    "other modules": (_config(modules_to_save=["lm_head"]), r"modules_to_save is \['lm_head'\]"),
    "biases": (_config(bias="all"), "bias is 'all'"),
    "another alpha": (_config(lora_alpha="x"), "lora_alpha of .* is 'x', and not a number"),
    "a vast alpha": (_config(lora_alpha=10**400), "lora_alpha of .* is 1000.*, and not a number"),
    "no targets": (_config(target_parameters=5), "target_parameters is 5, and no list of names"),
    "another rank": (_config(r=5), "has rank 4, and adapter_config.json says 5"),
    "an endless expression": (_config(alpha_pattern={r"((a|\w|\.|[a-z])+)+\d": 2}), "alpha_pattern takes longer than"),
    "a broken expression": (_config(rank_pattern={"(": 2}), r"rank_pattern has '\(': missing \)"),
    "no expressions": (_config(rank_pattern=[4]), r"rank_pattern is \[4\], and no object"),
    "NaN": (_all(lambda tensor: tensor * torch.nan), "numbers that are not finite"),
    "too large a rank": (_config(r=9), "has rank 4"),
    "integers": (_all(lambda tensor: tensor.int()), "not of floats"),
    "another size": (_all(lambda tensor: tensor[:, :-1], "lora_A"), r"has A \[4, 63\] and B"),
    "half of it": (_tensors(lambda found: dict(list(found.items())[1:])), "has only one of A and B"),
    "half of an embedding": (
        _tensors(lambda found: found | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(1)}),
        "embed_tokens has only one of A and B",
    ),
    "an embedding's half and a product's": (
        _tensors(
            lambda found: found | {"base_model.model.model.layers.0.self_attn.q_proj.lora_embedding_A": torch.ones(1)}
        ),
        "q_proj has matrices of an embedding, and of another product",
    ),
    "another base": (
        _tensors(lambda found: found | {"base_model.model.model.embed_tokens.base_layer.weight": torch.ones(259, 64)}),
        "embed_tokens.base_layer.weight is not the base model's",
    ),
    "a product as an embedding": (
        _tensors(
            lambda found: {n.replace("lora_", "lora_embedding_").removesuffix(".weight"): t for n, t in found.items()}
        ),
        "q_proj has matrices of an embedding, and is none",
    ),
    "an expert": (
        _tensors(lambda found: {n.replace("self_attn.q_proj", "mlp.experts"): t for n, t in found.items()}),
        "mlp.experts is of experts, which have room for adapters with adapt_experts=True",
    ),
    "other tokens": (
        _tensors(lambda found: found | {"base_model.model.model.embed_tokens.weight": torch.ones(1)}),
        "embed_tokens.weight is not the A or B of a product",
    ),
    "another model's module": (
        _tensors(lambda found: {name.replace("layers.0", "layers.7"): tensor for name, tensor in found.items()}),
        r"layers.7.self_attn.q_proj is no product that adapters can change",
    ),
}


@pytest.fixture(scope="module")
def small(adapted: Callable[[str], Adapted]) -> Iterator[LLM]:
    with make(adapted("llama-2")) as llm:
        yield llm


@pytest.mark.parametrize(("damage", "message"), FAULTS.values(), ids=FAULTS)
def test_what_cannot_be_used_is_refused_and_nothing_changes(small, tmp_path, damage, message):
    shape = small.model.layers[0].mixer.qkv.shape
    weight = torch.empty(64, shape[1])
    write_adapter(tmp_path, {"model.layers.0.self_attn.q_proj": weight}, 1, 4)
    damage(tmp_path)
    with pytest.raises(AdapterError, match=message):
        small.load_lora_adapter("broken", tmp_path)
    assert small.engine.adapters.names == []


def test_names_ranks_and_engines_without_room_are_refused(small, adapted, tmp_path):
    weight = torch.empty(64, 64)
    write_adapter(tmp_path, {"model.layers.0.self_attn.q_proj": weight}, 1, 9)
    with pytest.raises(AdapterError, match="has rank 9, and max_adapter_rank is 8"):
        small.load_lora_adapter("large", tmp_path)
    for nowhere, message in ((tmp_path / "nowhere", "there is no such"), ("a" * 5000, "no path"), ("\0", "no such")):
        with pytest.raises(AdapterError, match=message):
            small.load_lora_adapter("nowhere", nowhere)
    write_adapter(tmp_path, {"model.layers.0.self_attn.q_proj": weight}, 1, 8)
    small.load_lora_adapter("one", tmp_path)
    with pytest.raises(ArgumentError, match="there is an adapter 'one' already"):
        small.load_lora_adapter("one", tmp_path)
    small.unload_lora_adapter("one")
    with pytest.raises(ArgumentError, match="there is no adapter 'one'; there are none"):
        small.unload_lora_adapter("one")
    with make(adapted("llama-2"), max_adapters=0) as llm:
        with pytest.raises(ArgumentError, match="there is no room for adapters"):
            llm.load_lora_adapter("one", tmp_path)
        assert not any("adapters" in str(shape) for shape in llm.graphs.ladder.shapes)
    with pytest.raises(ArgumentError, match="2 prompts and 1 lora_request"):
        small.generate([[1], [2]], lora_request=[None])
    with pytest.raises(ArgumentError, match="lora_request must be a LoRARequest"):
        small.generate([[1], [2]], lora_request="one")
