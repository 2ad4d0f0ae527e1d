"""`AsyncLLM`: the same engine from asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from graphdecode.engine import SamplingParams
from graphdecode.errors import AnswerError, ArgumentError
from graphdecode.text.answer import Answer
from graphdecode.text.intake import as_params
from graphdecode.text.llm import LLM
from graphdecode.text.outputs import RequestOutput
from graphdecode.text.prompts import Prompt, as_prompt


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
        self._listeners: dict[Answer, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}
        self._work = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="graphdecode-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Answer one prompt: yield all there is so far each time that there is more; leaving it gives the request up.

        Args:
            prompt: a text, a list of token ids, or a dict with either, as for `LLM.generate`.
            sampling_params: None means the defaults.
            request_id: what the outputs are to be called; None: a number.

        Raises:
            ValueError: what was given is no prompt or can never fit.
            AnswerError: this was closed, or a step of the engine failed.
        """
        (params,) = as_params(sampling_params, 1)
        item = as_prompt(prompt)
        order = self.llm.intake.order(item, self.llm.intake.encode(item), params)
        if order.output.error is not None:
            raise ArgumentError(order.output.error)
        if request_id is not None:
            order.output.request_id = request_id
        news = asyncio.Event()
        try:
            for answer in order.answers:
                self._listeners[answer] = (asyncio.get_running_loop(), news)
            self.llm.router.submit(order.requests)
            with self._work:
                self._work.notify()
            finished = False
            while not finished:
                await news.wait()
                news.clear()
                finished = all(answer.finished for answer in order.answers)
                if order.output.error is not None:
                    raise AnswerError(order.output.error)
                yield _snapshot(order.output)
        finally:
            for answer in order.answers:
                self._listeners.pop(answer, None)
            self.llm.router.give_up(order.answers)

    def _run(self) -> None:
        """Step while there is work; the thread's life."""
        engine, router = self.llm.engine, self.llm.router
        while True:
            with self._work:
                while not (engine.has_work or self._closing):
                    self._work.wait()
                if self._closing:
                    return
            try:
                self._wake(router.step())
            except Exception:  # the engine has given everything up, and its next step says so to each owner
                if router.closed:
                    return

    def _wake(self, answers: list[Answer]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        for answer in answers:
            listener = self._listeners.get(answer)
            if listener is not None:
                by_loop.setdefault(listener[0], []).append(listener[1])
        for loop, news in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_set_all, news)

    def close(self) -> None:
        """End the thread, and release graphs and buffers; answers under way end with an error."""
        with self._work:
            self._closing = True
            self._work.notify()
        self._thread.join()
        answers = list(self._listeners)
        self.llm.close()
        self._wake(answers)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()


def _snapshot(output: RequestOutput) -> RequestOutput:
    """Return what later steps do not change any more."""
    answers = [
        replace(
            answer,
            token_ids=list(answer.token_ids),
            logprobs=None if answer.logprobs is None else list(answer.logprobs),
        )
        for answer in output.outputs
    ]
    return replace(output, outputs=answers, metrics=replace(output.metrics))
