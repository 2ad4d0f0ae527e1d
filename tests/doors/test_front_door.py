"""Door 5: a front of another process, over a pipe: it speaks tokens, and needs nothing but the engine's public face."""

import multiprocessing
from multiprocessing.connection import Connection

from graphdecode import LLM, Engine, Event, Request, SamplingParams

PROMPTS = ["417+385=", "rev oceanic=", "sort zebra=", "12+30="]


class PipeFront:
    """Serves what comes over a pipe: requests to begin, numbers to abort, None to end."""

    def __init__(self, engine: Engine, pipe: Connection) -> None:
        self.engine = engine
        self.pipe = pipe

    def serve(self) -> None:
        while True:
            while self.pipe.poll(None if not self.engine.has_work else 0):
                message = self.pipe.recv()
                if message is None:
                    return
                if isinstance(message, Request):
                    self.pipe.send(self.engine.add(message))
                else:
                    self.engine.abort(message)
            self.pipe.send(self.engine.step())


def worker(pipe: Connection) -> None:
    with LLM("demo", device="cpu") as llm:
        pipe.send([llm.tokenizer.encode(prompt) for prompt in PROMPTS])
        PipeFront(llm.engine, pipe).serve()


def test_another_process_gets_its_tokens_over_a_pipe() -> None:
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=worker, args=(there,))
    process.start()
    try:
        prompts = here.recv()
        ids: list[int] = []
        tokens: dict[int, list[int]] = {}
        reasons: dict[int, str] = {}

        def take(message: int | list[Event]) -> None:
            for event in message if isinstance(message, list) else []:
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
                if event.finish_reason is not None:
                    reasons[event.request_id] = event.finish_reason

        for prompt in prompts:
            here.send(Request(prompt, SamplingParams(temperature=0.0, max_tokens=16)))
            while not isinstance(message := here.recv(), int):
                take(message)
            ids.append(message)
        here.send(ids[2])
        while not reasons.keys() >= {ids[0], ids[1], ids[3]}:
            take(here.recv())
        here.send(None)
        with LLM("demo", device="cpu") as llm:
            texts = [llm.tokenizer.decode(tokens[i], skip_special_tokens=True).strip() for i in ids if i != ids[2]]
        assert texts == ["802", "cinaeco", "42"]
        assert {reasons[i] for i in (ids[0], ids[1], ids[3])} == {"stop"}
    finally:
        process.join(30)
        process.kill()
    assert process.exitcode == 0
