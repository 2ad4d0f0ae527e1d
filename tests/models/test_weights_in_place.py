"""Weights are changed where captured steps read them, and give their memory back: tokens follow, no graph does."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
import transformers
from compiled_kernels import compiled
from family_checkpoints import edit_config, edited_tensors, save_checkpoint
from gguf_checkpoints import quantized_file
from greedy_tokens import greedy_tokens
from peft_folders import linear_weights, save_peft
from quantized_checkpoints import FORMS, write_pair
from safetensors.torch import load_file, save_file
from torch import Tensor

from adopted_models import ADOPTED, TINY, save_random
from graphdecode import LLM, BucketConfig, EngineConfig, LoRARequest, Request, SamplingParams
from graphdecode.distributed import Leader
from graphdecode.engine import Engine
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.loading import load_engine, start_ranks_of
from graphdecode.errors import ArgumentError, EngineStateError, NotSupportedError
from graphdecode.memory import release_memory
from graphdecode.models import load_model
from graphdecode.models.updates import check_layout

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(5, 40)), [7] * 20]
FILE = "model.safetensors"
# biases, tied weights, norms with an offset, experts in two layouts, sinks, states, gains that a family computes
FAMILIES = ("llama-biases", "qwen3-tied", "gemma3", "gpt-oss", "qwen2-moe", "falcon-h1-biases", "qwen3.5", "mamba2")
OPTIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4", "dtype": "bfloat16"},
    "drafts": {"speculation": "ngram"},
    "eager": {"backend": "eager"},
    "batch-invariant": {"batch_invariant": True},
    "room for adapters": {"max_adapters": 2},
}


def flipped(folder: Path, into: Path) -> Path:
    """Write a checkpoint of the same shapes and other numbers."""
    into.mkdir()
    for file in folder.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    with edited_tensors(into) as tensors:
        tensors |= {name: tensor.flip(0) for name, tensor in tensors.items() if not name.endswith("g_idx")}
    return into


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return two checkpoints of a family."""

    @cache
    def of(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(name.replace(".", "-"))
        first = save_checkpoint(name, folder / "first")
        return first, flipped(first, folder / "second")

    return of


def make(model: Path, **options: Any) -> LLM:
    sizes = {"max_batch_size": 3, "max_sequence_length": 96, "page_size": 8, "dtype": "float32"}
    return LLM(model, skip_tokenizer_init=True, **sizes | options)


def tokens_of(llm: LLM, **options: Any) -> list[list[int]]:
    return greedy_tokens(llm, PROMPTS, 8, **options)


def check_updates(first: Path, second: Path, update: Any = None, **options: Any) -> None:
    """Check that an update gives the tokens of an engine of its own, there and back, without a capture."""
    with make(second, **options) as other:
        expected = tokens_of(other)
    with make(first, **options) as llm:
        before, captured, addresses = tokens_of(llm), dict(llm.graphs.graphs), [t.data_ptr() for t in addressed(llm)]
        assert before != expected
        for weights, tokens in ((second, expected), (first, before), (second if update is None else update, expected)):
            llm.update_weights(weights)
            assert tokens_of(llm) == tokens, f"after {type(weights).__name__}"
        assert llm.graphs.graphs == captured
        assert [t.data_ptr() for t in addressed(llm)] == addresses


def addressed(llm: LLM) -> list[Tensor]:
    return [tensor for tensor in llm.model.constants if tensor.layout == torch.strided]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_or_its_tensors_give_that_folders_tokens(pair, family):
    first, second = pair(family)
    check_updates(first, second, load_file(second / FILE))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_weights_are_rounded_and_quantized_as_on_loading(pair, options):
    first, second = pair("qwen3-tied")
    check_updates(first, second, [(name, each.double()) for name, each in load_file(second / FILE).items()], **options)


@compiled
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_blocks_of_gguf_files_take_the_place_of_one_another(tmp_path, kind):
    files = [quantized_file(tmp_path / f"{name}.gguf", "llama", {"weight": kind}) for name in ("first", "second")]
    for tensor in gguf.GGUFReader(files[1], "r+").tensors:
        tensor.data[:] = tensor.data[::-1].copy()
    check_updates(*files)
    other = quantized_file(tmp_path / "other.gguf", "llama", {"ffn_down.weight": "Q5_0", "weight": kind})
    with make(files[0]) as llm, pytest.raises(ArgumentError, match=rf"down_proj.weight is .* Q5_0, .* as {kind}"):
        llm.update_weights(other)


@pytest.mark.parametrize("name", ["gptq", "fp8 block"])
def test_quantized_checkpoints_take_the_place_of_one_another(tmp_path, name):
    packed, plain = write_pair(FORMS[name], tmp_path)
    check_updates(packed, flipped(packed, tmp_path / "second"))
    with make(packed) as llm, pytest.raises(ArgumentError, match="_proj.weight .*F32"):
        llm.update_weights(load_file(plain / FILE))


@pytest.mark.parametrize("name", ["gpt-neox", "stablelm"])
def test_modules_of_transformers_are_updated_by_their_names(tmp_path, name):
    first = save_random(ADOPTED[name](TINY), tmp_path / "first")
    second = flipped(first, tmp_path / "second")
    module = transformers.AutoModelForCausalLM.from_pretrained(second, dtype=torch.float32)
    check_updates(first, second, module.state_dict())
    with make(first) as llm:
        with pytest.raises(ValueError, match="has no tensor no_such"):
            llm.update_weights({"no_such": torch.ones(1)})
        name = next(iter(module.state_dict()))
        with pytest.raises(ValueError, match=rf"{name} is \[1\], and the model's is"):
            llm.update_weights({name: torch.ones(1)})


def test_tensors_that_are_not_named_are_those_of_the_last_files(pair, tmp_path):
    first, second = pair("llama-biases")
    names = [f"model.layers.1.self_attn.{each}_proj.weight" for each in "qo"]
    tensors = load_file(first / FILE)
    mixed = flipped(first, tmp_path / "mixed")
    update = {name: each for name, each in load_file(second / FILE).items() if name in names}
    save_file(tensors | update, mixed / FILE, {"format": "pt"})
    with make(mixed) as llm:
        expected = tokens_of(llm)
    with make(first) as llm:
        llm.update_weights(update)  # one part of a fused product, and a product of its own
        assert tokens_of(llm) == expected
        with pytest.raises(ArgumentError, match=f"{names[1]} was given before and is in no file: name it again"):
            llm.update_weights({names[0]: update[names[0]]})
        assert tokens_of(llm) == expected
        llm.update_weights(update | {"lm_head.weight": tensors["lm_head.weight"]})
        assert tokens_of(llm) == expected


def test_a_tied_head_of_an_adopted_module_is_the_embedding(tmp_path):
    first = save_random(ADOPTED["cohere"](TINY), tmp_path)
    table = load_file(first / FILE)["model.embed_tokens.weight"]
    other = table.flip(0).contiguous()
    with make(first) as llm:
        before = tokens_of(llm)
        with pytest.raises(ArgumentError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            llm.update_weights({"lm_head.weight": other})
        llm.update_weights({"lm_head.weight": table})
        assert tokens_of(llm) == before
        llm.update_weights({"lm_head.weight": other, "model.embed_tokens.weight": other})
        assert tokens_of(llm) != before


def test_a_model_with_fewer_tensors_is_no_update():
    def of(count: int) -> Any:
        return SimpleNamespace(products=lambda: iter(()), constants=[torch.ones(1)] * count, cache_scales=[])

    check_layout(of(2), of(2))
    for count, other in ((1, 2), (2, 1)):
        with pytest.raises(ArgumentError, match="tensor 1 is stored or quantized otherwise"):
            check_layout(of(count), of(other))


def test_an_update_drops_prefixes_and_adapters_are_written_again(pair, tmp_path):
    first, second = pair("qwen3-tied")
    model = transformers.AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    save_peft(tmp_path / "adapter", model, linear_weights(model), rank=4)
    request = LoRARequest("one", 1, tmp_path / "adapter")
    with make(second, max_adapters=1) as other:
        expected = tokens_of(other, lora_request=request)
    with make(first, max_adapters=1) as llm:
        assert tokens_of(llm, lora_request=request) != expected
        for weights in (second, first, second):
            llm.update_weights(weights)
        output = llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False, lora_request=request)[0]
        assert output.metrics.num_cached_tokens == 0
        assert tokens_of(llm, lora_request=request) == expected
        llm.sleep(level=2)
        llm.wake_up()
        llm.update_weights(second)
        assert tokens_of(llm, lora_request=request) == expected


@pytest.fixture(scope="module")
def ranks() -> Iterator[Leader]:
    """Processes that load one model after the other."""
    leader = start_ranks_of(EngineConfig.of(None, tensor_parallel_size=2))
    yield leader
    leader.close()


def tokens_of_engine(engine: Engine, adapter: str | None = None) -> list[list[int]]:
    tokens: dict[int, list[int]] = {engine.add(Request(ids, GREEDY, adapter=adapter)): [] for ids in PROMPTS}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return list(tokens.values())


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}], ids=["float32", "int8"])
def test_ranks_are_updated_and_sleep_together_and_what_one_refuses_changes_none(pair, ranks, tmp_path, options):
    first, second = pair("llama-biases")
    model = transformers.AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    save_peft(tmp_path / "adapter", model, linear_weights(model), rank=4)

    def load(folder: Path, **more: Any) -> Engine:
        sizes = {"max_batch_size": 3, "max_sequence_length": 96, "page_size": 8, "dtype": "float32", "max_adapters": 1}
        engine = load_engine(folder, EngineConfig.of(None, **sizes | options | more), ranks=ranks if more else None)
        engine.adapters.load("one", tmp_path / "adapter")
        return engine

    def with_and_without(engine: Engine) -> list[list[list[int]]]:
        return [tokens_of_engine(engine), tokens_of_engine(engine, "one")]

    alone = load(second)
    expected = with_and_without(alone)
    alone.close()
    engine = load(first, tensor_parallel_size=2)
    before, captured, update = with_and_without(engine), dict(engine.graphs.graphs), load_file(second / FILE)
    assert before != expected
    name = "model.layers.1.self_attn.o_proj.weight"  # each rank has half of its columns
    for column in (0, 63):
        broken = {name: update[name].clone()}
        broken[name][5, column] = torch.nan
        with pytest.raises(ValueError, match=f"{name} has numbers that are not finite"):
            engine.update_weights(broken)
        assert with_and_without(engine) == before
    with pytest.raises(ValueError, match="no-such-folder"):
        engine.update_weights("./no-such-folder")
    for weights, tokens in ((second, expected), (first, before), (update.items(), expected)):
        engine.update_weights(weights)
        assert with_and_without(engine) == tokens
    for level in (1, 2):
        assert engine.sleep(level) > 0
        engine.wake_up()
        if level == 2:
            engine.update_weights(second)
        assert with_and_without(engine) == expected
    assert engine.graphs.graphs == captured
    engine.close()


NORM = "model.norm.weight"
FAULTS: dict[str, tuple[Any, str]] = {
    "another shape": ({NORM: torch.ones(63)}, rf"{NORM} .*\[63\].*\[64\]"),
    "another name": ({"model.norm.wieght": torch.ones(64)}, "model.norm.wieght"),
    "integers": ({NORM: torch.ones(64, dtype=torch.int32)}, f"{NORM} .*torch.int32.*F32"),
    "NaN": ({NORM: torch.full((64,), torch.nan)}, f"{NORM} .*not finite in float32"),
    "too large": ({NORM: torch.full((64,), 1e300, dtype=torch.float64)}, f"{NORM} .*not finite in float32"),
    "twice": ([(NORM, torch.ones(64)), (NORM, torch.ones(64))], f"{NORM} .*twice"),
    "none": ({}, "weights: no tensor"),
    "no tensors": ([1, 2], "weights .*1"),
    "nothing": (None, "weights .*None"),
    "a name alone": ({NORM: 1.0}, f"weights .*{NORM}"),
    "no folder": ("./no-such-folder", "no-such-folder"),
}


@pytest.fixture(scope="module")
def small(pair) -> Any:
    with make(pair("llama-2")[0]) as llm:
        yield llm


def unchanged(llm: LLM) -> list[Tensor]:
    return [tensor.clone() for tensor in addressed(llm)]


@pytest.mark.parametrize(("weights", "message"), FAULTS.values(), ids=FAULTS)
def test_what_does_not_fit_is_refused_by_name_and_nothing_changes(small, weights, message):
    before = unchanged(small)
    with pytest.raises(ValueError, match=message):
        small.update_weights(weights)
    assert all(map(torch.equal, before, unchanged(small)))


def test_folders_that_do_not_fit_are_refused_and_nothing_changes(small, pair, tmp_path):
    second, before = pair("llama-2")[1], unchanged(small)
    missing = flipped(second, tmp_path / "missing")
    with edited_tensors(missing) as tensors:
        del tensors[NORM]
    with pytest.raises(ValueError, match=f"missing: {NORM}"):
        small.update_weights(missing)
    cut = flipped(second, tmp_path / "cut")
    (cut / FILE).write_bytes((cut / FILE).read_bytes()[:-100])
    with pytest.raises(ValueError, match="it was cut"):
        small.update_weights(cut)
    edit_config(missing, lambda settings: settings.update(rms_norm_eps=0.5))
    with pytest.raises(ArgumentError, match="weights have rms_norm_eps 0.5, and the model has 1e-06"):
        small.update_weights(missing)
    with pytest.raises(ArgumentError, match="weights have architecture 'Qwen3ForCausalLM', and the model has 'Llama"):
        small.update_weights(pair("qwen3-tied")[1])
    assert all(map(torch.equal, before, unchanged(small)))


def test_running_requests_are_not_disturbed(small):
    expected = tokens_of(small)
    stream = small.stream(PROMPTS[0], GREEDY)
    small.step()
    for change in (lambda: small.update_weights({NORM: torch.ones(64)}), small.sleep, lambda: small.sleep(2)):
        with pytest.raises(EngineStateError, match=r"is for an engine without requests, and 1 are running or waiting"):
            change()
    list(stream)
    assert stream.request.outputs[0].token_ids == expected[0]


def test_requests_of_other_threads_see_one_set_of_weights(pair):
    first, second = pair("llama-2")
    with make(second) as other:
        new = tokens_of(other)
    with make(first) as llm:
        old, answers, done = tokens_of(llm), [], threading.Event()

        def ask() -> None:
            while not done.is_set():
                answers.append(tokens_of(llm))
                time.sleep(0.01)

        thread = threading.Thread(target=ask)
        thread.start()
        while True:
            try:
                llm.update_weights(second)
            except EngineStateError:
                continue
            break
        done.set()
        thread.join()
        assert tokens_of(llm) == new
        count = answers.count(old)
        assert answers == [old] * count + [new] * (len(answers) - count)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine of 50 MB of weights, and twice that of cache."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 8192}
    folder = tmp_path_factory.mktemp("large")
    torch.manual_seed(1)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 256}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    with make(folder, total_num_pages=1600) as llm:
        yield folder, llm


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_back_what_it_says_and_tokens_are_the_same_afterwards(large, level):
    folder, llm = large
    before_sleep, captured, addresses = tokens_of(llm), dict(llm.graphs.graphs), [t.data_ptr() for t in addressed(llm)]
    cache = [tensor for layer in llm.cache.layers for tensor in layer]
    for tensor in cache:
        tensor.fill_(1.0)  # resident: a cache in use
    weights = llm.model.constants if level == 2 else []
    before, expected = resident(), sum(tensor.nbytes for tensor in [*cache, *weights])
    given_back = llm.sleep(level)
    assert before - resident() >= 0.95 * given_back
    assert 0.95 * expected <= given_back <= 1.05 * expected
    assert llm.sleep(level) < 0.01 * expected  # twice: there is nothing left
    with pytest.raises(EngineStateError, match=r"the engine sleeps \(kv_cache, weights\): wake_up\(\) first"):
        tokens_of(llm)
    with pytest.raises(EngineStateError, match=r"wake_up\(tags=\['weights'\]\) comes before update_weights"):
        llm.update_weights(folder)
    llm.wake_up(tags=["weights"])
    if level == 2:
        llm.update_weights(folder)
    with pytest.raises(EngineStateError, match=r"the engine sleeps \(kv_cache\)"):
        llm.stream(PROMPTS[0], GREEDY)
    llm.wake_up()
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == before_sleep
    assert [output.metrics.num_cached_tokens for output in outputs] == [0, 0, 0]
    assert llm.graphs.graphs == captured
    assert [t.data_ptr() for t in addressed(llm)] == addresses


def test_weights_that_were_dropped_have_to_come_back_before_a_request(large):
    folder, llm = large
    expected = tokens_of(llm)
    llm.wake_up()  # awake already
    assert tokens_of(llm) == expected
    llm.sleep()
    llm.sleep(level=2)  # deeper
    llm.wake_up(["kv_cache", "weights"])
    with pytest.raises(EngineStateError, match=r"sleep\(level=2\) has dropped the weights: update_weights"):
        tokens_of(llm)
    llm.update_weights(load_file(folder / FILE))
    assert tokens_of(llm) == expected


def test_levels_tags_engines_and_devices_that_there_are_not(small, monkeypatch):
    for level in (0, 3, "1", True, None):
        with pytest.raises(ArgumentError, match="level must be 1 or 2, got"):
            small.sleep(level)
    with pytest.raises(ArgumentError, match="tags must be of weights, kv_cache, got 'cache'"):
        small.wake_up(["cache"])
    model = load_model("demo", device="cpu")
    engine = Engine(make_runner(model, BucketConfig(max_batch_size=1, max_sequence_length=64)))
    for change in (lambda: engine.update_weights({NORM: torch.ones(1)}), lambda: engine.sleep(2)):
        with pytest.raises(NotSupportedError, match="of a model that"):
            change()
    engine.close()
    with pytest.raises(NotSupportedError, match=r"only on a CPU under Linux, and this is meta: .* close\(\) frees all"):
        release_memory([torch.empty(1, device="meta")])
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(NotSupportedError, match="and this is darwin"):
        small.sleep()
    monkeypatch.undo()
    assert len(tokens_of(small)) == len(PROMPTS)
