"""A front of another process, over a pipe: it speaks tokens, and needs nothing but the engine's public face."""

from multiprocessing.connection import Connection

from graphdecode import LLM, Engine, Request


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


def worker(pipe: Connection, prompts: list[str]) -> None:
    """Serve the demo model; first of all send the tokens of some prompts."""
    with LLM("demo", device="cpu") as llm:
        pipe.send([llm.tokenizer.encode(prompt) for prompt in prompts])
        PipeFront(llm.engine, pipe).serve()
