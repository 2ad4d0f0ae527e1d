"""Two ranks give the tokens of one, whatever the engine does with them; and one that dies is named."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_checkpoints import ARCHITECTURES, quantized_file

from graphdecode import LLM, Engine, EngineConfig, Request, SamplingParams, StructuredOutputsParams
from graphdecode.distributed import Leader, RankError
from graphdecode.engine.loading import load_engine, start_ranks_of
from graphdecode.linear.experts import ExpertPanels
from graphdecode.models import load_model

LIMIT_SECONDS = 5.0


def settings(count: int, **changes: Any) -> EngineConfig:
    """Return small settings: prompts come in chunks, and pages run out soon."""
    defaults = {
        "max_batch_size": 4,
        "batch_sizes": [4],
        "page_size": 4,
        "max_sequence_length": 64,
        "max_prefill_tokens": 12,
        "dtype": "float32",
        "rank_limit_seconds": LIMIT_SECONDS,
    }
    return EngineConfig.of(None, tensor_parallel_size=count, **(defaults | changes))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Leader]:
    """Processes that load one model after the other."""
    leader = start_ranks_of(settings(2))
    yield leader
    leader.close()


def sampled(seed: int, length: int, **fields: Any) -> Request:
    """Return a request of a prompt whose first tokens others have, too."""
    params = SamplingParams(**{"temperature": 0.8, "seed": seed, "max_tokens": 12, "ignore_eos": True} | fields)
    return Request([5, 6, 7, 8, 9, 10, 11, 12, *range(20 + seed, 20 + seed + length)], params)


def answers(engine: Engine, requests: list[Request]) -> list[tuple[list[int], list[int], list[int]]]:
    """Return each request's tokens, the most likely ones beside them, and those of its prompt."""
    found = {engine.add(request): ([], [], []) for request in requests}
    while engine.has_work:
        for event in engine.step():
            tokens, tops, prompt = found[event.request_id]
            tokens += event.token_ids
            tops += [place.top[0][0] for place in event.logprobs or () if place.top]
            prompt += [place.top[0][0] for place in event.prompt_logprobs or () if place and place.top]
    return list(found.values())


def same_on_one_and_on_two(
    folder: Path,
    ranks: Leader,
    requests: list[Request],
    prepare: Callable[[Engine], None] = lambda _: None,
    **wish: Any,
) -> Engine:
    """Compare the answers; return the engine of two ranks, closed."""
    alone = load_engine(folder, settings(1, **wish))
    prepare(alone)
    expected = answers(alone, requests)
    alone.close()
    shared = load_engine(folder, settings(2, **wish), ranks=ranks)
    prepare(shared)
    assert answers(shared, requests) == expected
    shared.close()
    return shared


@pytest.mark.parametrize("name", ["llama-biases", "qwen3-tied", "phi3", "qwen2-moe", "gpt-oss", "gemma3-cap", "olmo2"])
def test_two_ranks_give_the_tokens_of_one(checkpoint: Callable[[str], Path], ranks: Leader, name: str) -> None:
    requests = [sampled(0, 1, temperature=0.0), sampled(1, 20), sampled(2, 6, temperature=0.0)]
    same_on_one_and_on_two(checkpoint(name), ranks, requests)


@pytest.mark.parametrize(("name", "gate_up", "down"), [("mixtral", "Q4_0", "Q8_0"), ("gpt-oss", "MXFP4", "MXFP4")])
def test_experts_in_blocks_are_dealt_out_and_give_the_tokens_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Leader, name: str, gate_up: str, down: str
) -> None:
    architecture, kind, changes = ARCHITECTURES[name]
    monkeypatch.setitem(ARCHITECTURES, name, (architecture, kind, changes | {"intermediate_size": 128}))
    types = {"gate_exps.weight": gate_up, "up_exps.weight": gate_up, "down_exps.weight": down}
    file = quantized_file(tmp_path / "model.gguf", name, types)
    requests = [sampled(0, 1, temperature=0.0), sampled(1, 20), sampled(2, 6, temperature=0.0)]
    engine = same_on_one_and_on_two(file, ranks, requests, quantize="gguf")
    whole = load_model(file, device="cpu", dtype="float32", quantize="gguf")
    for own, layer in zip(engine.runner.model.layers, whole.layers, strict=True):
        for place in ("gate_up", "down"):
            half, all_of_it = getattr(own.mlp.part.experts, place), getattr(layer.mlp.experts, place)
            assert isinstance(half, ExpertPanels)
            sizes = [
                sum(part.nbytes for part in form.weight._replace(table=None) if isinstance(part, torch.Tensor))
                for form in (half, all_of_it)
            ]
            assert 2 * sizes[0] == sizes[1]


def test_preemption_shared_prefixes_and_launches_ahead_change_no_token(
    checkpoint: Callable[[str], Path], ranks: Leader
) -> None:
    def look_ahead(engine: Engine) -> None:
        engine.loop.lookahead = 1

    requests = [sampled(seed, 3 * seed, max_tokens=20) for seed in range(7)]
    engine = same_on_one_and_on_two(
        checkpoint("llama-3"), ranks, requests, look_ahead, total_num_pages=20, batch_sizes=[1, 2, 4]
    )
    assert engine.num_preemptions > 0
    assert engine.stats.prefilled_tokens > 0


def test_logprobs_penalties_and_biases_are_those_of_one(checkpoint: Callable[[str], Path], ranks: Leader) -> None:
    requests = [
        sampled(0, 2, logprobs=2, repetition_penalty=1.3, presence_penalty=0.5),
        sampled(1, 9, prompt_logprobs=2, max_tokens=3),
        sampled(2, 1, logit_bias={7: 4.0, 9: -4.0}, frequency_penalty=0.4),
        sampled(3, 1, allowed_token_ids=[3, 5, 8, 13], logprobs=1),
    ]
    same_on_one_and_on_two(checkpoint("llama-3"), ranks, requests, capture_when="first-use")


def test_several_steps_a_launch_and_batch_invariance_hold_too(checkpoint: Callable[[str], Path], ranks: Leader) -> None:
    requests = [sampled(seed, 5 + seed) for seed in range(3)]
    same_on_one_and_on_two(checkpoint("qwen3"), ranks, requests, steps_per_launch=4, batch_invariant=True)


def test_a_rank_that_stalls_is_named_within_the_limit(checkpoint: Callable[[str], Path], ranks: Leader) -> None:
    engine = load_engine(checkpoint("llama-3"), settings(2), ranks=ranks)
    (pid,) = ranks.pids
    engine.add(sampled(0, 3, max_tokens=50))
    engine.step()
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 (has stalled|did not come)"):
        answers(engine, [])
    assert time.monotonic() - began < 60 < LIMIT_SECONDS * 50
    with pytest.raises(RankError, match="rank 1 of 2"):
        answers(engine, [sampled(1, 3)])
    ranks.close()
    assert not Path(f"/proc/{pid}").exists()


def test_the_library_starts_ranks_holds_answers_to_forms_and_names_the_dead() -> None:
    choice = StructuredOutputsParams(choice=["yes", "no", "perhaps"])
    schema = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}})
    wishes = [
        SamplingParams(temperature=0.9, seed=1, max_tokens=20, structured_outputs=choice),
        SamplingParams(temperature=0.9, seed=2, max_tokens=20, structured_outputs=schema),
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    ]
    texts = []
    options = {"max_batch_size": 4, "batch_sizes": [4], "max_sequence_length": 64, "speculation": "ngram"}
    for count in (1, 2):
        llm = LLM("demo", tensor_parallel_size=count, dtype="float32", **options)
        texts.append([output.outputs[0].token_ids for output in llm.generate(["rev abcabc="] * 3, wishes)])
        if count == 1:
            llm.close()
    assert texts[0] == texts[1]
    (pid,) = llm.engine.runner.ranks.pids
    pieces = llm.stream("sort hello=", SamplingParams(max_tokens=40, ignore_eos=True))
    next(pieces)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 1 of 2 was ended by SIGKILL"):
        list(pieces)
    llm.close()
    assert not Path(f"/proc/{pid}").exists()
