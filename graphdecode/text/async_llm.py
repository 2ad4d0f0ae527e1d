"""`AsyncLLM`: the same engine from asyncio, and answers for the tasks of an event loop."""

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

from graphdecode.config.vllm_names import no_attribute, refusing_calls
from graphdecode.engine import SamplingParams
from graphdecode.errors import AnswerError, ArgumentError
from graphdecode.text.chat import ChatOptions, Message, render_chat
from graphdecode.text.intake import Order, Prompt, as_params, as_priorities, as_prompt
from graphdecode.text.llm import LLM
from graphdecode.text.outputs import RequestOutput
from graphdecode.text.router import Router

_Bells: TypeAlias = "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Bell]"


class AsyncFront:
    """Hands prompts in from tasks, and wakes each task when there is news of its answers."""

    def __init__(self, router: Router, on_work: Callable[[], None]) -> None:
        self.router = router
        self._on_work = on_work
        self._bells: _Bells = weakref.WeakKeyDictionary()
        self._named: dict[str, list[Order]] = {}  # what runs by a name that its asker gave

    async def outputs(self, order: Order, request_id: str | None) -> AsyncGenerator[RequestOutput, None]:
        """Hand an order in, and yield all there is of it each time that there is more; leaving it gives it up.

        Args:
            request_id: what the outputs are to be called; None: the order's number.

        Raises:
            ArgumentError: it was refused.
            AnswerError: the engine was closed, or a step of it failed.
        """
        if request_id is not None:
            order.output.request_id = request_id
            self._named.setdefault(request_id, []).append(order)
        try:
            async with contextlib.aclosing(self.follow([order])) as news:
                async for _ in news:
                    outputs = [answer.snapshot() for answer in order.answers]
                    yield replace(order.output, outputs=outputs, metrics=replace(order.output.metrics))
        finally:
            if request_id is not None:
                self._named[request_id].remove(order)
                if not self._named[request_id]:
                    del self._named[request_id]

    def abort(self, names: Iterable[str]) -> None:
        """End what runs by some names where it is."""
        orders = [order for name in names for order in self._named.get(name, ())]
        self.router.give_up([answer for order in orders for answer in order.answers])

    async def follow(self, orders: Sequence[Order]) -> AsyncGenerator[None, None]:
        """Hand orders in, and come back each time that there is news; leaving it gives the answers up.

        The last time all answers are finished. Who reads `Answer.pieces` finds what is new.

        Raises:
            ArgumentError: one was refused.
            AnswerError: the engine was closed, or a step of it failed.
        """
        for order in orders:
            if order.output.error is not None:
                raise ArgumentError(order.output.error)
        answers = [answer for order in orders for answer in order.answers]
        news, bell = asyncio.Event(), self._bell()
        for answer in answers:
            answer.on_news = partial(bell.ring, news)
        try:
            self.router.submit(request for order in orders for request in order.requests)
            self._on_work()
            finished = False
            while not finished:
                await news.wait()
                news.clear()
                finished = all(answer.finished for answer in answers)
                for order in orders:
                    if order.output.error is not None:
                        raise AnswerError(order.output.error, order.output.error_code)
                yield
        finally:
            self.router.give_up(answers)

    def _bell(self) -> Bell:
        loop = asyncio.get_running_loop()
        return self._bells.setdefault(loop, Bell(loop))


class Bell:
    """Wakes tasks of one event loop from any thread: once for all that have news at the same time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()  # the loop's, for it runs
        self._books = threading.Lock()
        self._news: list[asyncio.Event] = []

    def ring(self, news: asyncio.Event) -> None:
        """Let an event be set by its loop."""
        if threading.get_ident() == self._thread:
            news.set()
            return
        with self._books:
            self._news.append(news)
            is_called = len(self._news) > 1
        if not is_called:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        with self._books:
            all_news, self._news = self._news, []
        for news in all_news:
            news.set()


class AsyncLLM:
    """A model that answers many tasks of an event loop at once. It owns one thread, which steps while there is work.

    Args:
        model: as for `LLM`.
        options: `LLM`'s keywords.

    Raises:
        ValueError: as `LLM`.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        self.llm = LLM(model, **options)
        self._front = AsyncFront(self.llm.router, self._wake)
        self._work = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="graphdecode-engine", daemon=True)
        self._thread.start()

    @refusing_calls()
    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one prompt: yield all there is so far each time that there is more; leaving it gives the request up.

        A form (`structured_outputs`) is read in a thread of its own: a large one delays its own request alone.

        Args:
            prompt: a text, a list of token ids, or a dict with either, as for `LLM.generate`.
            sampling_params: None means the defaults.
            request_id: what the outputs are to be called; None: a number.
            priority: the lowest is served first.

        Raises:
            ValueError: what was given is no prompt or can never fit.
            AnswerError: this was closed, or a step of the engine failed.
        """
        (params,) = as_params(sampling_params, 1)
        item = as_prompt(prompt)
        (first,) = as_priorities(priority, 1)
        make = partial(self.llm.intake.order, item, self.llm.intake.encode(item), params, priority=first)
        return self._outputs(make, params, request_id)

    @refusing_calls(*ChatOptions.__annotations__)
    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncIterator[RequestOutput]:
        """Answer one conversation through the model's chat template, as `generate` answers a prompt.

        Args:
            messages: as for `LLM.chat`, of one conversation.
            sampling_params: None means what it means for `LLM.chat`.
            request_id: what the outputs are to be called; None: a number.
            options: see `render_chat`.

        Raises:
            ValueError: messages are malformed, there is no chat template, or the conversation can never fit.
            AnswerError: this was closed, or a step of the engine failed.
        """
        (params,) = as_params(self.llm.default_chat_params() if sampling_params is None else sampling_params, 1)
        chat = render_chat(self.llm.tokenizer, messages, **options)
        ending = chat.ending(params)
        return self._outputs(partial(self.llm.intake.order, chat.text, chat.token_ids, ending), ending, request_id)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End what runs by some names where it is, with the reason "abort"; a name that nothing runs by is no error.

        Args:
            request_id: what `generate` or `chat` was told to call it, or several.
        """
        self._front.abort([request_id] if isinstance(request_id, str) else request_id)

    def _outputs(
        self, make: Callable[[], Order], params: SamplingParams, request_id: str | None
    ) -> AsyncIterator[RequestOutput]:
        if params.structured_outputs is None:
            return self._front.outputs(make(), request_id)
        return self._outputs_of_a_form(make, request_id)

    async def _outputs_of_a_form(
        self, make: Callable[[], Order], request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        order = await asyncio.to_thread(make)
        async with contextlib.aclosing(self._front.outputs(order, request_id)) as outputs:
            async for output in outputs:
                yield output

    if not TYPE_CHECKING:  # see `LLM`

        def __getattr__(self, name: str) -> NoReturn:
            no_attribute(self, name)

    def _wake(self) -> None:
        with self._work:
            self._work.notify()

    def _run(self) -> None:
        """Step while there is work; the thread's life."""
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
            except Exception as error:  # the engine has given all up, and its next step says so to each owner
                if router.closed:
                    return
                logging.getLogger(__name__).warning("%s: %s", type(error).__name__, error)

    def close(self) -> None:
        """End the thread, and release graphs and buffers; answers under way end with an error."""
        with self._work:
            self._closing = True
            self._work.notify()
        self._thread.join()
        self.llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)
