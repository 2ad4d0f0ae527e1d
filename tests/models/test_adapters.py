"""Adapters in slots: transformers' tokens with merged weights, in any mixture; what cannot be used is refused."""

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import gguf_checkpoints
import pytest
import torch
import transformers
from compiled_kernels import compiled_or_gpu
from family_checkpoints import SMALL
from greedy_tokens import assert_prompt_logprobs, greedy_tokens, reference_tokens
from peft_folders import TABLES, linear_weights, save_peft, single_experts, with_added
from safetensors.torch import load_file, save_file
from torch import Tensor

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


class Adapted:
    """A checkpoint, transformers' model of it, and adapters with what each adds to the weights."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.base = base
        self.model = model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        linear, names = linear_weights(model), [name for name, _ in model.named_parameters()]
        routers = [name for name in names if re.search(r"mlp\.(gate|shared_expert_gate)\.weight$", name)]
        stacks = [name for name in names if re.search(r"\.experts\.(gate_up|down)_proj$", name)]
        is_of_a_family = not model.config.architectures or model.config.architectures[0] in known_families()
        self.tables = [f"{module}.weight" for module in TABLES] if is_of_a_family else []
        self.linear, self.stacks, self.has_experts = linear, stacks, bool(stacks)
        of_attention = [name for name in linear if re.search(r"q_proj|v_proj|qkv", name)]
        patterns = {
            "rank_pattern": {r"layers\.\d+\.mlp\.down_proj": 2, "down_proj": 3},
            "alpha_pattern": {"[a-o]_proj": 1},
        }
        old = {"use_rslora": True, "peft_version": "0.18.1"}
        second = [name for name in linear + self.tables if ".1." in name or name == "lm_head.weight"]
        kinds: list[tuple[list[str], int, dict[str, Any]]] = [
            (linear + routers + self.tables + stacks, 4, {"lora_alpha": 8} | patterns),
            ((of_attention or linear) + stacks, 8, {"lora_alpha": 16} | old),
            (second, 1, {"lora_alpha": 3}),
            # fan_in_fan_out: of GPT-2's layers, and nothing to A and B
            (linear + self.tables[:1] + single_experts(model), 3, {"lora_alpha": 6, "fan_in_fan_out": True}),
        ]
        self.added: dict[str | None, dict[str, Tensor]] = {None: {}}
        self.requests: list[LoRARequest | None] = [None]
        for number, (chosen, rank, settings) in enumerate(kinds, 1):
            name = f"adapter-{number}"
            self.added[name] = save_peft(folder / name, model, chosen, rank=rank, seed=number, **settings)
            self.requests.append(LoRARequest(name, number, folder / name))

    def merged(self, request: LoRARequest | None) -> AbstractContextManager[torch.nn.Module]:
        """Return a context in which the model has what an adapter adds."""
        return with_added(self.model, self.added[request and request.lora_name])

    def wanted(self, request: LoRARequest | None, prompt: list[int], count: int) -> list[int]:
        with self.merged(request) as model:
            return reference_tokens(model, prompt, count)

    def make(self, **options: Any) -> LLM:
        return make(self.base, **{"adapt_experts": self.has_experts, **options})


@pytest.fixture(scope="module")
def adapted(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapted]:
    @cache
    def of(name: str) -> Adapted:
        folder = tmp_path_factory.mktemp(name)
        base = save_random(ADOPTED[name](TINY), folder / "base") if name in ADOPTED else checkpoint(name)
        return Adapted(base, folder)

    return of


def make(base: Path, **options: Any) -> LLM:
    sizes = {"max_batch_size": 4, "max_sequence_length": 96, "page_size": 8, "max_adapters": 2, "max_adapter_rank": 8}
    return LLM(base, skip_tokenizer_init=True, **{"dtype": "float32", **sizes, **options})


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


def gguf_adapter(path: Path, folder: Path, name: str, changes: dict[str, Any] | None = None) -> Path:
    """Write an adapter as llama.cpp converts it from PEFT's folder.

    Args:
        path: of the file.
        folder: of the adapter.
        name: of the base in `gguf_checkpoints`.
        changes: of metadata and tensors; None: without one.
    """
    architecture, kind, _ = (gguf_checkpoints.ARCHITECTURES | gguf_checkpoints.RECURRENT)[name]
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names, written = gguf.get_tensor_name_map(number, 9), {}
    written |= {"general.type": "adapter", "adapter.type": "lora", "general.architecture": architecture}
    written["adapter.lora.alpha"] = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"] * 1.0
    for tensor_name, tensor in load_file(folder / "adapter_model.safetensors").items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?", tensor_name)
        if match is not None:
            module, half = match.groups()
            if kind in ("Llama", "Mixtral") and half == "B" and module.endswith(("q_proj", "k_proj")):
                tensor = tensor.view(-1, 2, 8, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)  # heads of 16
            if kind == "Qwen3_5" and (half == "A") == module.endswith("out_proj"):
                tensor = gguf_checkpoints.tiled(gguf_checkpoints.random_model(name).config, module, tensor)
            if module.endswith("embed_tokens") and half == "A":
                tensor = tensor.T
            written[f"{names.get_name(module)}.weight.lora_{half.lower()}"] = tensor.contiguous()
    written |= changes or {}
    writer = gguf.GGUFWriter(path, written.pop("general.architecture"))
    for key, value in ((key, value) for key, value in written.items() if value is not None):
        if isinstance(value, Tensor):
            writer.add_tensor(key, value.numpy())
        else:
            getattr(writer, "add_string" if isinstance(value, str) else "add_float32")(key, value)
    gguf_checkpoints.finish(writer)
    return path


def generated(llm: LLM, requests: list[tuple[LoRARequest | None, list[int]]]) -> list[list[int]]:
    return greedy_tokens(llm, [prompt for _, prompt in requests], 8, lora_request=[each for each, _ in requests])


@pytest.mark.parametrize("name", MODELS + MODULES)
def test_any_mixture_has_the_tokens_of_merged_weights(adapted, name):
    of_model = adapted(name)
    with of_model.make(max_prefill_tokens=9) as llm:
        captured = dict(llm.graphs.graphs)
        requests = drawn_requests(of_model, 10)
        for (request, prompt), tokens in zip(requests, generated(llm, requests), strict=True):
            assert tokens == of_model.wanted(request, prompt, 8), request
        assert llm.graphs.graphs == captured
        stats = llm.engine.adapters.stats
        assert (stats.slots, stats.requests.total()) == (2, 8)
        assert stats.evictions > 0  # four adapters shared two slots
        products = [*llm.model.adapters.products.values()]
        counted = adapter_bytes(llm.model.config, 2, 8, llm.model.dtype, adapt_experts=of_model.has_experts)
        assert counted == sum(product.down.nbytes + product.up.nbytes for product in products)


@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "gemma3", "phi3", "granite"])
def test_five_adapters_of_ranks_1_to_64_and_none_share_a_batch(checkpoint, tmp_path, name):
    base, prompt = checkpoint(name), [5, 9, 70, 33, 120]
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    added, requests = [{}], [None]
    for number, rank in enumerate((1, 4, 16, 33, 64), 1):
        added.append(
            save_peft(tmp_path / str(rank), model, linear_weights(model), rank=rank, seed=number, lora_alpha=1)
        )
        requests.append(LoRARequest(f"rank-{rank}", number, tmp_path / str(rank)))
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, ignore_eos=True)
    config = BucketConfig(max_batch_size=6, max_sequence_length=32, page_size=8)
    options = {"config": config, "dtype": "float32", "max_adapters": 5, "max_adapter_rank": 64}
    with LLM(base, skip_tokenizer_init=True, **options) as llm:
        outputs = llm.generate([prompt] * 6, params, use_tqdm=False, lora_request=requests)
    for values, output in zip(added, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        with with_added(model, values), torch.no_grad():
            assert tokens == reference_tokens(model, prompt, 6)
            expected = model(torch.tensor([prompt + tokens])).logits[0, 4:-1].log_softmax(-1)[range(6), tokens]
        actual = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
        torch.testing.assert_close(torch.tensor(actual), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options", [{"speculation": "ngram"}, {"speculation": "model"}, {"backend": "eager"}, {"batch_invariant": True}]
)
@compiled_or_gpu
def test_every_kind_of_step_takes_adapters(adapted, options):
    of_model = adapted("qwen3")
    options |= {"draft_model": str(of_model.base)} if options.get("speculation") == "model" else {}
    requests = drawn_requests(of_model, 6, seed=3)
    with of_model.make(**options) as llm:
        for (request, prompt), tokens in zip(requests, generated(llm, requests), strict=True):
            assert tokens == of_model.wanted(request, prompt, 8), request


@pytest.mark.parametrize("name", ["qwen3-tied", "gemma3", "mixtral", "gpt-oss", "stablelm", "cohere", "exaone4"])
def test_prompt_log_probabilities_are_those_of_merged_weights(adapted, name):
    of_model = adapted(name)
    with of_model.make() as llm:
        for request, prompt in drawn_requests(of_model, 5):
            with of_model.merged(request) as model:
                assert_prompt_logprobs(llm, model, prompt, lora_request=request)


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "qwen35"])
def test_gguf_adapters_are_those_of_peft_on_either_base(name, tmp_path):
    model = gguf_checkpoints.random_model(name)
    model.save_pretrained(tmp_path / "base")
    base = gguf_checkpoints.write(model, name, tmp_path / "base.gguf")
    names = [*linear_weights(model), *(f"{module}.weight" for module in TABLES)]
    added = save_peft(tmp_path / "peft", model, names, rank=3, lora_alpha=6)
    file = gguf_adapter(tmp_path / "adapter.gguf", tmp_path / "peft", name)
    requests = [LoRARequest("one", 1, tmp_path / "peft"), LoRARequest("two", 2, file)]
    with with_added(model, added):
        expected = reference_tokens(model, [3, 4, 5, 6, 7], 8)
    for folder in (tmp_path / "base", base):
        with make(folder) as llm:
            assert generated(llm, [(request, [3, 4, 5, 6, 7]) for request in requests]) == [expected] * 2


Q_PROJ = "model.layers.0.self_attn.q_proj"
GGUF_Q = "blk.0.attn_q.weight"  # the same weight
GGUF_FAULTS: dict[str, tuple[dict[str, Any], str]] = {  # fields and tensors; None: without it
    "a model": ({"general.type": "model"}, "general.type is 'model'.*'adapter'"),
    "a vector": ({"adapter.type": "control_vector"}, "adapter.type is 'control_vector'"),
    "another base": ({"general.architecture": "qwen3"}, "'qwen3'.*'llama'"),
    "no alpha": ({"adapter.lora.alpha": None}, "adapter.lora.alpha "),
    "NaN as alpha": ({"adapter.lora.alpha": math.nan}, "adapter.lora.alpha .*nan"),
    "half of it": ({f"{GGUF_Q}.lora_b": None}, f"{GGUF_Q} .*A and B"),
    "a norm": ({"blk.0.attn_norm.weight": torch.ones(64)}, "blk.0.attn_norm.weight "),
    "another model's": ({f"blk.7.attn_q.weight.lora_{each}": torch.ones(64, 1) for each in "ab"}, "layers.7.*q_proj "),
    "experts": ({"blk.0.ffn_up_exps.weight.lora_a": torch.ones(2, 3, 4)}, "adapters of experts"),
    "another size": ({f"{GGUF_Q}.lora_b": torch.ones(32, 3)}, r"q_proj .*\[3, 64\] .*\[32, 3\]"),
    "no heads": ({f"{GGUF_Q}.lora_b": torch.ones(17, 3)}, "B of 17 rows"),
    "NaN": ({f"{GGUF_Q}.lora_b": torch.full((64, 3), math.nan)}, "not finite"),
}


@pytest.mark.parametrize(("changes", "message"), GGUF_FAULTS.values(), ids=GGUF_FAULTS)
def test_a_gguf_adapter_that_cannot_be_used_is_refused(small, adapted, tmp_path, changes, message):
    save_peft(tmp_path, adapted("llama-2").model, [f"{Q_PROJ}.weight"], rank=3)
    file = gguf_adapter(tmp_path / "broken.gguf", tmp_path, "llama", changes)
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
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    slots = load_model(base, device="cpu", dtype="float32", max_adapters=1, adapt_experts=True).adapters
    square = ["model.layers.0.mlp.experts.gate_up_proj"]
    for version in ("0.18.1", "0.21.2"):
        added = save_peft(tmp_path / version, model, square, peft_version=version)
        ((down, up),) = slots.read(tmp_path / version).matrices.values()
        actual = torch.cat([half.mT @ down[:, at] for at, half in enumerate(up.chunk(2, dim=2))], dim=1)
        torch.testing.assert_close(actual, *added.values())
    save_peft(tmp_path / "other", model, square, peft_version="0.19.0")
    with pytest.raises(AdapterError, match="square weights, .*'0.19.0'"):
        slots.read(tmp_path / "other")
    save_peft(tmp_path / "parts", model, ["model.layers.0.mlp.experts.down_proj"], target_parameters=[])
    with pytest.raises(AdapterError, match=r"mlp\.experts is no product"):
        slots.read(tmp_path / "parts")  # without the names of parameters


def test_a_gguf_adapter_of_tensors_that_are_joined_is_refused(tmp_path):
    """GGUF stores `kv_b_proj` as two tensors; an adapter of one of them would be dropped."""
    model = gguf_checkpoints.random_model("deepseek2")
    model.save_pretrained(tmp_path / "base")
    save_peft(tmp_path, model, ["model.layers.0.self_attn.o_proj.weight"])
    halves = {f"blk.0.attn_k_b.weight.lora_{half}": torch.ones(3, 3) for half in "ab"}
    file = gguf_adapter(tmp_path / "adapter.gguf", tmp_path, "deepseek2", halves)
    slots = load_model(tmp_path / "base", device="cpu", dtype="float32", max_adapters=1).adapters
    with pytest.raises(AdapterError, match=r"blk\.0\.attn_k_b\.weight "):
        slots.read(file)


def test_what_adapters_of_heads_add_in_a_pass_is_part_of_the_plan(checkpoint):
    model = load_model(checkpoint("deepseek-v3"), device="cpu", dtype="float32").config
    sizes = {"max_batch_size": 4, "max_prefill_tokens": 60, "max_adapter_rank": 8}
    nbytes = [
        paired_adapter_bytes_of(
            EngineConfig.of(None, max_adapters=slots, **sizes), model, torch.float32, torch.device("cpu")
        )
        for slots in (0, 1)
    ]
    rotated, latent = 32, 32
    assert nbytes == [0, 64 * 4 * 4 * (rotated + latent + 8)]  # of each token and head: its queries, and the inner sums


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
    by_id = {engine.add(Request(ids, GREEDY, adapter=each and each.lora_name)): (each, ids) for each, ids in requests}
    tokens: dict[int, list[int]] = {number: [] for number in by_id}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    for number, (request, prompt) in by_id.items():
        assert tokens[number] == of_model.wanted(request, prompt, 8), request
    assert engine.graphs.graphs == captured
    assert engine.adapters.stats.evictions > 0
    products = engine.model.adapters.products.values()
    experts = {"adapt_experts": of_model.has_experts}
    counted = adapter_bytes(engine.model.config, 2, 8, engine.model.dtype, **experts)
    assert counted >= sum(product.down.nbytes + product.up.nbytes for product in products)
    engine.close()


def test_prefixes_are_shared_by_requests_of_one_adapter_alone(adapted):
    of_model = adapted("qwen3")
    prompt = list(range(5, 45))
    with of_model.make() as llm:

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
    with of_model.make() as llm:
        request = of_model.requests[1]
        stream = llm.stream([7, 8, 9], GREEDY, lora_request=request)
        for _ in range(3):
            llm.step()
        assert 0 < len(stream.request.outputs[0].token_ids) < 8
        llm.unload_lora_adapter(request.lora_name)
        list(stream)
        assert stream.request.outputs[0].token_ids == of_model.wanted(request, [7, 8, 9], 8)
        with pytest.raises(RequestError, match="adapter 'adapter-1'"):
            llm.engine.adapters.named(request.lora_name)


class Lives:
    """Forty adapters and four slots: requests join, leave early, and each has the bits of its run alone."""

    def __init__(self, adapted: Adapted, folder: Path) -> None:
        self.requests: list[LoRARequest] = []
        for number in range(1, 41):
            names = adapted.linear + (adapted.tables + adapted.stacks if number % 3 == 0 else [])
            rank = 1 + number % 8
            save_peft(folder / str(number), adapted.model, names, rank=rank, seed=number, lora_alpha=2 * rank)
            self.requests.append(LoRARequest(f"life-{number}", number, folder / str(number)))
        self.llm = adapted.make(max_adapters=4, batch_invariant=True, batch_sizes=[1, 3])
        self.alone = [self.tokens_of(None), *map(self.tokens_of, self.requests)]

    def tokens_of(self, request: LoRARequest | None) -> list[int]:
        return generated(self.llm, [(request, [3, 4, 5, 6])])[0]

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
    lives_of_model = Lives(adapted(request.param), tmp_path_factory.mktemp("lives"))
    yield lives_of_model
    lives_of_model.llm.close()


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
    return _tensors(lambda tensors: {n: value(t).contiguous() if which in n else t for n, t in tensors.items()})


def _named(old: str, new: str) -> Callable[[Path], None]:
    return _tensors(lambda tensors: {re.sub(old, new, name): tensor for name, tensor in tensors.items()})


def _beside(name: str, tensor: Tensor) -> Callable[[Path], None]:
    return _tensors(lambda tensors: tensors | {f"base_model.model.model.{name}": tensor})


def _cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


ONE = torch.ones(1)
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no configuration": (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json"),
    "a pickle": (_pickled, "adapter_model.safetensors; pickles"),
    "cut": (_cut, "adapter_model.safetensors"),
    "empty": (_tensors(lambda _: {}), "empty"),
    "another kind": (_config(peft_type="IA3"), "peft_type is 'IA3'"),
    "DoRA": (_config(use_dora=True), "use_dora is True"),
    "other modules": (_config(modules_to_save=["lm_head"]), r"modules_to_save is \['lm_head'\]"),
    "biases": (_config(bias="all"), "bias is 'all'"),
    "another alpha": (_config(lora_alpha="x"), "lora_alpha of .* is 'x'"),
    "a vast alpha": (_config(lora_alpha=10**400), "lora_alpha of .* is 1000"),
    "no targets": (_config(target_parameters=5), "target_parameters is 5"),
    "another rank": (_config(r=5), "rank 4, .*5"),
    "an endless expression": (_config(alpha_pattern={r"((a|\w|\.|[a-z])+)+\d": 2}), "alpha_pattern takes longer than"),
    "a broken expression": (_config(rank_pattern={"(": 2}), r"rank_pattern has '\(': missing \)"),
    "no expressions": (_config(rank_pattern=[4]), r"rank_pattern is \[4\]"),
    "NaN": (_all(lambda tensor: tensor * torch.nan), "not finite"),
    "too large a rank": (_config(r=9), "rank 4"),
    "integers": (_all(lambda tensor: tensor.int()), "not of floats"),
    "another size": (_all(lambda tensor: tensor[:, :-1], "lora_A"), r"A \[4, 63\] and B"),
    "half of it": (_tensors(lambda found: dict(list(found.items())[1:])), "only one of A and B"),
    "half of an embedding": (_beside("embed_tokens.lora_embedding_A", ONE), "embed_tokens has only one of A and B"),
    "half of two": (_beside("layers.0.self_attn.q_proj.lora_embedding_A", ONE), "q_proj has matrices of an embedding"),
    "another base": (_beside("embed_tokens.base_layer.weight", torch.ones(259, 64)), "embed_tokens.base_layer.weight "),
    "a product as an embedding": (_named(r"lora_(.)\.weight", r"lora_embedding_\1"), "q_proj has matrices of an embed"),
    "an expert": (_named(r"self_attn\.q_proj", "mlp.experts"), "mlp.experts is of experts, .*adapt_experts=True"),
    "other tokens": (_beside("embed_tokens.weight", ONE), "embed_tokens.weight is not the A or B"),
    "another model's module": (_named(r"layers\.0", "layers.7"), r"layers.7.self_attn.q_proj is no product"),
}


@pytest.fixture(scope="module")
def small(adapted: Callable[[str], Adapted]) -> Iterator[LLM]:
    with adapted("llama-2").make() as llm:
        yield llm


@pytest.mark.parametrize(("damage", "message"), FAULTS.values(), ids=FAULTS)
def test_what_cannot_be_used_is_refused_and_nothing_changes(small, adapted, tmp_path, damage, message):
    save_peft(tmp_path, adapted("llama-2").model, [f"{Q_PROJ}.weight"], rank=4)
    damage(tmp_path)
    with pytest.raises(AdapterError, match=message):
        small.load_lora_adapter("broken", tmp_path)
    assert small.engine.adapters.names == []


def test_names_ranks_and_engines_without_room_are_refused(small, adapted, tmp_path):
    model = adapted("llama-2").model
    save_peft(tmp_path, model, [f"{Q_PROJ}.weight"], rank=9)
    with pytest.raises(AdapterError, match="rank 9, .*max_adapter_rank is 8"):
        small.load_lora_adapter("large", tmp_path)
    for nowhere in (tmp_path / "nowhere", "a" * 5000, "\0"):
        with pytest.raises(AdapterError, match=re.escape(repr(str(nowhere))[:50])):
            small.load_lora_adapter("nowhere", nowhere)
    save_peft(tmp_path, model, [f"{Q_PROJ}.weight"], rank=8)
    small.load_lora_adapter("one", tmp_path)
    with pytest.raises(ArgumentError, match="adapter 'one'"):
        small.load_lora_adapter("one", tmp_path)
    small.unload_lora_adapter("one")
    with pytest.raises(ArgumentError, match="adapter 'one'"):
        small.unload_lora_adapter("one")
    with adapted("llama-2").make(max_adapters=0) as llm:
        with pytest.raises(ArgumentError, match="adapters"):
            llm.load_lora_adapter("one", tmp_path)
        assert not any("adapters" in str(shape) for shape in llm.graphs.ladder.shapes)
    with pytest.raises(ArgumentError, match="2 prompts and 1 lora_request"):
        small.generate([[1], [2]], lora_request=[None])
    with pytest.raises(ArgumentError, match="lora_request"):
        small.generate([[1], [2]], lora_request="one")
