"""Generation: what a request asks for is what it gets, alone and in company."""

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from demo_tasks import TASKS, sample
from graphdecode import LLM, RequestError, SamplingParams
from graphdecode.engine.request import RequestRules

MakeLLM = Callable[..., LLM]

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


def task_prompts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [sample(rng.choice(TASKS), rng)[0] for _ in range(count)]


def random_prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97, 123) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def tokens(outputs: list) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_nothing_held(llm: LLM) -> None:
    assert llm.cache.pool.used == 0
    assert not llm.cache.ledger.pages


def test_the_demo_model_generates(llm: LLM) -> None:
    outputs = llm.generate(["417+385=", "rev oceanic="], GREEDY)
    assert [output.outputs[0].text.strip() for output in outputs] == ["802", "cinaeco"]
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    assert [output.prompt for output in outputs] == ["417+385=", "rev oceanic="]


def test_a_text_or_a_list_of_token_ids_is_one_prompt(llm: LLM) -> None:
    ids = llm.tokenizer("12+30=").input_ids
    assert llm.generate("12+30=", GREEDY)[0].outputs[0].text == "42"
    assert llm.generate(ids, GREEDY)[0].outputs[0].text == "42"
    assert llm.generate([ids], GREEDY)[0].prompt is None


def test_a_prompt_is_checked_once_for_all_its_outputs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    check = RequestRules.check_prompt
    told = lambda rules, tokens, most: (checked.append(len(tokens)), check(rules, tokens, most))[1]  # noqa: E731
    monkeypatch.setattr(RequestRules, "check_prompt", told)
    llm.generate([[100, 101, 102]], replace(GREEDY, n=3))
    assert checked == [3]


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_batching_changes_no_output(make_llm: MakeLLM) -> None:
    prompts = random_prompts(12, 40, seed=1)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    alone, together = make_llm(max_batch_size=1), make_llm(max_batch_size=8)
    assert tokens(together.generate(prompts, params)) == [tokens(alone.generate([p], params))[0] for p in prompts]
    assert_nothing_held(together)


def test_sampled_outputs_depend_on_the_seed_alone(make_llm: MakeLLM) -> None:
    prompts = random_prompts(9, 20, seed=3)
    params = [SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=12) for i in range(9)]
    wide, narrow = make_llm(max_batch_size=8), make_llm(max_batch_size=2, page_size=4, total_num_pages=14)
    first = tokens(wide.generate(prompts, params))
    backwards = tokens(narrow.generate(prompts[::-1], params[::-1]))
    assert first == backwards[::-1]
    others = [SamplingParams(temperature=0.8, top_p=0.95, seed=i + 100, max_tokens=12) for i in range(9)]
    assert tokens(wide.generate(prompts, others)) != first


def test_capture_at_first_use_changes_no_output(make_llm: MakeLLM, llm: LLM) -> None:
    lazy = make_llm(capture_when="first-use")
    prompts = task_prompts(9, seed=4)
    assert tokens(lazy.generate(prompts, GREEDY)) == tokens(llm.generate(prompts, GREEDY))
    assert {bucket.state for bucket in lazy.graphs.report().buckets if bucket.replays} == {"captured"}


def test_idle_captures_of_prompts_change_no_output(make_llm: MakeLLM, llm: LLM) -> None:
    lazy, prompt = make_llm(capture_when="idle"), task_prompts(1, seed=4)
    expected = tokens(llm.generate(prompt, GREEDY))
    assert tokens(lazy.generate(prompt, GREEDY)) == expected

    def states(kind: str) -> list[str]:
        return [bucket.state for bucket in lazy.engine.runner.reports()[kind].buckets]

    assert "captured" in states("steps")
    assert "captured" not in states("prompts")
    while lazy.engine.capture_waiting():
        pass
    assert "waiting" not in states("steps") + states("prompts")
    assert "captured" in states("prompts")
    lazy.graphs.freeze()
    assert tokens(lazy.generate(prompt, GREEDY)) == expected


def test_streams_read_in_turn_give_what_generate_gives(llm: LLM) -> None:
    prompts = task_prompts(6, seed=5)
    expected = [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    pieces = [list(stream) for stream in streams]
    assert ["".join(p) for p in pieces] == expected
    assert any(len(p) > 1 for p in pieces)
    assert_nothing_held(llm)


def test_leaving_a_stream_early_frees_its_row(llm: LLM) -> None:
    with llm.stream("rev abcdefgh=", GREEDY) as stream:
        next(stream)
    assert stream.request.outputs[0].finish_reason == "abort"
    assert_nothing_held(llm)


def test_max_tokens_and_the_capacity_end_an_output(make_llm: MakeLLM) -> None:
    llm = make_llm(max_sequence_length=32)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    output = llm.generate([[97] * 10], params)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (5, "length")
    params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    output = llm.generate([[97] * 10], params)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (22, "length")


def test_an_output_may_fill_the_whole_pool(make_llm: MakeLLM) -> None:
    llm = make_llm(page_size=4, total_num_pages=5)
    params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    outputs = llm.generate([[97] * 7, [98] * 3], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [13, 17]
    assert_nothing_held(llm)


def test_a_prompt_that_is_too_long_is_refused_alone(llm: LLM) -> None:
    with pytest.warns(RuntimeWarning, match="1 of 2"):
        outputs = llm.generate([[97] * 128, llm.tokenizer("12+30=").input_ids], GREEDY)
    assert [o.outputs[0].finish_reason for o in outputs] == ["refused", "stop"]
    assert "128 tokens" in (outputs[0].error or "")
    assert "at most 127" in (outputs[0].error or "")
    assert outputs[1].outputs[0].text == "42"
    with pytest.raises(ValueError, match="128 tokens"):
        llm.stream([97] * 128, GREEDY)


def test_the_numbers_of_prompts_and_params_must_agree(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 .*1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY])


def test_a_stop_string_cuts_the_text_and_is_the_stop_reason(llm: LLM) -> None:
    full = llm.generate("rev abcdefgh=", GREEDY)[0].outputs[0].text
    output = llm.generate("rev abcdefgh=", SamplingParams(temperature=0.0, max_tokens=16, stop=full[3:5]))[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (full[:3], "stop", full[3:5])


def test_text_buffered_for_a_stop_string_is_emitted_at_the_end(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, stop=["2x"])
    assert llm.generate("12+30=", params)[0].outputs[0].text == "42"
    assert "".join(llm.stream("12+30=", params)) == "42"


def test_an_error_in_the_middle_of_a_launch_leaves_later_answers_right(make_llm, monkeypatch):
    llm = make_llm(steps_per_launch=4, backend="eager")
    decode, calls = llm.model.decode, []

    def failing(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("in the middle")
        return decode(*arguments)

    monkeypatch.setattr(llm.model, "decode", failing)
    with pytest.raises(RuntimeError, match="in the middle"):
        llm.generate("rev abc=", GREEDY)
    assert_nothing_held(llm)
    assert llm.generate("rev abcdef=", GREEDY)[0].outputs[0].text == "fedcba"


@pytest.mark.parametrize("bad", [{"stop_token_ids": [2**40]}, {"logit_bias": {10**6: 1.0}}])
def test_one_bad_request_beside_a_good_one_raises_before_either_runs(llm: LLM, bad: dict) -> None:
    with pytest.raises(RequestError, match="258"):
        llm.generate(["12+30=", "12+30="], [GREEDY, SamplingParams(temperature=0.0, **bad)])
    assert_nothing_held(llm)


@pytest.mark.parametrize("temperature", [1e-5, 1e-38, 1e-60])
def test_a_temperature_next_to_zero_is_greedy(llm: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=16, min_tokens=0)
    assert llm.generate("12+30=", params)[0].outputs[0].text == "42"


def test_a_stop_token_ends_the_output_and_is_not_in_the_text(llm: LLM) -> None:
    full = llm.generate("rev abcdefgh=", GREEDY)[0].outputs[0]
    stop = full.token_ids[2]
    params = SamplingParams(temperature=0.0, max_tokens=16, stop_token_ids=[stop])
    output = llm.generate("rev abcdefgh=", params)[0].outputs[0]
    assert (output.text, output.token_ids, output.stop_reason) == (full.text[:2], full.token_ids[:3], stop)


def test_min_tokens_delay_the_end(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=9)
    output = llm.generate("12+30=", params)[0].outputs[0]
    assert len(output.token_ids) > 9
    assert output.token_ids[:2] == llm.generate("12+30=", GREEDY)[0].outputs[0].token_ids[:2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_mask_ignored_eos_tokens_as_vllm_does(llm: LLM, temperature: float) -> None:
    (eos,) = llm.engine.rules.eos_token_ids
    bias = {eos: 1e4}  # nothing else is ever sampled where it may be
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=9, min_tokens=5, ignore_eos=True, logit_bias=bias
    )
    tokens = llm.generate("12+30=", params)[0].outputs[0].token_ids
    assert [token == eos for token in tokens] == [False] * 5 + [True] * 4
    ending = llm.generate("12+30=", replace(params, ignore_eos=False))[0].outputs[0].token_ids
    assert ending == tokens[:6]
    with pytest.raises(RequestError, match="allowed_token_ids"):
        llm.generate("12+30=", replace(params, allowed_token_ids=[eos]))


def test_logprobs_name_the_most_likely_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=3)
    output = llm.generate("12+30=", params)[0].outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    for token, entries in zip(output.token_ids, output.logprobs, strict=True):
        assert len(entries) == 3
        assert entries[token].rank == 1
        assert [e.rank for e in entries.values()] == [1, 2, 3]
        assert entries[token].logprob == max(e.logprob for e in entries.values()) <= 0
    total = sum(e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)


def test_logit_bias_forces_a_token(llm: LLM) -> None:
    token = llm.tokenizer("x").input_ids[0]
    params = SamplingParams(temperature=0.0, max_tokens=4, logit_bias={token: 1000.0})
    assert llm.generate("12+30=", params)[0].outputs[0].token_ids == [token] * 4


def test_an_interrupt_leaves_the_engine_clean(make_llm: MakeLLM) -> None:
    llm = make_llm()
    expected = tokens(llm.generate(["rev abc=", "12+30="], GREEDY))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))

    def generate_forever() -> None:
        timer.start()
        while True:
            params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
            llm.generate(random_prompts(20, 20, seed=6), params)

    with pytest.raises(KeyboardInterrupt):
        generate_forever()
    timer.join()
    assert_nothing_held(llm)
    assert tokens(llm.generate(["rev abc=", "12+30="], GREEDY)) == expected


def test_a_common_prefix_is_prefilled_once(make_llm: MakeLLM) -> None:
    head = random_prompts(1, 1, seed=9)[0] * 64
    prompts = [head + tail for tail in random_prompts(8, 6, seed=10)]
    shared, plain = make_llm(max_batch_size=8), make_llm(max_batch_size=8, prefix_cache=False)
    assert tokens(shared.generate(prompts, GREEDY)) == tokens(plain.generate(prompts, GREEDY))
    assert plain.stats.prefilled_tokens == sum(len(p) - 1 for p in prompts)
    assert shared.stats.prefilled_tokens == 64 + sum(len(p) - 1 - 64 for p in prompts)
    assert_nothing_held(shared)


def assert_near_tie(llm: LLM, prompt: list[int], params: SamplingParams, given: list[int], expected: list[int]) -> None:
    """Check that two answers part where two tokens are as good as equally likely."""
    wide = replace(params, logprobs=20)
    entries = llm.generate([prompt], wide)[0].outputs[0].logprobs
    assert entries is not None
    place = next(i for i, (a, b) in enumerate(zip(given, expected, strict=True)) if a != b)
    at = entries[place]
    assert at[expected[place]].logprob - at[given[place]].logprob < 1e-4, (prompt, place)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory use from /proc")
def test_a_long_run_gives_every_request_the_answer_it_gets_alone_and_leaks_nothing(make_llm: MakeLLM) -> None:
    rng = random.Random(11)
    prompts = random_prompts(2000, 40, seed=11)
    params = [SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 24), ignore_eos=True) for _ in prompts]
    rows, pages = 8, 5 * 16  # pages for five rows at full length
    crowded = make_llm(max_batch_size=rows, page_size=4, max_sequence_length=64, total_num_pages=pages)
    alone = make_llm(max_batch_size=1, max_sequence_length=64, prefix_cache=False)
    together = tokens(crowded.generate(prompts[:1000], params[:1000]))
    warmed_up = resident_bytes()
    together += tokens(crowded.generate(prompts[1000:], params[1000:]))
    assert resident_bytes() - warmed_up < 4 * 2**20
    assert crowded.num_preemptions > 0
    assert_nothing_held(crowded)
    for prompt, request, given, expected in zip(
        prompts, params, together, tokens(alone.generate(prompts, params)), strict=True
    ):
        if given != expected:
            assert_near_tie(alone, prompt, request, given, expected)
