"""`LLM`, and the stream of one output."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from tqdm import tqdm

from graphdecode.config import BucketConfig, EngineConfig
from graphdecode.config.vllm_names import CALL_KEYWORDS, POOLING_KEYWORDS, as_settings, no_attribute, refusing
from graphdecode.engine import SamplingParams
from graphdecode.engine.capacity import Capacity
from graphdecode.engine.loading import load_engine
from graphdecode.errors import AnswerError, ArgumentError, ClosedError, EngineStateError
from graphdecode.extensions import load_modules
from graphdecode.models import check_model, generation_defaults, resolve_model_path
from graphdecode.models.checkpoint import GENERATION_FILE
from graphdecode.models.updates import NamedTensors
from graphdecode.text.arguments import (
    LoRARequest,
    LoRARequests,
    Prompt,
    SaltedPrompt,
    as_lora_requests,
    as_params,
    as_pooling_params,
    as_priorities,
    as_prompts,
    as_salted_prompt,
)
from graphdecode.text.chat import ChatOptions, Message, RenderedChat, as_conversations, render_chat
from graphdecode.text.input_processor import InputProcessor, ParentRequest
from graphdecode.text.outputs import RequestOutput, RequestState
from graphdecode.text.pooling import (
    EmbeddingRequestOutput,
    Pooler,
    PoolingParams,
    ScoringRequestOutput,
    as_pairs,
)
from graphdecode.text.router import DeferredInterrupt, SteppingRouter
from graphdecode.text.tokenizer import load_tokenizer


class Stream:
    """An iterator of the pieces of one output; reading it drives the engine.

    Leaving it early, by `close()` or at the end of a `with` block, aborts the request. An output that fails raises an
    `AnswerError` after its last piece; one that was refused (`state` is None) has no pieces.
    """

    def __init__(self, request: RequestOutput, state: RequestState | None, router: SteppingRouter) -> None:
        self.request = request
        self._state = state
        self._router = router

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        state = self._state
        if state is None:
            raise StopIteration
        if not state.pieces and not state.finished:
            try:
                with DeferredInterrupt() as interrupt:
                    self._router.wait(lambda: bool(state.pieces) or state.finished, interrupt.check)
            except BaseException:
                self.close()
                raise
        if state.pieces:
            return state.pieces.popleft()
        self._state = None
        if self.request.error is not None:
            raise AnswerError(self.request.error)
        raise StopIteration

    def close(self) -> None:
        """Abort the request if it is not finished."""
        if self._state is not None:
            self._router.abort([self._state])

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LLM:
    """A model that generates text through captured graphs.

    Any number of threads may use it. It starts none: one of the threads that wait for outputs steps for all.

    Args:
        model: a Hugging Face checkpoint folder, a `.gguf` file, a repository id, `"smollm2"` if installed, `"demo"`, or
            a name in a folder of GRAPHDECODE_MODELS; see `resolve_model_path`.
        config: all settings, only those of the buckets, the path of a configuration file, or its sections as a dict.
        progress: show bars on standard error while loading and capturing.
        tokenizer: a folder or repository to take it from, or a tokenizer (`graphdecode.text.load_tokenizer`).
        keywords: settings that override `config`: see `EngineConfig` and `BucketConfig`. vLLM's names are understood
            (max_model_len, max_num_seqs, enforce_eager, ...); what is not supported says what to do instead.

    Attributes:
        engine_config: all settings, with the effective `max_sequence_length`; a warning says if that is less than the
            requested one, because of the model.
        tokenizer: None with `skip_tokenizer_init`: prompts are token ids, and outputs have no text.
        load_seconds: time to load the model and to capture its graphs.
        model, cache, graphs, capacity, stats: of the engine.

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
        # fails before the tokenizer costs seconds
        check_model(path, model_impl=settings.model_impl, trust_remote_code=trusted)
        self._sampling_defaults = generation_defaults(path)
        self._generation_file = path / GENERATION_FILE
        if settings.skip_tokenizer_init:
            tokenizer = None
        elif tokenizer is None:
            tokenizer = load_tokenizer(path, trust_remote_code=trusted)
        self.tokenizer: Any = tokenizer
        eos_token_id = getattr(tokenizer, "eos_token_id", None)
        self.engine = engine = load_engine(path, settings, progress=progress, eos_token_id=eos_token_id)
        self.model, self.cache, self.graphs = engine.model, engine.cache, engine.graphs
        self.capacity, self.stats, self.device = engine.capacity, engine.stats, engine.model.device
        self.engine_config = _effective(settings, self.capacity)
        self.config = self.engine_config.buckets
        self.router = SteppingRouter(engine)
        self.input_processor = InputProcessor(engine.rules, engine.seed, self.tokenizer)
        if self.tokenizer is not None:
            engine.constrain = self.input_processor.grammars.constraint
        self.pooler = Pooler.of(path, settings.pooling)
        self.load_seconds = time.perf_counter() - began

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        return self.engine.num_preemptions

    @property
    def num_waiting(self) -> int:
        """Sequences without a row yet."""
        return self.engine.num_waiting

    def get_tokenizer(self) -> Any:
        """Return the tokenizer; None with `skip_tokenizer_init`."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of the checkpoint's `generation_config.json`, else the defaults.

        `chat` uses them; `generate` and `stream` use `SamplingParams()`. Raises `ArgumentError` for impossible values.
        """
        try:
            return SamplingParams(**self._sampling_defaults)  # type: ignore[arg-type]
        except ArgumentError as error:
            raise ArgumentError(f"{self._generation_file}: {error}") from error

    def default_chat_params(self) -> SamplingParams:
        """Return the parameters of `chat`: the checkpoint's, without `max_tokens`."""
        return replace(self.get_default_sampling_params(), max_tokens=None)

    @refusing(CALL_KEYWORDS)
    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: SequenceOf[int] | int | None = None,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Generate outputs for prompts, with continuous batching.

        Args:
            prompts: a text, a list of token ids, a dict with `prompt` or `prompt_token_ids`, or a list of these. A
                dict's `cache_salt` keeps cached prefixes apart: they are shared by prompts of one salt alone.
            sampling_params: one for all prompts, or one for each; None means the defaults.
            use_tqdm: show a progress bar on standard error if that is a terminal.
            priority: one for all prompts, or one for each: the lowest is served first, and preempted last.
            lora_request: one adapter for all prompts, or one (or None) for each; a new one is loaded.

        Returns:
            One output for each prompt, in order. The output of a prompt that is too long has `error` set and the
            `finish_reason` "refused", and a warning says so; the others are served.

        Raises:
            ValueError: not a prompt, an empty one, or a token id outside the vocabulary; parameters that cannot be
                served, or as many as there are no prompts; an adapter cannot be used. Then no prompt was served.
        """
        calls = self.process_calls(as_prompts(prompts), sampling_params, priority, lora_request)
        return self._generated([call() for call in calls], use_tqdm)

    @refusing(CALL_KEYWORDS, *ChatOptions.__annotations__)
    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: SequenceOf[int] | int | None = None,
        lora_request: LoRARequests = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Generate the next message of one or several conversations through the model's chat template.

        Args:
            messages: one conversation, such as `[{"role": "user", "content": "Hello"}]`, or a list of conversations.
            sampling_params: one for all of them, or one for each; None means the checkpoint's, up to the capacity.
            use_tqdm: show a progress bar on standard error if that is a terminal.
            priority, lora_request: as for `generate`.
            options: see `render_chat`.

        Returns:
            One output for each conversation, as from `generate`; its `prompt` is the rendered template.

        Raises:
            ArgumentError: messages are malformed, there is no chat template, or it refuses the conversation.
        """
        chats = [render_chat(self.tokenizer, each, **options) for each in as_conversations(messages)]
        params = self.default_chat_params() if sampling_params is None else sampling_params
        return self._generated([call() for call in self.process_calls(chats, params, priority, lora_request)], use_tqdm)

    def process_calls(
        self,
        prompts: SequenceOf[SaltedPrompt | RenderedChat],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None,
        priority: SequenceOf[int] | int | None,
        lora_request: LoRARequests,
    ) -> list[partial[ParentRequest]]:
        """Return the calls of `InputProcessor.process` for prompts, each argument one for all of them or for each.

        Parameters are the second argument of a call. New adapters are loaded.
        """
        params, priorities = as_params(sampling_params, len(prompts)), as_priorities(priority, len(prompts))
        self._check_open()
        lora_requests, calls = as_lora_requests(lora_request, len(prompts)), []
        for each in dict.fromkeys(filter(None, lora_requests)):
            self.engine.adapters.load_once(each.lora_name, each.lora_path)
        for prompt, request_params, rank, request in zip(prompts, params, priorities, lora_requests, strict=True):
            adapter = None if request is None else request.lora_name
            call = partial(self.input_processor.process, priority=rank, adapter=adapter)
            if isinstance(prompt, RenderedChat):
                call = partial(call, token_ids=prompt.token_ids, begins_message=True)
                calls.append(partial(call, prompt.text, prompt.ending(request_params)))
            else:
                calls.append(partial(call, prompt.prompt, request_params, cache_salt=prompt.cache_salt))
        return calls

    @refusing(POOLING_KEYWORDS)
    def embed(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | SequenceOf[PoolingParams] | None = None,
        lora_request: LoRARequests = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt: its pooled hidden states behind the final norm.

        They are the last token's or the mean of all (`pooling`), and have length 1, unless files of
        sentence-transformers in the checkpoint's folder say otherwise. Requests that generate go on beside it.

        Args:
            prompts, use_tqdm, lora_request: as for `generate`.
            pooling_params: one for all prompts, or one for each; None means the defaults.
            truncate_prompt_tokens: how many tokens of a prompt are kept, the first ones; -1: as many as fit.
            prompt_name: of a text in the checkpoint's files that is put in front, such as "query"; None: the default.

        Returns:
            One output for each prompt, in order; one that is too long has `error` set, as in `generate`.

        Raises:
            ValueError: as in `generate`, or an embedding has fewer dimensions than requested.
            NotSupportedError: the checkpoint's files ask for another pooling.
        """
        self.pooler.check_embeds()
        items = as_prompts(prompts)
        params = as_pooling_params(pooling_params, len(items))
        for each in params:
            self.engine.rules.check_pools(each.dimensions)
        items = [item._replace(prompt=self.pooler.prompted(item.prompt, prompt_name)) for item in items]
        sampling = SamplingParams(truncate_prompt_tokens=truncate_prompt_tokens)
        calls = self.process_calls(items, sampling, None, lora_request)
        parents = [call(pools=True) for call in calls]
        self._generated(parents, use_tqdm)
        return [self.pooler.output(*each) for each in zip(parents, params, strict=True)]

    @refusing(POOLING_KEYWORDS)
    def score(
        self,
        data_1: str | SequenceOf[str],
        data_2: str | SequenceOf[str],
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        instruction: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return a score of each pair of texts, a query and a document: the higher, the better they fit.

        It is the cosine of their embeddings, or of a reranker the probability that the document is relevant.

        Args:
            data_1, data_2: one text and one, one and a list, or two lists of the same length.
            use_tqdm: as for `generate`.
            pooling_params: `use_activation=False` gives a reranker's difference of logits.
            lora_request: one adapter for all texts.
            instruction: what a query asks for, of a reranker; None: that of its training.

        Raises:
            ValueError: as in `embed`.
        """
        pairs, pooler = as_pairs(data_1, data_2), self.pooler
        (params,) = as_pooling_params(pooling_params, 1)
        self.engine.rules.check_pools(params.dimensions, scores=pooler.scores_pairs)
        if pooler.scores_pairs:
            groups = [[pooler.joined(self.tokenizer, pair, instruction)] for pair in pairs]
        else:
            pooler.check_embeds()
            groups = [list(pooler.sides(pair)) for pair in pairs]
        texts = list(dict.fromkeys(text for group in groups for text in group))  # a query is embedded once
        prompts: list[SaltedPrompt] = [SaltedPrompt(text) for text in texts]
        calls = self.process_calls(prompts, None, None, lora_request)
        parents = {}
        for text, call in zip(texts, calls, strict=True):
            ids = self.input_processor.encode(text, special=not pooler.scores_pairs)  # a template has its own
            parents[text] = call(pools=True, scores=pooler.scores_pairs, token_ids=ids)
        self._generated(list(parents.values()), use_tqdm)
        return [pooler.scoring_output([parents[text] for text in group], params) for group in groups]

    def _generated(self, parents: list[ParentRequest], use_tqdm: bool) -> list[RequestOutput]:
        states = [state for parent in parents for state in parent.states]
        unfinished = list(reversed(states))

        def done() -> bool:
            while unfinished and unfinished[-1].finished:
                unfinished.pop()
            return not unfinished

        try:
            with DeferredInterrupt() as interrupt, self._bar(len(states), is_visible=use_tqdm) as bar:
                self.router.submit(parents)

                def between() -> None:
                    interrupt.check()
                    if bar is not None:
                        bar.update(sum(state.finished for state in states) - bar.n)

                self.router.wait(done, between)
        except BaseException:
            self.router.abort(states)
            raise
        self._check_open()
        if refused := [parent.output for parent in parents if not parent.children]:
            which = f"{len(refused)} of {len(parents)} prompts refused, with that finish_reason"
            warnings.warn(f"{which}: {refused[0].error}", RuntimeWarning, stacklevel=4)
        return [parent.output for parent in parents]

    @staticmethod
    def _bar(total: int, *, is_visible: bool) -> tqdm[NoReturn] | nullcontext[None]:
        """Return a progress bar if standard error is a terminal; call it with Ctrl-C deferred, as tqdm takes a lock."""
        if not is_visible or sys.stderr is None or not sys.stderr.isatty():
            return nullcontext()
        return tqdm(total=total, desc="generating", unit="output", leave=False)

    @refusing(CALL_KEYWORDS)
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> Stream:
        """Generate one output piece by piece; pieces never split a character or show part of a stop string.

        The request joins the batch at once, and several streams run concurrently. Arguments are as for `generate`, for
        one prompt and with `n` 1; a `ValueError` says what cannot be used.
        """
        if isinstance(sampling_params, SequenceOf):
            raise ArgumentError(
                f"a stream takes one prompt and one SamplingParams, got a {type(sampling_params).__name__}"
            )
        (params,) = as_params(sampling_params, 1)
        item = as_salted_prompt(prompt)
        if params.n != 1:
            raise ArgumentError(f"n must be 1 for a stream, got {params.n}")
        (call,) = self.process_calls([item], params, priority, lora_request)
        parent = call()
        with DeferredInterrupt():
            self.router.submit([parent])
        if parent.output.error is not None:
            raise ArgumentError(parent.output.error)
        return Stream(parent.output, parent.states[0], self.router)

    def load_lora_adapter(self, name: str, path: str | Path) -> None:
        """Load an adapter for requests to name, a folder of PEFT or a GGUF file of llama.cpp; other requests go on.

        Raises `AdapterError` if it cannot be used with this model, `ArgumentError` if the name is taken, or there is no
        room for adapters (`max_adapters`); then nothing was changed.
        """
        self.engine.adapters.load(name, path)

    def unload_lora_adapter(self, name: str) -> None:
        """Forget an adapter; requests that use it go on. Raises ArgumentError if none has that name."""
        self.engine.adapters.unload(name)

    def _check_open(self) -> None:
        if self.router.closed:
            raise ClosedError("this LLM was closed")

    def update_weights(self, weights: str | Path | NamedTensors) -> None:
        """Copy the weights of a folder or file, or tensors by name, into the model, without capturing again.

        The tokenizer and the sampling defaults stay. See `Engine.update_weights` for arguments and errors.
        """
        with DeferredInterrupt():
            self.engine.update_weights(weights)

    def sleep(self, level: int = 1) -> int:
        """Give the memory of the cache (level 1), and of the weights (2), back to the system; return how many bytes.

        On a CPU under Linux, or a GPU with `enable_sleep_mode`, where level 1 moves the weights to the host. Graphs
        stay valid, and prefixes are dropped. See `Engine.sleep`.
        """
        with DeferredInterrupt():
            return self.engine.sleep(level)

    @property
    def is_sleeping(self) -> bool:
        """Whether it sleeps: requests are refused."""
        return self.engine.is_sleeping

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; return whether that was done: not while requests use the cache."""
        try:
            with DeferredInterrupt():
                self.engine.reset_prefix_cache()
        except EngineStateError:
            return False
        return True

    def wake_up(self, tags: SequenceOf[str] | None = None) -> None:
        """Wake up the "weights", the "kv_cache", or (None) both. See `Engine.wake_up`."""
        with DeferredInterrupt():
            self.engine.wake_up(tags)

    def step(self) -> None:
        """Run one step of the engine, for callers that step by themselves; Ctrl-C is deferred."""
        with DeferredInterrupt():
            self.router.step()

    if not TYPE_CHECKING:  # else a type checker would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            no_attribute(self, name)

    def close(self) -> None:
        """Release graphs and buffers; outputs in progress end with an error."""
        self.router.close()

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: graphs and caches belong to this process."""
        raise TypeError("an LLM cannot be pickled: make one in each process, from the same model and settings")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _effective(settings: EngineConfig, capacity: Capacity) -> EngineConfig:
    """Return the settings with the effective `max_sequence_length`; warn of one that is reduced, or does not fit."""
    requested, length = settings.buckets.max_sequence_length, capacity.max_sequence_length
    if requested > length and requested != BucketConfig.max_sequence_length:
        warnings.warn(
            f"max_sequence_length is {length}, for which the model was trained, instead of the requested {requested}",
            stacklevel=3,
        )
    if capacity.token_limit < length:
        warnings.warn(
            f"total_num_pages={capacity.total_num_pages} limits a sequence to {capacity.token_limit} tokens: "
            f"max_sequence_length={length} needs {capacity.pages_per_row} pages",
            stacklevel=3,
        )
    return settings.with_settings(max_sequence_length=length)
