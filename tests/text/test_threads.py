"""Many threads, one LLM: every answer is the one that its prompt gets alone."""

import random
import threading
import time
from collections.abc import Iterator

import pytest
from tqdm import tqdm

from graphdecode import LLM, BucketConfig, EngineConfig, SamplingParams
from graphdecode.engine.loading import load_engine
from graphdecode.text.detokenizer import Detokenizer

THREADS, ROUNDS = 16, 6


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = BucketConfig(max_batch_size=4, max_sequence_length=128, page_size=8, total_num_pages=40)
    with LLM("demo", config=config, dtype="float32", batch_invariant=True) as made:
        yield made


def jobs(seed: int) -> list[tuple[str, SamplingParams]]:
    rng = random.Random(seed)
    made = []
    for _ in range(ROUNDS):
        prompt = "".join(rng.choice("abcdefghij 0123456789+=") for _ in range(rng.randint(1, 40)))
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.9]),
            seed=rng.randrange(100),
            max_tokens=rng.randint(1, 30),
            ignore_eos=True,
            stop=rng.choice([None, "a", ["1", "zz"]]),
        )
        made.append((prompt, params))
    return made


def test_sixteen_threads_that_generate_and_stream_get_the_answers_they_get_alone(llm: LLM) -> None:
    expected = {
        (seed, index): llm.generate(prompt, params)[0].outputs[0].text
        for seed in range(THREADS)
        for index, (prompt, params) in enumerate(jobs(seed))
    }
    given: dict[tuple[int, int], str] = {}
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for index, (prompt, params) in enumerate(jobs(seed)):
                if (seed + index) % 3 == 0:
                    given[seed, index] = "".join(llm.stream(prompt, params))
                elif (seed + index) % 3 == 1:
                    given[seed, index] = llm.generate(prompt, params)[0].outputs[0].text
                else:  # one that leaves early stands between others
                    with llm.stream("sort zebra=", params) as left:
                        outputs = llm.generate([prompt, "12+30="], [params, params])
                        next(left, None)
                    given[seed, index] = outputs[0].outputs[0].text
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    assert given == expected
    assert llm.cache.pool.used == 0
    assert not llm.engine.has_work


def test_closing_ends_what_other_threads_wait_for_with_an_error() -> None:
    llm = LLM("demo", config=BucketConfig(max_batch_size=2, max_sequence_length=512))
    params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    begun = threading.Barrier(3)
    raised: list[str] = []

    def generate() -> None:
        begun.wait()
        try:
            llm.generate(["abc"] * 50, params)
        except RuntimeError as error:
            raised.append(str(error))

    def stream() -> None:
        pieces = llm.stream("abc", params)
        next(pieces)
        begun.wait()
        try:
            for _ in pieces:
                pass
        except RuntimeError as error:
            raised.append(str(error))

    threads = [threading.Thread(target=generate), threading.Thread(target=stream)]
    for thread in threads:
        thread.start()
    begun.wait()
    llm.close()
    for thread in threads:
        thread.join(120)
    assert raised == ["this LLM was closed"] * 2


def test_closing_in_the_middle_of_a_stream_is_an_error_and_not_its_end() -> None:
    llm = LLM("demo", config=BucketConfig(max_batch_size=2, max_sequence_length=128))
    pieces = llm.stream("abc", SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    next(pieces)
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM was closed"):
        list(pieces)


def test_an_answer_whose_text_cannot_be_made_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = ["abc", "rev oceanic=", "12+30="]
    expected = [output.outputs[0].text for output in llm.generate(prompts, params)]
    push = Detokenizer.push
    first: list[Detokenizer] = []

    def stumbling(self: Detokenizer, token_id: int) -> str | None:
        first.append(self)
        if self is first[0] and first.count(self) > 3:
            raise ValueError("half a character")
        return push(self, token_id)

    monkeypatch.setattr(Detokenizer, "push", stumbling)
    outputs = llm.generate(prompts, params)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert sorted(reasons) == ["error", "length", "length"]
    for output, text in zip(outputs, expected, strict=True):
        if output.outputs[0].finish_reason == "error":
            assert "half a character" in (output.error or "")
        else:
            assert output.outputs[0].text == text
    assert llm.cache.pool.used == 0


def test_a_finished_output_is_complete_in_every_thread(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last text is slow to come; another thread that waits for it must not be handed less."""
    params = SamplingParams(temperature=0.0, max_tokens=6)
    expected = llm.generate("417+385=", params)[0].outputs[0].text
    take = Detokenizer.take

    def slow(self: Detokenizer, final: bool = False) -> str:
        if final:
            time.sleep(0.05)
        return take(self, final)

    monkeypatch.setattr(Detokenizer, "take", slow)
    given: list[str] = []
    threads = [
        threading.Thread(target=lambda: given.append(llm.generate("417+385=", params)[0].outputs[0].text))
        for _ in range(4)
    ] + [threading.Thread(target=lambda: given.append("".join(llm.stream("417+385=", params)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert given == [expected] * 8


@pytest.mark.parametrize("work", ["generating", "loading"])
def test_without_a_bar_nothing_waits_for_the_lock_that_all_bars_share(llm: LLM, work: str) -> None:
    """Ctrl-C while another bar is made may leave it locked."""
    done = threading.Event()

    def run() -> None:
        if work == "generating":
            llm.generate("12+30=", use_tqdm=False)
        else:
            load_engine("demo", EngineConfig.of(None, device="cpu", max_batch_size=1), progress=False).close()
        done.set()

    with tqdm.get_lock():
        thread = threading.Thread(target=run)
        thread.start()
        in_time = done.wait(120)
    thread.join()
    assert in_time
