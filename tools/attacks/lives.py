"""Engines of random settings with random lives: whatever comes and goes beside it, a request's answer is its own."""

from __future__ import annotations

import random
import threading
from typing import Any

import torch

from attacks.trial import Wrong
from graphdecode import LLM, SamplingParams
from graphdecode.errors import ArgumentError

_WORDS = ["417+385=", "rev oceanic=", "sort zebra=", "12+30=", "999+1=", "rev a=", "417+385=rev oceanic=sort zebra="]
_MOST_TOKENS = 24


class Life:
    """One engine, its settings drawn by a seed, and what is done to it.

    Args:
        seed: of all draws.
    """

    def __init__(self, seed: int) -> None:
        rng = self._rng = random.Random(f"life {seed}")
        rows = rng.randrange(1, 9)
        self.settings: dict[str, Any] = {
            "device": "cpu",
            "batch_invariant": True,  # the promise that is kept bit for bit
            "max_batch_size": rows,
            "max_sequence_length": rng.choice([64, 96, 128]),
            "page_size": rng.choice([1, 2, 7, 16, 64]),
            "batch_sizes": rng.choice(["auto", [rows], sorted({1, rows, max(rows // 2, 1)})]),
            "prefix_cache": rng.random() < 0.7,
            "max_prefill_tokens": rng.choice(["auto", 1, 5, 33]),
            "backend": rng.choice(["recorded", "eager"]),
            "config": {"loop": {"steps_per_launch": rng.choice([1, 1, 2, 5])}},
        }
        if rng.random() < 0.3:
            self.settings["quantize"] = "int8"
        pages = -(-self.settings["max_sequence_length"] // self.settings["page_size"])
        self.settings["total_num_pages"] = rng.choice(["auto", pages, pages + 3, 2 * pages])
        self._requests = [self._request() for _ in range(rng.randrange(6, 14))]

    def _request(self) -> tuple[str, SamplingParams]:
        rng = self._rng
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.7, 1.3]), seed=rng.randrange(2**31), ignore_eos=rng.random() < 0.4,
            max_tokens=rng.randrange(1, _MOST_TOKENS), top_k=rng.choice([0, 3]), top_p=rng.choice([1.0, 0.8]),
            repetition_penalty=rng.choice([1.0, 1.2]), frequency_penalty=rng.choice([0.0, 0.5]),
            logprobs=rng.choice([None, 0, 3]), stop=rng.choice([None, "0", ["e", "az"]]),
            min_tokens=rng.choice([0, 0, 1]), logit_bias=rng.choice([None, {48: 2.0}]),
        )  # fmt: skip
        return rng.choice(_WORDS), params

    def run(self) -> int:
        """Live, and return how many answers were compared.

        Raises:
            Wrong: one is not what the request gets alone, or something is left behind.
        """
        torch.set_num_threads(self._rng.choice([1, 1, 2, 3]))
        try:
            llm = LLM("demo", **self.settings)
        except ArgumentError as error:
            raise Wrong(f"{self.settings} is refused: {error}") from error
        with llm:
            alone = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0] for prompt, params in self._requests]
            compared = 0
            for _ in range(3):
                torch.set_num_threads(self._rng.choice([1, 2, 3]))
                for number, answer in self._together(llm):
                    compared += 1
                    expected = alone[number]
                    same = (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
                    if not same or answer.cumulative_logprob != expected.cumulative_logprob:
                        raise Wrong(f"{self._requests[number]} gives {answer}, alone {expected}: {self.settings}")
            while llm.engine.has_work:
                llm.step()
            if llm.cache.pool.used or llm.num_waiting:
                raise Wrong(f"{llm.cache.pool.used} pages and {llm.num_waiting} requests are left: {self.settings}")
        return compared

    def _together(self, llm: LLM) -> list[tuple[int, Any]]:
        """Serve all requests at once, by streams, threads and lists, some left early; return what was finished."""
        rng, finished = self._rng, list[tuple[int, Any]]()
        order = list(range(len(self._requests)))
        rng.shuffle(order)
        cut = rng.randrange(len(order) + 1)
        streams = {number: llm.stream(*self._requests[number]) for number in order[:cut]}

        def generate(numbers: list[int]) -> None:
            prompts, params = zip(*(self._requests[number] for number in numbers), strict=True)
            outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
            finished.extend((number, output.outputs[0]) for number, output in zip(numbers, outputs, strict=True))

        parts = [order[cut:][start::2] for start in range(2)]
        threads = [threading.Thread(target=generate, args=(part,)) for part in parts if part]
        for thread in threads:
            thread.start()
        while streams:
            number = rng.choice(list(streams))
            if rng.random() < 0.05:
                streams.pop(number).close()
                continue
            if next(streams[number], None) is None:
                finished.append((number, streams.pop(number).request.outputs[0]))
        for thread in threads:
            thread.join()
        return finished
