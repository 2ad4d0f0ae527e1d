"""`AsyncLLM`: the engine from asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, Unpack

from graphdecode.config.vllm_names import CALL_KEYWORDS, no_attribute, refusing
from graphdecode.engine import SamplingParams
from graphdecode.errors import AnswerError, ArgumentError
from graphdecode.text.arguments import LoRARequest, Prompt, as_salted_prompt
from graphdecode.text.chat import ChatOptions, Message, render_chat
from graphdecode.text.input_processor import ParentRequest
from graphdecode.text.llm import LLM
from graphdecode.text.outputs import RequestOutput
from graphdecode.text.router import Router

_Wakers: TypeAlias = "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Waker]"


class AsyncFront:
    """Submits prompts from tasks of event loops, and wakes each task when its outputs change."""

    def __init__(self, router: Router, on_work: Callable[[], None]) -> None:
        self.router = router
        self._on_work = on_work
        self._wakers: _Wakers = weakref.WeakKeyDictionary()

    async def follow(self, parents: Sequence[ParentRequest]) -> AsyncGenerator[None, None]:
        """Submit prompts, and yield at each change until all outputs are finished; leaving aborts them.

        `RequestState.pieces` holds the new text. Raises `ArgumentError` if one was refused, `AnswerError` if the engine
        was closed or a step failed.
        """
        states = [state for parent in parents for state in parent.states]
        changed, loop = asyncio.Event(), asyncio.get_running_loop()
        waker = self._wakers.setdefault(loop, Waker(loop))
        for state in states:
            state.on_change = partial(waker.wake, changed)
        try:
            self.router.submit(parents)
            for parent in parents:
                if not parent.children:
                    raise ArgumentError(str(parent.output.error))
            self._on_work()
            finished = False
            while not finished:
                await changed.wait()
                changed.clear()
                finished = all(state.finished for state in states)
                for parent in parents:
                    if parent.output.error is not None:
                        raise AnswerError(parent.output.error, parent.output.error_code)
                yield
        finally:
            self.router.abort(states)


class Waker:
    """Sets events of one event loop from any thread, with one call into the loop for all that are set together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()  # the running loop's
        self._lock = threading.Lock()
        self._events: list[asyncio.Event] = []

    def wake(self, event: asyncio.Event) -> None:
        """Set an event, in its loop's thread."""
        if threading.get_ident() == self._thread:
            event.set()
            return
        with self._lock:
            self._events.append(event)
            is_called = len(self._events) > 1
        if not is_called:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        for event in events:
            event.set()


class AsyncLLM:
    """`LLM`, with its arguments, for the tasks of an event loop: a thread steps while there is work."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.llm = LLM(model, **options)
        self._front = AsyncFront(self.llm.router, self._wake)
        self._running: dict[int, ParentRequest] = {}  # by identity
        self._work = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="graphdecode-engine", daemon=True)
        self._thread.start()

    @refusing(CALL_KEYWORDS)
    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the output of one prompt so far at each change; leaving the iterator aborts the request.

        `structured_outputs` are compiled in a thread: a large one delays only its own request. `request_id` is that of
        the outputs; None: a number. Arguments and errors are those of `LLM.stream`, with any `n`, and an `AnswerError`
        if this was closed or a step failed.
        """
        (call,) = self.llm.process_calls([as_salted_prompt(prompt)], sampling_params, priority, lora_request)
        return self._outputs(call, request_id)

    @refusing(CALL_KEYWORDS, *ChatOptions.__annotations__)
    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncIterator[RequestOutput]:
        """Generate the next message of one conversation, as `generate` does for a prompt.

        Arguments and errors are those of `LLM.chat`.
        """
        params = self.llm.default_chat_params() if sampling_params is None else sampling_params
        chat = render_chat(self.llm.tokenizer, messages, **options)
        (call,) = self.llm.process_calls([chat], params, priority, lora_request)
        return self._outputs(call, request_id)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort the requests with one or several ids, with the `finish_reason` "abort"; unknown ids are ignored."""
        ids = {request_id} if isinstance(request_id, str) else set(request_id)
        parents = [parent for parent in list(self._running.values()) if parent.output.request_id in ids]
        self.llm.router.abort([state for parent in parents for state in parent.states])

    async def _outputs(
        self, call: partial[ParentRequest], request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        is_structured = call.args[1].structured_outputs is not None
        parent = await asyncio.to_thread(call) if is_structured else call()
        if request_id is not None:
            parent.output.request_id = request_id
        self._running[id(parent)] = parent
        try:
            async with contextlib.aclosing(self._front.follow([parent])) as updates:
                async for _ in updates:
                    outputs = [state.snapshot() for state in parent.states]
                    yield replace(parent.output, outputs=outputs, metrics=replace(parent.output.metrics))
        finally:
            del self._running[id(parent)]

    if not TYPE_CHECKING:  # see `LLM`

        def __getattr__(self, name: str) -> NoReturn:
            no_attribute(self, name)

    def _wake(self) -> None:
        with self._work:
            self._work.notify()

    def _run(self) -> None:
        engine, router = self.llm.engine, self.llm.router
        while True:
            while not (engine.has_work or self._closing) and engine.capture_waiting():
                pass
            with self._work:
                while not (engine.has_work or self._closing):
                    self._work.wait()
                if self._closing:
                    return
            try:
                router.step()
            except Exception as error:  # the engine's next step ends all requests with this error
                if router.closed:
                    return
                logging.getLogger(__name__).warning("%s: %s", type(error).__name__, error)

    def close(self) -> None:
        """End the thread, and release graphs and buffers; outputs in progress end with an error."""
        with self._work:
            self._closing = True
            self._work.notify()
        self._thread.join()
        self.llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)
