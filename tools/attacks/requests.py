"""Fuzzing of prompts and parameters: they must not change the outputs of other requests in the batch."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from attacks.mutation import hostile_value
from attacks.trial import Wrong
from graphdecode import LLM, GraphdecodeError, SamplingParams
from graphdecode.errors import shown

_NEIGHBOURS = ["rev oceanic=", "12+30="]
_GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
_VALUES: list[Any] = [
    np.float32(0.5), np.int64(3), np.array([1, 2]), torch.tensor([5, 6]), torch.tensor(1.5), Fraction(1, 3), 1j,
    b"abc", bytearray(b"a"), object(), int, 10**5000, "rev abc=", "417+385=", [52, 49, 61], [258], [259], range(5),
    {1, 2}, {"prompt": "12+30="}, {"prompt_token_ids": [5]}, {"prompt": "a", "b": 1}, ("a", "b"), iter([1]),
    "\ufffe", "a" * 47, "a" * 48, "0" * 5000,
]  # fmt: skip
_FIELDS: dict[str, list[Any]] = {
    "n": [1, 2, 7, 1024, 1025],
    "temperature": [0, 1e-6, 1e-5, 0.1, 1.0, 100.0, 1e30],
    "top_k": [-1, 0, 1, 5, 2**31 - 1],
    "top_p": [1e-9, 0.1, 1.0],
    "min_p": [0.0, 0.5, 1.0],
    "seed": [None, 0, -(2**63), 2**63 - 1],
    "repetition_penalty": [1e-3, 0.5, 1.5, 1e3],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "logit_bias": [
        {},
        {0: 1e30, 1: -1e30},
        {258: 100},
        {259: 1},
        {2**40: 1},
        dict.fromkeys(range(64), -100.0),
        {-1: 0},
    ],
    "stop": ["a", ["8", "0"], ["a" * 256] * 256, ["x"] * 257, "\x00", "8" * 257],
    "stop_token_ids": [[1], [258], [259], [2**31], list(range(7)), list(range(8)), [56]],
    "max_tokens": [None, 1, 5, 10**9, 10**30],
    "min_tokens": [0, 3, 10**9],
    "logprobs": [None, 0, 20, 21],
    "prompt_logprobs": [None, 0, 20, 21],
    "truncate_prompt_tokens": [None, -1, 1, 3, 10**9],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
    "include_stop_str_in_output": [True, False],
    "detokenize": [True, False],
    "allowed_token_ids": [[56, 48, 50, 257], [0], [], [259], list(range(259))],
    "bad_words": [["8"], [""], ["a"] * 100],
}


class _Served:
    """A warm engine, and the outputs of two other requests alone."""

    def __init__(self) -> None:
        self.llm = LLM("demo", device="cpu", max_batch_size=4, max_sequence_length=48, page_size=4)
        self.alone = self.answers()

    def answers(self) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in self.llm.generate(_NEIGHBOURS, _GREEDY, use_tqdm=False)]

    def beside(self, prompt: Any, params: Any) -> Any:
        """Run a request while two others are streamed; return its output, or raise its refusal."""
        streams = [self.llm.stream(text, _GREEDY) for text in _NEIGHBOURS]
        for stream in streams:
            next(stream)
        refusal, outputs = None, []
        try:
            outputs = self.llm.generate(prompt, params, use_tqdm=False)
        except GraphdecodeError as error:
            refusal = error
        for stream in streams:
            for _ in stream:
                pass
        given = [stream.request.outputs[0].token_ids for stream in streams]
        if given != self.alone or self.answers() != self.alone:
            raise Wrong(
                f"other requests get {given} instead of {self.alone} while {prompt!r:.200} {params!r:.400} runs"
            )
        if self.llm.cache.pool.used or self.llm.num_waiting:
            raise Wrong(f"pages or requests are left over after {prompt!r:.200} {params!r:.400}")
        if refusal is not None:
            raise refusal
        return outputs


class PromptAttack:
    """Prompts of any type; an output is that of the same tokens alone."""

    name = "prompts"

    def __init__(self) -> None:
        self._served = _Served()

    def run(self, rng: random.Random, folder: object) -> None:

        def value() -> Any:
            return rng.choice(_VALUES) if rng.random() < 0.5 else hostile_value(rng)

        kind = rng.randrange(4)
        prompt = value()
        if kind == 1:
            prompt = [value() for _ in range(rng.randrange(1, 4))]
        elif kind == 2:
            prompt = {rng.choice(["prompt", "prompt_token_ids", "x"]): value()}
        elif kind == 3:
            prompt = [rng.choice([0, 5, 56, 258, 259, -1, 2**40]) for _ in range(rng.randrange(60))]
        outputs = self._served.beside(prompt, _GREEDY)
        errors = [output.error for output in outputs if output.error is not None]
        for output in outputs:
            if output.error is None:
                [again] = self._served.llm.generate([output.prompt_token_ids], _GREEDY, use_tqdm=False)
                if again.outputs[0].token_ids != output.outputs[0].token_ids:
                    raise Wrong(f"{prompt!r:.300} has another output alone")
        if errors:
            raise GraphdecodeErrorOfOutput(errors[0])


class GraphdecodeErrorOfOutput(GraphdecodeError, ValueError):
    """A prompt of several has failed with an error."""


class ParamsAttack:
    """Parameters of any value; accepted ones are obeyed, and give the same output alone."""

    name = "SamplingParams"

    def __init__(self) -> None:
        self._served = _Served()

    def run(self, rng: random.Random, folder: object) -> None:
        fields: dict[str, Any] = {}
        for name in rng.sample(sorted(_FIELDS), rng.randrange(1, 5)):
            hostile = hostile_value(rng) if rng.random() < 0.5 else rng.choice(_VALUES)
            fields[name] = hostile if rng.random() < 0.35 else rng.choice(_FIELDS[name])
        params = SamplingParams(**fields)
        outputs = self._served.beside("417+385=", params)
        again = self._served.llm.generate("417+385=", params, use_tqdm=False)
        for output, other in zip(outputs, again, strict=True):
            if output.error is not None:
                raise GraphdecodeErrorOfOutput(output.error)
            if len(output.outputs) != params.n:
                raise Wrong(f"{len(output.outputs)} outputs for {fields!r:.500}")
            for answer, repeated in zip(output.outputs, other.outputs, strict=True):
                self._check(params, answer)
                if params.seed is not None and answer.token_ids != repeated.token_ids:
                    raise Wrong(f"the same seed gives another output: {fields!r:.500}")

    @staticmethod
    def _check(params: SamplingParams, answer: Any) -> None:
        tokens, fields = answer.token_ids, shown(params)
        if any(not 0 <= token < 259 for token in tokens):
            raise Wrong(f"tokens {tokens} out of the vocabulary for {fields}")
        if params.max_tokens is not None and len(tokens) > params.max_tokens:
            raise Wrong(f"{len(tokens)} tokens for {fields}")
        if answer.finish_reason not in ("stop", "length", "error"):
            raise Wrong(f"ended by {answer.finish_reason} for {fields}")
        inside = answer.text if params.detokenize and not params.include_stop_str_in_output else ""
        if not params.min_tokens and any(stop in inside for stop in params.stop_strings):
            raise Wrong(f"a stop text is in {answer.text!r} for {fields}")
