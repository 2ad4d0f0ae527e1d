"""Law 9 with layers of several kinds: a request has the bits of a run alone, whatever joins, leaves or is preempted."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_kernels import compiled_or_gpu
from faults import Fault, dropped, returns
from known_models import sizes
from test_against_transformers import NEAR_TIE, assert_greedy
from transformers import AutoModelForCausalLM

from graphdecode import LLM, BucketConfig, EngineConfig, SamplingParams
from graphdecode.cache import PagedKVCache
from graphdecode.cache.ledger import PageLedger
from graphdecode.engine.capacity import plan_capacity, state_bytes_of
from graphdecode.engine.outputs import OutputProcessor
from graphdecode.engine.prompt_scheduler import PromptScheduler
from graphdecode.engine.scheduler import Scheduler
from graphdecode.engine.state_checkpoints import StateCheckpoints
from graphdecode.engine.steps import SpeculativeStep
from graphdecode.engine.steps import step as step_module
from graphdecode.errors import ArgumentError
from graphdecode.models import describe_model
from graphdecode.models.family import config_of

# one of each kind of layer: Mamba2 beside attention and in its place, gated delta net, short convolution, nothing
STATEFUL = ("falcon-h1-multipliers", "qwen3.5", "olmo-hybrid", "granite-4-experts", "nemotron-h", "lfm2", "mamba2")
# and keys of two sizes, shared keys, chunks, latents
MODELS = (*STATEFUL, "gemma4-experts", "gemma4-inputs", "llama4", "deepseek-v3")
ENGINES: tuple[dict[str, Any], ...] = (  # chunks of 7, few pages, several steps a launch; prefixes in the first two
    {"max_batch_size": 5, "batch_sizes": [3], "max_prefill_tokens": 7, "checkpoints": (9, 8)},
    {"max_batch_size": 8, "page_size": 4, "total_num_pages": 24, "max_prefill_tokens": 33, "checkpoints": (2, 9)},
    {"max_batch_size": 4, "steps_per_launch": 3, "max_prefill_tokens": 512},
)
DRAFTING: dict[str, Any] = {  # beside prefixes, few pages and small chunks
    "max_batch_size": 4,
    "page_size": 4,
    "total_num_pages": 40,
    "max_prefill_tokens": 33,
    "checkpoints": (6, 9),
    "speculation": {"num_tokens": 3, "ngram_min": 1},
}
Request = tuple[list[int], SamplingParams]
Answer = list[tuple[list[int], list[dict[int, float]]]]  # of each of `n` outputs


def requests() -> list[Request]:
    """Prompts about the borders of pages and chunks, some with a common beginning; greedy and sampled, one or two."""
    rng = random.Random(11)
    common = [rng.randrange(97, 123) for _ in range(20)]
    made_requests = []
    for index, length in enumerate([1, 2, 7, 8, 15, 17, 31, 40, 5, 60]):
        text = [rng.randrange(97, 123) for _ in range(length)]
        params = SamplingParams(
            temperature=[0.0, 0.9][index % 2],
            seed=index,
            max_tokens=16 + 2 * index,
            logprobs=2,
            ignore_eos=True,
            n=2 if index % 4 == 3 else 1,
            allowed_token_ids=None if index % 3 == 1 else [97, 98],  # of which drafts are right
        )
        made_requests.append((common + text if index % 3 == 1 else text, params))
    return made_requests


def answer_of(output: Any) -> Answer:  # one that left before its first token has no log-probabilities
    return [
        (each.token_ids, [{token: entry.logprob for token, entry in step.items()} for step in each.logprobs or []])
        for each in output.outputs
    ]


class Engines:
    """Engines of one model, made at their first use, and what each request has alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._engines: dict[int, LLM] = {}
        with self.make(max_batch_size=1, max_prefill_tokens=512) as llm:
            self.alone = [answer_of(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt, params in requests()]

    def make(
        self, max_prefill_tokens: int, checkpoints: tuple[int, int] = (0, 256), speculation: Any = None, **config: Any
    ) -> LLM:
        buckets = BucketConfig(**{"max_sequence_length": 128, "page_size": 8, **config})
        options = {"dtype": "float32", "batch_invariant": True, "max_prefill_tokens": max_prefill_tokens}
        options["speculation"] = speculation
        count, tokens = checkpoints
        return LLM(self.folder, config=buckets, state_checkpoints=count, state_checkpoint_tokens=tokens, **options)

    def __getitem__(self, index: int) -> LLM:
        if index not in self._engines:
            self._engines[index] = self.make(**(*ENGINES, DRAFTING)[index])
        return self._engines[index]

    def close(self) -> None:
        for llm in self._engines.values():
            llm.close()


@pytest.fixture(scope="module")
def engines_of(checkpoint: Callable[[str], Path]) -> Iterator[Callable[[str], Engines]]:
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(closing(Engines(checkpoint(name)))))


def live(llm: LLM, alone: list[Answer], rng: random.Random) -> int:
    """One life: requests join, some leave early, others are asked for at once; each has the bits of its run alone.

    Returns how many prompt tokens were in the prefix cache.
    """
    cases = requests()
    single = [index for index, (_, params) in enumerate(cases) if params.n == 1]
    streams = []
    for index in rng.sample(single, rng.randrange(3, len(single))):
        streams.append((index, llm.stream(*cases[index])))
        for _ in range(rng.randrange(4)):
            llm.step()
        if rng.random() < 0.2:
            rng.choice(streams)[1].close()
    chosen = rng.sample(range(len(cases)), rng.randrange(4, len(cases)))
    outputs = llm.generate([cases[index][0] for index in chosen], [cases[index][1] for index in chosen], use_tqdm=False)
    for index, output in zip(chosen, outputs, strict=True):
        assert answer_of(output) == alone[index], f"request {index}, asked for among {chosen}"
    for index, stream in streams:
        list(stream)  # to its end
        ((tokens, logprobs),), ((expected, wanted_logprobs),) = answer_of(stream.request), alone[index]
        assert tokens == expected[: len(tokens)], f"request {index}"
        assert logprobs == wanted_logprobs[: len(logprobs)], f"request {index}"
    finished = [*outputs, *(stream.request for _, stream in streams)]
    return sum(output.metrics.num_cached_tokens for output in finished)


@compiled_or_gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_request_has_the_bits_of_a_run_alone_in_random_lives(engines_of: Callable[[str], Engines], name: str) -> None:
    engines = engines_of(name)
    reused = [live(engines[index], engines.alone, random.Random(index)) for index in range(len(ENGINES))]
    if name in STATEFUL:  # a ring of pages is found where its last owner has left
        assert reused[0] > 0
        assert reused[2] == 0
    assert engines[1].num_preemptions > 0


@compiled_or_gpu
@pytest.mark.parametrize(
    ("name", "steps_per_launch"),
    [
        *(("falcon-h1-multipliers", 1), ("qwen3.5", 3), ("lfm2", 1), ("mamba2", 3), ("gemma4-experts", 1)),
        *(("llama4", 3), ("deepseek-v3", 1)),
    ],
)
def test_drafts_change_no_bit(engines_of: Callable[[str], Engines], name: str, steps_per_launch: int) -> None:
    engines = engines_of(name)
    with engines.make(**DRAFTING, steps_per_launch=steps_per_launch) as llm:
        assert live(llm, engines.alone, random.Random(5)) > 0
        drafted, accepted, _ = llm.stats.speculation
    assert drafted > accepted > 0


def scan_each_query(right: Callable[..., Any], *args: Any) -> Any:
    inputs = right(*args)
    inputs.scan_rows = inputs.rows
    return inputs


def commit(change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """Commit the states after other numbers of accepted drafts."""
    return Fault(
        SpeculativeStep,
        "_commit_states",
        lambda right, step, batch, accepted, queries: right(step, batch, change(accepted), queries),
    )


DRAFT_FAULTS = {
    "states behind accepted drafts are lost": commit(torch.zeros_like),
    "the state behind a draft that was refused is kept": commit(lambda accepted: accepted + 1),
    "queries of a row do not advance one state": Fault(SpeculativeStep, "_inputs_of_queries", scan_each_query),
}


@compiled_or_gpu
@pytest.mark.slow
@pytest.mark.parametrize("fault", DRAFT_FAULTS)
def test_a_fault_of_states_behind_drafts_is_caught(engines_of, monkeypatch, fault):
    engines = engines_of("mamba2")
    DRAFT_FAULTS[fault].plant(monkeypatch)
    with engines.make(**DRAFTING) as llm, pytest.raises(AssertionError):
        live(llm, engines.alone, random.Random(5))


def test_a_draft_model_drafts_for_a_model_with_states(checkpoint):
    prompts, params = [prompt for prompt, _ in requests()], SamplingParams(temperature=0.0, max_tokens=20)
    config = BucketConfig(max_batch_size=4, max_sequence_length=128, page_size=8)
    speculation = {"method": "model", "model": str(checkpoint("llama-2")), "num_tokens": 2}
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3.5"), dtype=torch.float32).eval()
    with LLM(checkpoint("qwen3.5"), config=config, dtype="float32", speculation=speculation) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats.speculation.drafted > 0
    for output in outputs:
        assert_greedy(model, output.prompt_token_ids, output.outputs[0].token_ids)


@compiled_or_gpu
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(500))
def test_a_request_has_the_bits_of_a_run_alone_in_five_hundred_lives(engines_of, seed):
    rng = random.Random(1000 + seed)
    engines = engines_of(MODELS[seed % len(MODELS)])
    live(engines[rng.randrange(len(ENGINES) + 1)], engines.alone, rng)


def share(folder: Path) -> tuple[list[tuple[list[int], Answer]], list[int], int]:
    """Prompts about borders of 16 tokens, beside a row that goes on: answers, tokens found, mixed steps."""
    common, params = list(range(97, 137)), SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
    prompts = [common[:33], *([*common[:end], *text] for end in (16, 17, 32, 40) for text in ([], [5], [6] * 17))]
    config = BucketConfig(max_batch_size=4, max_sequence_length=128, page_size=8)
    options = {"max_prefill_tokens": 20, "state_checkpoints": 8, "state_checkpoint_tokens": 10}
    with LLM(folder, config=config, dtype="float32", **options) as llm:
        stream = llm.stream([9] * 5, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
        for _ in range(3):
            llm.step()
        outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
        stream.close()
        cached = [output.metrics.num_cached_tokens for output in outputs]
        return [(output.prompt_token_ids, answer_of(output)) for output in outputs], cached, llm.stats.mixed_steps


def check_shared(folder: Path) -> None:
    """A prefix is found up to its last border; tokens and log-probabilities are those of transformers."""
    outputs, cached, mixed_steps = share(folder)
    assert mixed_steps > 0
    assert cached == [0, 0, 16, 16, 16, 16, 16, 16, 32, 32, 32, 32, 32]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    for prompt, [(tokens, logprobs)] in outputs:
        assert_greedy(model, prompt, tokens)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        actual = torch.tensor([step[token] for step, token in zip(logprobs, tokens, strict=True)])
        torch.testing.assert_close(actual, expected, atol=NEAR_TIE, rtol=0.0)


@pytest.mark.parametrize("name", ["qwen3.5", "falcon-h1", "lfm2", "mamba2"])
def test_a_shared_prefix_changes_no_token(checkpoint, monkeypatch, name):
    monkeypatch.setattr(step_module, "CACHED_BYTES", 0)  # so that steps take prompts along
    check_shared(checkpoint(name))


def take_past_checkpoints(right: Callable[..., int], scheduler: Scheduler, *args: Any) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler.cache, "checkpoint_tokens", None)
        return right(scheduler, *args)


CHECKPOINT_FAULTS = {
    "a state is saved behind the page before": Fault(
        PageLedger,
        "digests_of",
        lambda right, *args: [b"", *right(*args)[:-1]],
        during=(PagedKVCache, "save_state"),
    ),
    "a state is restored from where it is to go": Fault(
        PagedKVCache,
        "_copy_state",
        lambda right, *args, is_restored: right(*args, is_restored=not is_restored),
    ),
    "a chunk goes past a checkpoint": Fault(Scheduler, "_take_chunk", take_past_checkpoints),
    "no state is restored": Fault(PagedKVCache, "restore_state", dropped),
    "a step follows before the last state is saved": Fault(Scheduler, "saves_last", returns(False)),
    "states of mixed steps are not saved": Fault(PromptScheduler, "save_mixed", dropped),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", CHECKPOINT_FAULTS)
def test_a_fault_of_checkpoints_is_caught(checkpoint, monkeypatch, fault):
    monkeypatch.setattr(step_module, "CACHED_BYTES", 0)
    monkeypatch.setattr(Scheduler, "save_state", lambda *_: None)  # of decode steps, which leave the same ones
    CHECKPOINT_FAULTS[fault].plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        check_shared(checkpoint("mamba2"))


def check_turns(folder: Path, steps_per_launch: int, lookahead: int) -> None:
    """A conversation beside a long output: a turn finds all before it up to the last border of its output."""
    config = BucketConfig(max_batch_size=3, max_sequence_length=160, page_size=8, steps_per_launch=steps_per_launch)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt, cached = [9] * 5, []
    with LLM(folder, config=config, dtype="float32", state_checkpoints=4, state_checkpoint_tokens=16) as llm:
        llm.engine.loop.lookahead = lookahead
        stream = llm.stream([7] * 11, SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True))
        for turn in range(3):
            params = SamplingParams(temperature=0.0, max_tokens=30 + turn, ignore_eos=True)
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert_greedy(model, prompt, output.outputs[0].token_ids)
            cached.append(output.metrics.num_cached_tokens)
            prompt = [*prompt, *output.outputs[0].token_ids, 5, 6]
        stream.close()
    assert cached == [0, 32, 64]


@pytest.mark.parametrize(("name", "steps_per_launch", "lookahead"), [("qwen3.5", 1, 0), ("mamba2", 3, 1)])
def test_an_output_is_a_prefix_of_the_next_turn(checkpoint, name, steps_per_launch, lookahead):
    check_turns(checkpoint(name), steps_per_launch, lookahead)


class NeverZero(list):
    def __contains__(self, _value: object) -> bool:
        return False


LOOKS_PAST = Fault(StateCheckpoints, "tokens_past", lambda right, *args: NeverZero(right(*args)))
TURN_FAULTS = {
    "a launch goes past a checkpoint": [Fault(StateCheckpoints, "steps_left", returns(16))],
    "the next launch follows before the state is saved": [LOOKS_PAST],
    "a state is saved that the next launch has changed": [
        LOOKS_PAST,
        Fault(OutputProcessor, "accept", lambda right, *args, is_last: right(*args, is_last=True)),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", TURN_FAULTS)
def test_a_fault_of_checkpoints_in_steps_is_caught(checkpoint, monkeypatch, fault):
    for each in TURN_FAULTS[fault]:
        each.plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_turns(checkpoint("mamba2"), 3, 1)


@pytest.mark.parametrize(("name", "count"), [("olmo-hybrid", 2), ("mamba2", 3)])
def test_states_that_cannot_be_split_are_refused_before_anything_is_loaded(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    def nothing(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded, or ranks are started")

    monkeypatch.setattr("graphdecode.engine.loading.load_model", nothing)
    monkeypatch.setattr("graphdecode.engine.loading.start_ranks", nothing)
    with pytest.raises(ArgumentError, match=f"tensor_parallel_size={count} does not divide .*the heads of recurrent"):
        LLM(checkpoint(name), tensor_parallel_size=count)


def test_a_draft_model_with_states_is_refused_before_anything_is_loaded(checkpoint, monkeypatch):
    monkeypatch.setattr("graphdecode.engine.loading.load_model", lambda *_, **__: pytest.fail("a model is loaded"))
    with pytest.raises(ArgumentError, match="speculation='model' needs the states before each draft"):
        LLM(checkpoint("llama-2"), speculation="model", draft_model=str(checkpoint("mamba2")))


def test_a_model_with_states_says_that_it_shares_no_prefixes(checkpoint, caplog):
    with caplog.at_level("INFO", "graphdecode"), LLM(checkpoint("lfm2"), dtype="float32") as llm:
        assert not llm.cache.prefix_caching
    assert "prefixes are not shared: the model has recurrent states" in caplog.text


@pytest.mark.parametrize(("name", "paged", "stateful"), [("falcon-h1", 3, 3), ("nemotron-h", 1, 2), ("mamba2", 0, 3)])
def test_pages_and_states_are_counted_as_they_are_stored(checkpoint, name, paged, stateful):
    buckets, shape = (
        BucketConfig(max_batch_size=4, max_sequence_length=64, page_size=8),
        describe_model(checkpoint(name)),
    )
    states = [state.nbytes for state in shape.recurrent if state is not None and state.nbytes]
    assert len(states) == stateful
    assert state_bytes_of(buckets, shape) == 5 * sum(states)
    device = torch.device("cpu")
    arguments = (EngineConfig(buckets), shape, torch.float32, device)
    capacity = plan_capacity(*arguments, available_bytes=2**30)
    assert capacity.token_bytes == 2 * paged * shape.num_key_value_heads * shape.head_dim * 4
    with pytest.raises(ArgumentError, match="no memory is left"):
        plan_capacity(*arguments, available_bytes=state_bytes_of(buckets, shape))


def delta_net(layers: int, hidden: int, heads: int, kv_heads: int, value_heads: int, **others: Any) -> dict[str, Any]:
    fields = {"num_hidden_layers": layers, "head_dim": 256, "linear_num_value_heads": value_heads}
    return sizes("Qwen3_5ForCausalLM", 248320, hidden, 3 * hidden, heads, kv_heads, **fields, **others)


HYBRIDS = {
    "qwen3.5-0.8b": delta_net(24, 1024, 8, 2, value_heads=16),
    "qwen3.5-9b": delta_net(32, 4096, 16, 4, value_heads=32),
    "qwen3.5-27b": delta_net(64, 5120, 24, 4, value_heads=48),
    "qwen3-next-80b": delta_net(48, 2048, 16, 2, 32, architectures=["Qwen3NextForCausalLM"]),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_and_keys_of_32k_tokens_take_a_part_of_what_full_attention_takes(name):
    buckets, settings = BucketConfig(max_batch_size=8, max_sequence_length=32768), HYBRIDS[name]

    def cache_bytes(**changes: Any) -> int:
        shape = config_of(settings | changes)
        arguments = (EngineConfig(buckets), shape, torch.bfloat16, torch.device("cpu"))
        return plan_capacity(*arguments, available_bytes=2**45).cache_bytes + state_bytes_of(buckets, shape)

    full = cache_bytes(layer_types=["full_attention"] * settings["num_hidden_layers"])
    assert cache_bytes() <= 0.3 * full, cache_bytes() / full
