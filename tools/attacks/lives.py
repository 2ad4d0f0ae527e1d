"""Engines with random settings and random requests: an output does not depend on what else the engine serves.

Every output is also checked against another implementation's logits and the documented parameters; see `judge`.
"""

from __future__ import annotations

import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attacks.judge import Judge, form_of
from attacks.trial import Wrong
from graphdecode import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from graphdecode.errors import ArgumentError
from graphdecode.models import resolve_model_path

_WORDS = ["417+385=", "rev oceanic=", "sort zebra=", "12+30=", "999+1=", "rev a=", "417+385=rev oceanic=sort zebra="]
_LENGTHS = [96, 128, 200]  # of a prompt with its output
KINDS = (*["plain"] * 5, *["int8", "fp8", "gguf"] * 2, "ranks", "few bits", "transformers")
_ROUNDS = 2
_LEAVING_SHARE = 0.01  # of pieces after which a stream is closed


class LifeCounts(NamedTuple):
    """Counts of comparisons.

    Attributes:
        lives: engines.
        answers: outputs of requests that ran together with others.
        tokens: compared with another implementation's logits.
        unsure: those of them after a key or value that float32 may round the other way in 8 bits.
    """

    lives: int = 0
    answers: int = 0
    tokens: int = 0
    unsure: int = 0


class Life:
    """One engine with random settings and requests.

    Attributes:
        kind: of model and cache.
    """

    def __init__(self, seed: int) -> None:
        self.kind = random.Random(f"kind {seed}").choice(KINDS)
        self.counts = LifeCounts()
        rng = self._rng = random.Random(f"life {seed}")
        rows, self._length = rng.randrange(1, 9), rng.choice(_LENGTHS)
        self.settings: dict[str, Any] = {
            "device": "cpu",
            "batch_invariant": rng.random() < 0.3,  # then outputs are compared bit for bit
            "max_batch_size": rows,
            "max_sequence_length": self._length,
            "page_size": rng.choice([1, 2, 7, 16, 64]),
            "batch_sizes": rng.choice(["auto", [rows], sorted({1, rows, max(rows // 2, 1)})]),
            "prefix_cache": rng.random() < 0.7,
            "max_prefill_tokens": rng.choice(["auto", 1, 5, 33]),
            "backend": rng.choice(["recorded", "eager"]),
            "config": {"loop": {"steps_per_launch": rng.choice([1, 1, 2, 5])}},
        }
        if rng.random() < 0.4:
            self.settings |= {"speculation": "ngram", "num_tokens": rng.choice(["auto", 1, 3])}
        of_kind: dict[str, dict[str, Any]] = {
            "few bits": {"quantize": rng.choice(["int8", "int4", "fp8"]), "batch_invariant": True},
            "int8": {"kv_cache_dtype": "int8"},
            "fp8": {"kv_cache_dtype": "fp8"},
            "ranks": {"tensor_parallel_size": 2},
            "gguf": {"tokenizer": "demo"},
            "transformers": {"model_impl": "transformers", "batch_invariant": False},
        }
        self.settings |= of_kind.get(self.kind, {})
        pages = -(-self._length // self.settings["page_size"])
        self.settings["total_num_pages"] = rng.choice(["auto", pages, pages + 3, 2 * pages])
        self._requests = [self._request() for _ in range(rng.randrange(16, 32))]

    def _request(self) -> tuple[str, SamplingParams]:
        """Return a prompt with independent random parameters."""
        rng = self._rng

        def sometimes(share: float, value: Any, otherwise: Any = None) -> Any:
            return value if rng.random() < share else otherwise

        prompt = sometimes(0.5, rng.choice(_WORDS), "".join(rng.choices("abcxyz 0123456789+=", k=rng.randrange(1, 60))))
        fields: dict[str, Any] = {
            "temperature": rng.choice([0.0, 0.0, 0.7, 1.3, 2.5]),
            "seed": rng.randrange(2**31),
            "n": sometimes(0.15, rng.randrange(2, 5), 1),
            "top_k": sometimes(0.3, rng.randrange(1, 12), 0),
            "top_p": sometimes(0.3, rng.choice([0.3, 0.8, 0.99]), 1.0),
            "min_p": sometimes(0.2, rng.choice([0.05, 0.3]), 0.0),
            "repetition_penalty": sometimes(0.3, rng.choice([0.8, 1.2, 1.7]), 1.0),
            "presence_penalty": sometimes(0.2, rng.choice([-1.0, 1.5]), 0.0),
            "frequency_penalty": sometimes(0.2, rng.choice([-0.5, 0.5]), 0.0),
            "logit_bias": sometimes(0.2, {rng.randrange(259): rng.choice([-100.0, -2.0, 3.0]) for _ in range(3)}),
            "max_tokens": sometimes(0.9, rng.randrange(1, 110)),
            "logprobs": sometimes(0.5, rng.choice([0, 1, 5, 20])),
            "prompt_logprobs": sometimes(0.2, rng.choice([0, 3])),
            "ignore_eos": rng.random() < 0.7,
            "skip_special_tokens": rng.random() < 0.8,
            "include_stop_str_in_output": rng.random() < 0.3,
        }
        if rng.random() < 0.12:
            least = rng.randrange(0, 6)
            form = form_of(rng.choice(["0123456789", "abcxyz", "ab01"]), least, least + rng.randrange(1, 30))
            fields |= {"structured_outputs": StructuredOutputsParams(regex=form), "n": 1, "logit_bias": None}
        else:
            fields |= {
                "stop": sometimes(0.2, rng.choice(["0", ["e", "az"], ["=", "12+"]])),
                "stop_token_ids": sometimes(0.2, rng.sample(range(48, 123), 3)),
                "bad_words": sometimes(0.2, rng.choice([["8"], ["ab", "1 2"], ["00", "e", "a b"]])),
                "allowed_token_ids": sometimes(0.1, sorted({*rng.sample(range(32, 127), 40), 257})),
                "min_tokens": sometimes(0.2, rng.randrange(0, (fields["max_tokens"] or 20) + 1), 0),
            }
        return prompt, SamplingParams(**fields)

    def run(self) -> None:
        """Run all requests, and check their outputs.

        Raises:
            Wrong: an output is wrong or differs from that of the request alone, or pages are not freed.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = _as_gguf(Path(folder)) if self.kind == "gguf" else resolve_model_path("demo")
            try:
                self._run(path)
            except Wrong as error:
                raise Wrong(f"{error}; {self.settings}") from error

    def _run(self, path: Path) -> None:
        torch.set_num_threads(self._rng.choice([1, 1, 2, 3]))
        try:
            llm = LLM(str(path), **self.settings)
        except ArgumentError as error:
            raise Wrong(f"the settings are refused: {error}") from error
        with llm:
            alone: list[RequestOutput] = []
            if self.settings["batch_invariant"]:
                alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt, params in self._requests]
            given = [each for _ in range(_ROUNDS) for each in self._together(llm)]
            while llm.engine.has_work:
                llm.step()
            if llm.cache.pool.used or llm.num_waiting:
                raise Wrong(f"{llm.cache.pool.used} pages and {llm.num_waiting} requests are left over")
        torch.set_num_threads(1)
        answers = len(given)
        if alone:
            for number, output in given:
                self._compare(number, output, alone[number])
            given = list(enumerate(alone))
        self.counts = LifeCounts(1, answers)
        if self.kind != "few bits":
            eos = () if self.kind == "gguf" else (257,)  # the file has none
            judge = Judge(path, self.settings.get("kv_cache_dtype", "auto"), self._length, eos)
            for number, output in given:
                judge.compare(output, self._requests[number][1])
            judge.compare_mean()
            self.counts = LifeCounts(1, answers, judge.tokens, judge.unsure)

    def _compare(self, number: int, output: RequestOutput, alone: RequestOutput) -> None:
        """Compare an output with that of the request alone, bit for bit."""
        for given, expected in zip(output.outputs, alone.outputs, strict=True):
            same = (given.token_ids, given.text) == (expected.token_ids, expected.text)
            if not same or given.cumulative_logprob != expected.cumulative_logprob:
                raise Wrong(f"{self._requests[number]} gives {given}, alone {expected}")

    def _together(self, llm: LLM) -> list[tuple[int, RequestOutput]]:
        """Run all requests at once, as streams, threads and lists, some closed early; return the finished outputs."""
        torch.set_num_threads(self._rng.choice([1, 2, 3]))
        rng, finished = self._rng, list[tuple[int, RequestOutput]]()
        order = list(range(len(self._requests)))
        rng.shuffle(order)
        cut = rng.randrange(len(order) + 1)
        streamed = [number for number in order[:cut] if self._requests[number][1].n == 1]
        streams = {number: llm.stream(*self._requests[number]) for number in streamed}

        def generate(numbers: list[int]) -> list[tuple[int, RequestOutput]]:
            prompts, params = zip(*(self._requests[number] for number in numbers), strict=True)
            return list(zip(numbers, llm.generate(list(prompts), list(params), use_tqdm=False), strict=True))

        others = [number for number in order if number not in streams]
        with ThreadPoolExecutor(2) as threads:
            lists = [threads.submit(generate, part) for part in (others[::2], others[1::2]) if part]
            while streams:
                number = rng.choice(list(streams))
                if rng.random() < _LEAVING_SHARE:
                    streams.pop(number).close()
                elif next(streams[number], None) is None:
                    finished.append((number, streams.pop(number).request))
            return finished + [each for part in lists for each in part.result()]


def _as_gguf(folder: Path) -> Path:
    """Return the demo model as a GGUF file."""
    import transformers
    from gguf_checkpoints import write

    model = transformers.LlamaForCausalLM.from_pretrained(resolve_model_path("demo"), dtype=torch.float32)
    return write(model, "llama", folder / "demo.gguf")
