"""Answers for the tasks of an event loop, whichever thread or process steps the engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from graphdecode.errors import AnswerError, ArgumentError
from graphdecode.text.intake import Order
from graphdecode.text.outputs import RequestOutput
from graphdecode.text.router import Router

_Bells: TypeAlias = "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Bell]"


class AsyncFront:
    """Hands prompts in from tasks, and wakes each task when there is news of its answers.

    Args:
        router: brings the engine's events to the answers.
        on_work: is called when something was handed in.
    """

    def __init__(self, router: Router, on_work: Callable[[], None]) -> None:
        self.router = router
        self._on_work = on_work
        self._bells: _Bells = weakref.WeakKeyDictionary()
        self._named: dict[str, list[Order]] = {}  # what runs by a name that its asker gave

    async def outputs(self, order: Order, request_id: str | None) -> AsyncGenerator[RequestOutput, None]:
        """Hand an order in, and yield all there is of it each time that there is more; leaving it gives it up.

        Args:
            order: of one prompt.
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
