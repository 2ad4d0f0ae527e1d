"""`LLM`: prompts in, answers out."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

import torch
from tqdm import tqdm

from graphdecode.cache import PagedKVCache
from graphdecode.config import BucketConfig, EngineConfig
from graphdecode.config.vllm_names import as_settings, no_attribute, refusing_calls
from graphdecode.engine import EngineStats, SamplingParams
from graphdecode.engine.capacity import Capacity
from graphdecode.engine.loading import load_engine
from graphdecode.errors import AnswerError, ArgumentError, ClosedError
from graphdecode.extensions import load_modules
from graphdecode.graphs import GraphTable
from graphdecode.models import Model, check_model, generation_defaults, resolve_model_path
from graphdecode.models.checkpoint import GENERATION_FILE
from graphdecode.text.answer import Answer
from graphdecode.text.chat import ChatOptions, Message, as_conversations, render_chat
from graphdecode.text.intake import Intake, Order, Prompt, as_params, as_priorities, as_prompt, as_prompts
from graphdecode.text.outputs import RequestOutput
from graphdecode.text.router import DeferredInterrupt, SteppingRouter
from graphdecode.text.tokenizer import load_tokenizer


class Stream:
    """An iterator of the pieces of one answer; reading it drives the engine.

    Leaving it early, by `close()` or at the end of a `with` block, aborts the request. An answer that had to be given
    up raises an `AnswerError` behind its last piece.

    Args:
        request: the prompt, the answer so far, and its metrics; with `error` set, nothing comes.
        answer: whose pieces these are; None where the prompt was refused.
        router: steps.
    """

    def __init__(self, request: RequestOutput, answer: Answer | None, router: SteppingRouter) -> None:
        self.request = request
        self._answer = answer
        self._router = router

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        answer = self._answer
        if answer is None:
            raise StopIteration
        if not answer.pieces and not answer.finished:
            try:
                with DeferredInterrupt() as interrupt:
                    self._router.wait(lambda: bool(answer.pieces) or answer.finished, interrupt.check)
            except BaseException:
                self.close()
                raise
        if answer.pieces:
            return answer.pieces.popleft()
        self._answer = None
        if self.request.error is not None:
            raise AnswerError(self.request.error)
        raise StopIteration

    def close(self) -> None:
        """Abort the request if it is not finished."""
        if self._answer is not None:
            self._router.give_up([self._answer])

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LLM:
    """A model that generates text through captured graphs.

    It starts no thread, and any number of threads may use it at once: whoever waits for an answer steps for all.

    Args:
        model: a Hugging Face checkpoint folder, a `.gguf` file, a repository id, `"smollm2"` where it is installed,
            `"demo"`, a name in a folder of GRAPHDECODE_MODELS, or a shape such as `"shape:llama-3.1-8b"` with random
            weights; see `resolve_model_path`.
        config: all settings, those of the buckets alone, the path of a configuration file, or a dict of the sections
            of such a file.
        progress: show bars on standard error while loading and capturing.
        tokenizer: another folder or repository to take it from than the model's, or one that was loaded already
            (`graphdecode.text.load_tokenizer`).
        keywords: settings that override those of `config`, such as max_batch_size, max_sequence_length, device, dtype,
            seed, quantize; see `EngineConfig` and `BucketConfig`. vLLM's names of these are taken too (max_model_len,
            max_num_seqs, enforce_eager, ...), and what it has beyond is refused with what to do instead.

    Attributes:
        engine_config: all settings, with the `max_sequence_length` that holds: where the model was trained for less
            than was asked for, a warning says so. (The default is no wish, and shrinks silently.)
        tokenizer: of transformers; None with `skip_tokenizer_init`: prompts are token ids then, and answers have no
            text.
        engine: what answers, in tokens.
        load_seconds: what it took to load the model and to capture its graphs.

    Raises:
        ArgumentError: the model or a setting cannot be used; the message says why.
        TypeError: there is no such keyword, here or in vLLM.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        config: EngineConfig | BucketConfig | Mapping[str, Any] | str | Path | None = None,
        progress: bool = False,
        tokenizer: Any = None,
        **keywords: Any,
    ) -> None:
        began = time.perf_counter()
        settings = EngineConfig.of(config, **as_settings(keywords))
        load_modules(settings.load_modules)
        trusted = settings.trust_remote_code
        if isinstance(tokenizer, (str, Path)):
            tokenizer = load_tokenizer(resolve_model_path(tokenizer), trust_remote_code=trusted)
        path = resolve_model_path(model)
        # what is wrong with a checkpoint is said before its tokenizer costs seconds
        check_model(path, model_impl=settings.model_impl, trust_remote_code=settings.trust_remote_code)
        self._sampling_defaults = generation_defaults(path)
        self._generation_file = path / GENERATION_FILE
        if settings.skip_tokenizer_init:
            tokenizer = None
        elif tokenizer is None:
            tokenizer = load_tokenizer(path, trust_remote_code=trusted)
        self.tokenizer: Any = tokenizer
        self.engine = load_engine(path, settings, progress=progress)
        self.engine_config = _as_it_holds(settings, self.engine.capacity)
        self.router = SteppingRouter(self.engine)
        self.intake = Intake(self.engine, self.tokenizer, reads_grammars=True)
        if self.tokenizer is not None:
            self.engine.constrain = self.intake.grammars.constraint
        self.load_seconds = time.perf_counter() - began

    @property
    def config(self) -> BucketConfig:
        """Capacity, buckets and capture."""
        return self.engine_config.buckets

    @property
    def model(self) -> Model:
        """The decoder."""
        return self.engine.model

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, as vLLM calls it; None where there is none."""
        return self.tokenizer

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.model.device

    @property
    def graphs(self) -> GraphTable:
        """The captured graphs of the decode step, one a bucket."""
        return self.engine.graphs

    @property
    def capacity(self) -> Capacity:
        """What the configuration means for this model."""
        return self.engine.capacity

    @property
    def stats(self) -> EngineStats:
        """Counts since the engine was made."""
        return self.engine.stats

    @property
    def num_preemptions(self) -> int:
        """How often a sequence gave its pages back for others and was recomputed."""
        return self.engine.num_preemptions

    @property
    def num_waiting(self) -> int:
        """Sequences that have no row yet."""
        return self.engine.num_waiting

    @property
    def cache(self) -> PagedKVCache:
        """The key-value cache, whose pool can be asked for free and used pages."""
        return self.engine.cache

    def get_default_sampling_params(self) -> SamplingParams:
        """Return how the checkpoint wants to be sampled: its `generation_config.json`, else the library's defaults.

        `generate` and `stream` do not ask: without parameters they use `SamplingParams()`. `chat` does.

        Raises:
            ArgumentError: the file states what cannot be.
        """
        try:
            return SamplingParams(**self._sampling_defaults)  # type: ignore[arg-type]
        except ArgumentError as error:
            raise ArgumentError(f"{self._generation_file}: {error}") from error

    def default_chat_params(self) -> SamplingParams:
        """Return what `chat` uses without parameters: the checkpoint's wishes, up to the end of the turn."""
        return replace(self.get_default_sampling_params(), max_tokens=None)

    @refusing_calls()
    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: SequenceOf[int] | int | None = None,
    ) -> list[RequestOutput]:
        """Answer some prompts, batched continuously.

        Args:
            prompts: a text, a list of token ids, a dict with either as `prompt` or `prompt_token_ids`, or a list of
                these.
            sampling_params: for all prompts, or one for each; None means the defaults.
            use_tqdm: show a progress bar on standard error where that is a terminal.
            priority: of all prompts, or one for each: the lowest is served first, and preempted last when pages run
                out. None is 0; prompts of one priority are served as they come.

        Returns:
            One output for each prompt, in their order. A prompt that can never be answered (too long, empty, a token
            id outside the vocabulary) comes back with `error` set and `finish_reason` "refused", and the others are
            answered.

        Raises:
            ValueError: what was given is no prompt, or the numbers of prompts and parameters differ.
        """
        self._check_open()
        items = as_prompts(prompts)
        params = as_params(sampling_params, len(items))
        priorities = as_priorities(priority, len(items))
        encoded = [self.intake.encode(prompt) for prompt in items]
        orders = [
            self.intake.order(item, ids, p, priority=first)
            for item, ids, p, first in zip(items, encoded, params, priorities, strict=True)
        ]
        return self._answered(orders, use_tqdm)

    @refusing_calls(*ChatOptions.__annotations__)
    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer a conversation, or several of them side by side, through the model's chat template.

        Args:
            messages: of one conversation in OpenAI's form, such as `[{"role": "user", "content": "Hello"}]`, or a list
                of conversations.
            sampling_params: for all of them, or one for each; None means how the checkpoint wants to be sampled, up to
                the end of the turn or of the capacity.
            use_tqdm: show a progress bar on standard error where that is a terminal.
            options: `chat_template`, `add_generation_prompt`, `continue_final_message`, `tools` and
                `chat_template_kwargs`; see `render_chat`.

        Returns:
            One output for each conversation, as of `generate`; its `prompt` is what the template made.

        Raises:
            ArgumentError: messages are malformed, there is no chat template, or it refuses the conversation.
        """
        self._check_open()
        chats = [render_chat(self.tokenizer, each, **options) for each in as_conversations(messages)]
        params = as_params(self.default_chat_params() if sampling_params is None else sampling_params, len(chats))
        return self._answered(
            [
                self.intake.order(chat.text, chat.token_ids, chat.ending(p))
                for chat, p in zip(chats, params, strict=True)
            ],
            use_tqdm,
        )

    def _answered(self, orders: list[Order], use_tqdm: bool) -> list[RequestOutput]:
        """Submit orders, and wait for their answers."""
        answers = [answer for order in orders for answer in order.answers]
        unfinished = list(reversed(answers))

        def done() -> bool:
            while unfinished and unfinished[-1].finished:
                unfinished.pop()
            return not unfinished

        try:
            with DeferredInterrupt() as interrupt, self._bar(len(answers), wanted=use_tqdm) as bar:
                self.router.submit(request for order in orders for request in order.requests)

                def between() -> None:
                    interrupt.check()
                    if bar is not None:
                        bar.update(sum(answer.finished for answer in answers) - bar.n)

                self.router.wait(done, between)
        except BaseException:
            self.router.give_up(answers)
            raise
        self._check_open()
        return [order.output for order in orders]

    @staticmethod
    def _bar(total: int, *, wanted: bool) -> tqdm[NoReturn] | nullcontext[None]:
        """Return a progress bar where somebody sees it; all bars of a process share a lock, so no others are made.

        It belongs where Ctrl-C is deferred: else the lock could stay held.
        """
        if not wanted or sys.stderr is None or not sys.stderr.isatty():
            return nullcontext()
        return tqdm(total=total, desc="generating", unit="answer", leave=False)

    @refusing_calls()
    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, refuse: str = "raise", priority: int = 0
    ) -> Stream:
        """Answer one prompt, piece by piece; pieces never split a character or show part of a stop string.

        The request joins the batch at once. Several streams may be read in turn: they run side by side.

        Args:
            prompt: a text, a list of token ids, or a dict with either, as for `generate`.
            sampling_params: with `n` 1.
            refuse: what to do with a prompt that can never fit: `"raise"`, or `"return"` an empty stream whose
                `request.error` says why.
            priority: the lowest is served first.

        Raises:
            ValueError: what was given is no prompt or can never fit, or `n` is not 1.
        """
        self._check_open()
        if refuse not in ("raise", "return"):
            raise ArgumentError(f"refuse must be 'raise' or 'return', got {refuse!r}")
        if isinstance(sampling_params, SequenceOf):
            raise ArgumentError(
                f"a stream has one prompt and one SamplingParams, got a {type(sampling_params).__name__}"
            )
        (params,) = as_params(sampling_params, 1)
        prompt = as_prompt(prompt)
        if params.n != 1:
            raise ArgumentError(f"a stream has one answer: n must be 1, got {params.n}")
        (first,) = as_priorities(priority, 1)
        order = self.intake.order(prompt, self.intake.encode(prompt), params, priority=first)
        if order.output.error is not None and refuse == "raise":
            raise ArgumentError(order.output.error)
        with DeferredInterrupt():
            self.router.submit(order.requests)
        return Stream(order.output, order.answers[0] if order.answers else None, self.router)

    def step(self) -> None:
        """Do one round of the engine: what `generate` and streams do until their answers are there.

        For callers that hand in streams and drive the engine themselves. Ctrl-C waits for the end of the round.
        """
        with DeferredInterrupt():
            self.router.step()

    if not TYPE_CHECKING:  # a checker that saw this would let any misspelt name pass

        def __getattr__(self, name: str) -> NoReturn:
            no_attribute(self, name)

    def close(self) -> None:
        """Release graphs and buffers; the engine cannot be used afterwards. Answers under way end with an error."""
        self.router.close()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied: graphs and caches are this process's own.

        Raises:
            TypeError: always.
        """
        raise TypeError("an LLM cannot be pickled: make one in each process, from the same model and settings")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.router.closed:
            raise ClosedError("this LLM was closed")


def _as_it_holds(settings: EngineConfig, capacity: Capacity) -> EngineConfig:
    """Return the settings with the longest sequence that there can be; warn where that is less than was asked for."""
    asked, holds = settings.buckets.max_sequence_length, capacity.max_sequence_length
    if asked > holds and asked != BucketConfig.max_sequence_length:
        warnings.warn(
            f"max_sequence_length is {holds}, for which the model was trained, and not {asked} as asked for",
            stacklevel=3,
        )
    return replace(settings, buckets=settings.buckets.with_limits(max_sequence_length=holds))
