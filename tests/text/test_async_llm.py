"""The engine from asyncio: many tasks at once, cancelled by leaving, awake only when there is work."""

import asyncio
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from graphdecode import LLM, AsyncLLM, BucketConfig, SamplingParams, StructuredOutputsParams
from graphdecode.text.async_llm import Waker

CONFIG = BucketConfig(max_batch_size=4, max_sequence_length=128, page_size=8)
PROMPTS = ["417+385=", "rev oceanic=", "sort zebra=", "12+30=", "abc", "rev graph=", "999+1=", "x"]


def params(**asked: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 16, **asked})


async def answer(llm: AsyncLLM, prompt: str, asked: SamplingParams) -> str:
    text = ""
    async for output in llm.generate(prompt, asked):
        assert output.outputs[0].text.startswith(text)
        text = output.outputs[0].text
    return text


def test_tasks_get_the_answers_of_an_llm() -> None:
    with LLM("demo", config=CONFIG) as alone:
        expected = [output.outputs[0].text for output in alone.generate(PROMPTS, params(stop="e"))]

    async def main() -> None:
        async with AsyncLLM("demo", config=CONFIG) as llm:
            assert await asyncio.gather(*(answer(llm, prompt, params(stop="e")) for prompt in PROMPTS)) == expected
            async for output in llm.generate("12+30=", params(n=2, temperature=0.7, seed=1), request_id="mine"):
                last = output
            assert last.request_id == "mine"
            assert [o.finish_reason for o in last.outputs] == ["stop", "stop"]

    asyncio.run(main())
    assert not [thread for thread in threading.enumerate() if thread.name == "graphdecode-engine"]


def test_leaving_an_answer_frees_its_row_and_pages() -> None:
    async def main() -> None:
        async with AsyncLLM("demo", config=CONFIG) as llm:
            async for _ in llm.generate("12+30=", params(max_tokens=100, ignore_eos=True)):
                break
            tasks = [asyncio.create_task(answer(llm, "abc", params(max_tokens=100, ignore_eos=True))) for _ in range(6)]
            await asyncio.sleep(0)  # all have begun, and none can have ended
            for task in tasks[::2]:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(result, asyncio.CancelledError) for result in done] == [True, False] * 3
            assert await answer(llm, "12+30=", params()) == "42"
            assert not llm.llm.engine.has_work
            assert llm.llm.cache.pool.used == 0

    asyncio.run(main())


def test_an_abort_reaches_all_outputs_of_a_request_and_those_that_wait() -> None:
    endless = params(n=3, temperature=0.9, seed=1, max_tokens=100, ignore_eos=True)

    async def last(llm: AsyncLLM, name: str) -> list[tuple[str | None, int]]:
        *_, output = [output async for output in llm.generate("12+30=", endless, request_id=name)]
        return [(each.finish_reason, len(each.token_ids)) for each in output.outputs]

    async def main() -> None:
        async with AsyncLLM("demo", config=CONFIG) as llm:
            tasks = [asyncio.create_task(last(llm, name)) for name in "abcd"]  # twelve outputs, and rows for four
            await asyncio.sleep(0)
            await llm.abort("c")
            await llm.abort(["d", "nobody"])
            assert await asyncio.gather(*tasks[2:]) == [[("abort", 0)] * 3] * 2
            assert await asyncio.gather(*tasks[:2]) == [[("length", 100)] * 3] * 2
            assert llm.llm.cache.pool.used == 0

    asyncio.run(main())


def test_what_is_refused_is_refused_before_the_first_output() -> None:
    async def main() -> None:
        async with AsyncLLM("demo", config=CONFIG) as llm:
            with pytest.raises(ValueError, match="128 tokens"):
                await answer(llm, [97] * 128, params())  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="a prompt is a text"):
                await answer(llm, None, params())  # type: ignore[arg-type]
            assert await answer(llm, "12+30=", params()) == "42"

    asyncio.run(main())


def test_closing_ends_what_tasks_wait_for_with_an_error() -> None:
    async def main() -> None:
        llm = AsyncLLM("demo", config=BucketConfig(max_batch_size=1, max_sequence_length=4096))
        task = asyncio.create_task(answer(llm, "abc", params(max_tokens=4000, ignore_eos=True)))  # half a second
        await asyncio.sleep(0)
        await asyncio.to_thread(llm.close)
        with pytest.raises(RuntimeError, match="closed"):
            await task

    asyncio.run(main())


def test_a_failed_step_raises_in_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with AsyncLLM("demo", config=CONFIG) as llm:
            scheduler = llm.llm.engine.scheduler

            def failing(budget: int) -> None:
                monkeypatch.undo()
                raise MemoryError("no room")

            monkeypatch.setattr(scheduler, "next_chunks", failing)
            results = await asyncio.gather(*(answer(llm, "abc", params()) for _ in range(3)), return_exceptions=True)
            failed = [str(result) for result in results if isinstance(result, RuntimeError)]
            assert failed
            assert all("MemoryError: no room" in message for message in failed)
            assert await answer(llm, "12+30=", params()) == "42"

    asyncio.run(main())


def test_rounds_that_another_thread_does_bring_news_too() -> None:
    async def main() -> None:
        async with AsyncLLM("demo", config=CONFIG) as llm:
            long = params(max_tokens=60, ignore_eos=True)
            tasks = [asyncio.create_task(answer(llm, "abc", long)) for _ in range(3)]
            outputs = await asyncio.to_thread(llm.llm.generate, ["12+30="] * 6, params())
            assert [output.outputs[0].text for output in outputs] == ["42"] * 6
            texts = await asyncio.wait_for(asyncio.gather(*tasks), 60)
            assert texts == [llm.llm.generate("abc", long)[0].outputs[0].text] * 3

    asyncio.run(main())


def test_compiling_a_grammar_blocks_neither_the_loop_nor_other_requests(monkeypatch):
    async def main() -> None:
        async with AsyncLLM("demo", config=CONFIG) as llm:
            grammars, seen = llm.llm.input_processor.grammars, []
            read = grammars.constraint

            def slowly(grammar: str) -> object:
                seen.append(threading.current_thread())
                if len(seen) == 1:
                    assert may_go_on.wait(60), "what stands below has to come first"
                return read(grammar)

            monkeypatch.setattr(grammars, "constraint", slowly)
            may_go_on = threading.Event()
            form = params(structured_outputs=StructuredOutputsParams(regex="[xy]{3}"))
            held = asyncio.create_task(answer(llm, "12+30=", form))
            assert await answer(llm, "12+30=", params()) == "42"
            with pytest.raises(ValueError, match="structured_outputs: regex "):
                await answer(llm, "x", params(structured_outputs=StructuredOutputsParams(regex="(")))
            assert not held.done()
            may_go_on.set()
            assert set(await held) <= {"x", "y"}
            assert seen[0].name not in (threading.main_thread().name, "graphdecode-engine")

    asyncio.run(main())


@pytest.mark.parametrize("line", range(8))
def test_no_ring_is_lost_wherever_a_thread_stands_while_another_one_rings(line: int) -> None:
    async def main() -> None:
        waker = Waker(asyncio.get_running_loop())
        first, second = asyncio.Event(), asyncio.Event()
        other = threading.Thread(target=waker.wake, args=(second,))
        lines = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal lines
            if event == "call":
                return trace if frame.f_code is Waker.wake.__code__ else None
            if lines == line and event == "line":
                other.start()
                other.join(0.1)  # it may have to wait for this one
            lines += event == "line"
            return trace

        def rings() -> None:
            sys.settrace(trace)
            waker.wake(first)
            sys.settrace(None)

        thread = threading.Thread(target=rings)
        thread.start()
        await asyncio.to_thread(thread.join)
        async with asyncio.timeout(60):
            await first.wait()
            if other.ident is not None:  # there are as many lines
                await second.wait()

    asyncio.run(main())
