"""Engines of random settings with random lives: whatever comes and goes beside it, a request's answer is its own.

Some requests ask for what the model alone decides; their answers are compared with a Llama in float64 as well, whose
keys and values are rounded as the cache rounds them.
"""

from __future__ import annotations

import random
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from attacks.trial import Wrong
from float64_model import Float64Model
from graphdecode import LLM, SamplingParams
from graphdecode.errors import ArgumentError
from graphdecode.models import resolve_model_path

_WORDS = ["417+385=", "rev oceanic=", "sort zebra=", "12+30=", "999+1=", "rev a=", "417+385=rev oceanic=sort zebra="]
_MOST_TOKENS = 24
_KINDS = ("plain", "plain", "int8", "fp8", "gguf", "ranks")
# of a log-probability: float32 beside float64; 1e-6 of a key moves one by some hundredths where it rounds to the other
# neighbour in 8 bits
_APART = {"plain": 1e-4, "gguf": 1e-4, "ranks": 1e-4, "int8": 0.1, "fp8": 0.1}
_PLAIN_REQUESTS = 3


class Life:
    """One engine, its settings drawn by a seed, and what is done to it.

    Args:
        seed: of all draws.
    """

    def __init__(self, seed: int) -> None:
        self.kind = random.Random(f"kind {seed}").choice(_KINDS)
        self.tokens = 0  # that were compared with float64
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
        if rng.random() < 0.3 and self.kind == "plain":
            self.settings["quantize"] = "int8"
        if self.kind in ("int8", "fp8"):
            self.settings["kv_cache_dtype"] = self.kind
        elif self.kind == "ranks":
            self.settings["tensor_parallel_size"] = 2
        elif self.kind == "gguf":
            self.settings["tokenizer"] = "demo"
        pages = -(-self.settings["max_sequence_length"] // self.settings["page_size"])
        self.settings["total_num_pages"] = rng.choice(["auto", pages, pages + 3, 2 * pages])
        self._requests = [self._request() for _ in range(rng.randrange(6, 14))]
        letters = ["".join(rng.choices("abcxyz 0123456789+=", k=rng.randrange(1, 40))) for _ in range(_PLAIN_REQUESTS)]
        self._requests += [(text, self._plain()) for text in letters]

    def _plain(self) -> SamplingParams:
        """Return what leaves all to the model, so that it can be compared with another one."""
        return SamplingParams(
            temperature=0.0, max_tokens=self._rng.randrange(1, _MOST_TOKENS), ignore_eos=True, logprobs=0
        )

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
        with tempfile.TemporaryDirectory() as folder:
            path = _as_gguf(Path(folder)) if self.kind == "gguf" else resolve_model_path("demo")
            return self._run(path)

    def _run(self, path: Path) -> int:
        torch.set_num_threads(self._rng.choice([1, 1, 2, 3]))
        try:
            llm = LLM(str(path), **self.settings)
        except ArgumentError as error:
            raise Wrong(f"{self.settings} is refused: {error}") from error
        with llm:
            alone = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0] for prompt, params in self._requests]
            if "quantize" not in self.settings:
                exact = Float64Model(path, cache=self.settings.get("kv_cache_dtype", "auto"))
                for (prompt, _), answer in list(zip(self._requests, alone, strict=True))[-_PLAIN_REQUESTS:]:
                    self._compare(exact, llm.tokenizer(prompt).input_ids, answer)
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

    def _compare(self, exact: Float64Model, prompt: list[int], answer: Any) -> None:
        """Compare a greedy answer with float64, token by token, behind the tokens that it has itself."""
        expected = exact.log_probabilities([*prompt, *answer.token_ids])[len(prompt) - 1 :]
        for place, (token, entries) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            apart = max(
                abs(entries[token].logprob - float(expected[place, token])),
                float(expected[place].max() - expected[place, token]),  # another token is likelier
            )
            if apart > _APART[self.kind]:
                told = f"{apart:.3g} at token {place} of {answer.token_ids} behind {prompt}"
                raise Wrong(f"float64 is apart by {told}: {self.settings}")
            self.tokens += 1

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


def _as_gguf(folder: Path) -> Path:
    """Return the demo model as a file of GGUF."""
    import transformers
    from gguf_checkpoints import write

    model = transformers.LlamaForCausalLM.from_pretrained(resolve_model_path("demo"), dtype=torch.float32)
    return write(model, "llama", folder / "demo.gguf")
