"""A row whose logits leave no choice ends its request with an error that says why, and no other request feels it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from demo_copies import demo_copy
from safetensors.torch import load_file, save_file

from graphdecode import LLM, Engine, Request, SamplingParams
from graphdecode.engine import Event

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.2, seed=3, top_k=20, frequency_penalty=0.3, max_tokens=24, ignore_eos=True)
PROMPTS = [list(b"rev oceanic="), list(b"sort zebra=" * 4), list(b"417+385=")]
PAGE = 4  # tokens


@pytest.fixture(scope="module", params=[1, 8], ids=lambda steps: f"steps_per_launch={steps}")
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(
        "demo",
        max_batch_size=4,
        max_sequence_length=128,
        page_size=PAGE,
        steps_per_launch=request.param,
        max_num_batched_tokens=20,
        dtype="float32",
        device="cpu",
    ) as made:
        yield made


@pytest.fixture(params=[0, 1], ids=lambda launches: f"lookahead={launches}")
def engine(llm: LLM, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Read at once, as on a CPU, or while the next launch is under way, as on a GPU."""
    llm.engine.loop.lookahead = request.param
    llm.cache.reset()
    yield llm.engine
    assert not llm.engine.has_work
    assert llm.cache.pool.used == 0


def finished(engine: Engine, before: tuple[Event, ...] = ()) -> dict[int, tuple[list[int], Event]]:
    """Tokens and last event of each request."""
    tokens: dict[int, list[int]] = {}
    last: dict[int, Event] = {}
    events = list(before)
    while engine.has_work:
        events += engine.step()
    for event in events:
        tokens.setdefault(event.request_id, []).extend(event.token_ids)
        last[event.request_id] = event
    return {request_id: (tokens[request_id], last[request_id]) for request_id in tokens}


def alone(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    request_id = engine.add(Request(prompt, params))
    return finished(engine)[request_id][0]


def poison(engine: Engine, request_id: int, tokens: int) -> None:
    """Damage the keys and values of a request's first tokens, as a faulty memory would."""
    for page in engine.cache.pages_of(request_id)[: -(-tokens // PAGE)]:
        for keys, values in engine.cache.layers:
            keys[page] = torch.nan
            values[page] = torch.nan


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_damaged_cache_fails_its_request_alone(engine, params):
    expected = [alone(engine, prompt, params) for prompt in PROMPTS]
    outputs_before = engine.stats.finished_outputs
    ids = [engine.add(Request(prompt, params)) for prompt in PROMPTS]
    events: list[Event] = []
    while not any(event.request_id == ids[1] for event in events):
        events += engine.step()
    poison(engine, ids[1], len(PROMPTS[1]))
    outcome = finished(engine, tuple(events))
    for place in (0, 2):
        assert outcome[ids[place]][0] == expected[place]
        assert outcome[ids[place]][1].error is None
    tokens, last = outcome[ids[1]]
    assert tokens == expected[1][: len(tokens)]
    assert len(tokens) < len(expected[1])
    assert last.finish_reason == "error"
    assert last.error is not None
    assert f"request {ids[1]} was ended" in last.error
    assert "NaN or +inf" in last.error
    assert engine.stats.finished_outputs - outputs_before == 2
    # neither its prompt's pages nor the places that it left serve a damaged answer
    assert [alone(engine, prompt, params) for prompt in PROMPTS] == expected


def test_damage_of_a_prompt_fails_its_first_step(engine: Engine) -> None:
    expected = alone(engine, PROMPTS[0], GREEDY)
    engine.cache.reset()
    long, short = engine.add(Request(PROMPTS[1], DRAWN)), engine.add(Request(PROMPTS[0], GREEDY))
    events = engine.step()
    assert not any(event.request_id == long for event in events), "its prompt was read at once"
    poison(engine, long, 8)
    outcome = finished(engine, tuple(events))
    assert outcome[short][0] == expected
    assert outcome[long][0] == []
    assert outcome[long][1].finish_reason == "error"
    assert f"at position {len(PROMPTS[1])} " in str(outcome[long][1].error)


@pytest.fixture
def loud(llm: LLM) -> Iterator[LLM]:
    """Let the model give logits of about 1e34, which its float32 holds."""
    gain = llm.model.head.final_norm.weight
    quiet = gain.clone()
    gain.mul_(1e33)
    yield llm
    gain.copy_(quiet)


@pytest.mark.usefixtures("engine")
def test_a_temperature_that_overflows_logits_fails_its_request_alone(loud: LLM) -> None:
    cold = SamplingParams(temperature=1e-5, seed=0)
    calm = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in loud.generate([PROMPTS[0], PROMPTS[2]], calm)]
    first, wrong, last = loud.generate(PROMPTS, [calm, cold, calm])
    assert [first.outputs[0].token_ids, last.outputs[0].token_ids] == expected
    assert wrong.outputs[0].finish_reason == "error"
    assert wrong.outputs[0].token_ids == []
    assert "temperature 1e-05" in str(wrong.error)
    assert "leave the range of float32" in str(wrong.error)


@pytest.mark.usefixtures("engine")
def test_logits_out_of_range_end_a_greedy_request_too(loud: LLM) -> None:
    loud.model.head.final_norm.weight.mul_(1e10)
    outputs = loud.generate(PROMPTS, [GREEDY, DRAWN, SamplingParams(temperature=0.0, logprobs=3)])
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 3
    assert all("NaN or +inf" in str(output.error) for output in outputs)


def test_a_tensor_of_a_checkpoint_that_has_nan_is_named(tmp_path: Path) -> None:
    folder = demo_copy(tmp_path / "model")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = sorted(tensors)[3]
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, file)
    with LLM(folder, dtype="float32", max_batch_size=1, max_sequence_length=32) as damaged:
        (output,) = damaged.generate("1+1=", GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert name in str(output.error)
    assert "float32" not in str(output.error)
