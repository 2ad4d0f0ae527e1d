"""`LLM`: prompts in, answers out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from graphdecode.cache import PagedKVCache
from graphdecode.config import BucketConfig
from graphdecode.engine.detokenizer import Detokenizer
from graphdecode.engine.interrupts import DeferredInterrupt
from graphdecode.engine.loading import load_runner
from graphdecode.engine.loop import EngineLoop, EngineStats
from graphdecode.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from graphdecode.engine.prompts import Prompt, as_prompt, as_prompts
from graphdecode.engine.sampling_params import SamplingParams
from graphdecode.engine.scheduler import Scheduler
from graphdecode.engine.sequence import Sequence
from graphdecode.engine.stream import Stream
from graphdecode.graphs import GraphManager
from graphdecode.kernels.sampling.sampling_slots import MAX_STOP_IDS
from graphdecode.models import Decoder, load_tokenizer, resolve_model_path

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, as in SplitMix64


class LLM:
    """A model that generates text through captured graphs.

    Args:
        model: a Hugging Face checkpoint folder, a repository id, or `"demo"`.
        config: capacity, buckets and capture; a `BucketConfig`, or the path of a bucket configuration file.
        device: `"auto"` means CUDA where there is one, else the CPU.
        dtype: of weights and cache; `"auto"` takes the checkpoint's where the device can compute in it.
        seed: of the requests that bring none.
        prefix_cache: reuse the pages of prompts that begin alike.
        quantize: `"int8"` for 8-bit weights on a CPU.
        batch_invariant: a request's tokens and log-probabilities have the same bits alone and in any company, bucket
            and row, however its prompt is cut, shared or recomputed. Prefill is slower; on a CPU it needs a C compiler.
        progress: show bars on standard error while loading and capturing.

    Raises:
        ValueError: the model, the configuration, the device or the dtype cannot be used; the message says why.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        config: BucketConfig | str | Path | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        seed: int = 0,
        prefix_cache: bool = True,
        quantize: str | None = None,
        batch_invariant: bool = False,
        progress: bool = False,
    ) -> None:
        if config is None or isinstance(config, BucketConfig):
            self.config = config or BucketConfig()
        else:
            self.config = BucketConfig.load(config)
        path = resolve_model_path(model)
        self.tokenizer: Any = load_tokenizer(path)
        self._runner = load_runner(
            path,
            self.config,
            device=device,
            dtype=dtype,
            prefix_cache=prefix_cache,
            quantize=quantize,
            batch_invariant=batch_invariant,
            progress=progress,
        )
        self.model: Decoder = self._runner.model
        self.capacity = self._runner.capacity
        scheduler = Scheduler(
            self._runner.cache,
            max_batch_size=self.config.max_batch_size,
            prefill_budget=self._runner.prefill_budget,
        )
        self._loop = EngineLoop(scheduler, self._runner, self.tokenizer.backend_tokenizer)
        self._seed = seed
        self._request_ids = itertools.count()
        self._sequence_ids = itertools.count()
        self._closed = False
        self.graphs.capture(progress=progress)
        self._runner.buffers.freeze()

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.model.device

    @property
    def graphs(self) -> GraphManager:
        """The captured graphs of the decode step, one a bucket."""
        return self._runner.graphs

    @property
    def stats(self) -> EngineStats:
        """Counts since the engine was made."""
        return self._loop.stats

    @property
    def num_preemptions(self) -> int:
        """How often a sequence gave its pages back for others and was recomputed."""
        return self._loop.scheduler.num_preemptions

    @property
    def num_waiting(self) -> int:
        """Sequences that have no row yet."""
        return len(self._loop.scheduler.waiting)

    @property
    def cache(self) -> PagedKVCache:
        """The key-value cache, whose pool can be asked for free and used pages."""
        return self._loop.scheduler.cache

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer some prompts, batched continuously.

        Args:
            prompts: a text, a list of token ids, a dict with either as `prompt` or `prompt_token_ids`, or a list of
                these.
            sampling_params: for all prompts, or one for each; None means the defaults.
            use_tqdm: show a progress bar on standard error where that is a terminal.

        Returns:
            One output for each prompt, in their order. A prompt that can never fit comes back with `error` set and
            `finish_reason` "refused", and the others are answered.

        Raises:
            ValueError: what was given is no prompt, or the numbers of prompts and parameters differ.
        """
        self._check_open()
        items = as_prompts(prompts)
        params = _as_params(sampling_params, len(items))
        encoded = [self._encode(prompt) for prompt in items]
        groups = [self._make_request(item, ids, p) for item, ids, p in zip(items, encoded, params, strict=True)]
        sequences = [sequence for _, group in groups for sequence in group]
        bar = tqdm(
            total=len(sequences), desc="generating", unit="answer", leave=False, disable=None if use_tqdm else True
        )
        began = self.stats.finished_answers
        try:
            for sequence in sequences:
                self._loop.add(sequence)
            with DeferredInterrupt() as interrupt:
                for sequence in sequences:
                    while not sequence.finished:
                        self._loop.step()
                        interrupt.check()
                        bar.update(min(self.stats.finished_answers - began, len(sequences)) - bar.n)
        except BaseException:
            self._abort(sequences)
            raise
        finally:
            bar.close()
        return [request for request, _ in groups]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, refuse: str = "raise") -> Stream:
        """Answer one prompt, piece by piece; pieces never split a character or show part of a stop string.

        The request joins the batch at once. Several streams may be read in turn: they run side by side.

        Args:
            prompt: a text, a list of token ids, or a dict with either, as for `generate`.
            sampling_params: with `n` 1.
            refuse: what to do with a prompt that can never fit: `"raise"`, or `"return"` an empty stream whose
                `request.error` says why.

        Raises:
            ValueError: what was given is no prompt or can never fit, or `n` is not 1.
        """
        self._check_open()
        if isinstance(sampling_params, SequenceOf):
            raise ValueError(f"a stream has one prompt and one SamplingParams, got a {type(sampling_params).__name__}")
        (params,) = _as_params(sampling_params, 1)
        prompt = as_prompt(prompt)
        if params.n != 1:
            raise ValueError(f"a stream has one answer: n must be 1, got {params.n}")
        request, sequences = self._make_request(prompt, self._encode(prompt), params)
        if request.error is not None and refuse == "raise":
            raise ValueError(request.error)
        for sequence in sequences:
            self._loop.add(sequence)
        return Stream(request, sequences[0] if sequences else None, self.step, self._loop.abort)

    def close(self) -> None:
        """Release graphs and buffers; the engine cannot be used afterwards."""
        if not self._closed:
            self._closed = True
            self._loop.abort_all()
            self._runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this LLM was closed")

    def step(self) -> None:
        """Do one round of the engine: what `generate` and streams do until their answers are there.

        For callers that hand in streams and drive the engine themselves. Ctrl-C waits for the end of the round.
        """
        with DeferredInterrupt():
            self._loop.step()

    def _abort(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            self._loop.abort(sequence)

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt, verbose=False).input_ids
            if not ids and self.tokenizer.bos_token_id is not None:
                ids = [self.tokenizer.bos_token_id]
            return list(ids)
        vocab_size = self.model.config.vocab_size
        wrong = [token for token in prompt if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(f"token ids must be in 0..{vocab_size - 1}, got {wrong[:5]}")
        return prompt

    def _refusal(self, ids: list[int], params: SamplingParams) -> str | None:
        if not ids:
            return "the prompt is empty, and the model has no beginning-of-sequence token to start from"
        if len(ids) >= self.capacity.token_limit:
            return (
                f"the prompt has {len(ids)} tokens; with one token to generate, at most "
                f"{self.capacity.token_limit - 1} fit (max_sequence_length {self.capacity.max_sequence_length}, "
                f"{self.capacity.total_num_pages} pages of {self.config.page_size} tokens)"
            )
        stop_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.model.config.eos_token_ids)}
        if len(stop_ids) > MAX_STOP_IDS:
            return (
                f"at most {MAX_STOP_IDS} tokens can end an answer, the model's and stop_token_ids are {len(stop_ids)}"
            )
        beyond = [token for token in params.stop_token_ids or () if token >= self.model.config.vocab_size]
        if beyond:
            return f"stop_token_ids names {beyond}, the vocabulary ends at {self.model.config.vocab_size - 1}"
        too_large = [i for i in (params.logit_bias or {}) if i >= self.model.config.vocab_size]
        if too_large:
            return f"logit_bias names tokens {too_large}, the vocabulary ends at {self.model.config.vocab_size - 1}"
        return None

    def _make_request(
        self, prompt: str | list[int], ids: list[int], params: SamplingParams
    ) -> tuple[RequestOutput, list[Sequence]]:
        request_id = next(self._request_ids)
        outputs = [CompletionOutput(index) for index in range(params.n)]
        text = prompt if isinstance(prompt, str) else None
        request = RequestOutput(request_id, text, ids, outputs, RequestMetrics(time.perf_counter()))
        request.error = self._refusal(ids, params)
        if request.error is not None:
            for output in outputs:
                output.finish_reason = "refused"
            return request, []
        seed = _mix(self._seed, request_id) if params.seed is None else params.seed
        sequences = [
            Sequence(
                sequence_id=next(self._sequence_ids),
                token_ids=list(ids),
                params=params,
                detokenizer=Detokenizer(
                    self.tokenizer.backend_tokenizer,
                    params.stop_strings,
                    params.skip_special_tokens,
                    params.min_tokens,
                ),
                seed=seed if output.index == 0 else _mix(seed, output.index),
                max_length=min(len(ids) + params.max_tokens, self.capacity.token_limit),
                eos_token_ids=self.model.config.eos_token_ids,
                output=output,
                request=request,
            )
            for output in outputs
        ]
        return request, sequences


def _mix(seed: int, index: int) -> int:
    """Derive a seed from another, as a signed 64-bit integer: a Weyl step of SplitMix64 (Steele et al., 2014)."""
    mixed = (seed + (index + 1) * _GOLDEN_GAMMA) % 2**64
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _as_params(params: SamplingParams | SequenceOf[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, SequenceOf):
        raise ValueError(f"sampling_params must be SamplingParams, one or a list, got {params!r:.80}")
    wrong = [type(item).__name__ for item in params if not isinstance(item, SamplingParams)]
    if wrong:
        raise ValueError(f"sampling_params must be SamplingParams, one or a list, got {wrong[0]}")
    if len(params) != count:
        raise ValueError(f"there are {count} prompts and {len(params)} sampling_params")
    return list(params)
