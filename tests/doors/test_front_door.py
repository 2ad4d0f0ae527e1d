"""Door 5: a front of another process, over a pipe: it speaks tokens, and needs nothing but the engine's public face."""

import multiprocessing

from pipe_front import worker

from graphdecode import LLM, Event, Request, SamplingParams

PROMPTS = ["417+385=", "rev oceanic=", "sort zebra=", "12+30="]


def test_another_process_gets_its_tokens_over_a_pipe() -> None:
    local, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=worker, args=(there, PROMPTS))
    process.start()
    there.close()  # so that a front that dies is seen here
    try:
        prompts = local.recv()
        ids: list[int] = []
        tokens: dict[int, list[int]] = {}
        reasons: dict[int, str] = {}

        def take(message: int | list[Event]) -> None:
            for event in message if isinstance(message, list) else []:
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
                if event.finish_reason is not None:
                    reasons[event.request_id] = event.finish_reason

        for prompt in prompts:
            local.send(Request(prompt, SamplingParams(temperature=0.0, max_tokens=16)))
            while not isinstance(message := local.recv(), int):
                take(message)
            ids.append(message)
        local.send(ids[2])
        while not reasons.keys() >= {ids[0], ids[1], ids[3]}:
            take(local.recv())
        local.send(None)
        with LLM("demo", device="cpu") as llm:
            texts = [llm.tokenizer.decode(tokens[i], skip_special_tokens=True).strip() for i in ids if i != ids[2]]
        assert texts == ["802", "cinaeco", "42"]
        assert {reasons[i] for i in (ids[0], ids[1], ids[3])} == {"stop"}
    finally:
        process.join(120)
        process.kill()
    assert process.exitcode == 0
