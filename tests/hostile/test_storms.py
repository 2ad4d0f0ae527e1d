"""Storms: Ctrl-C faster than anybody types it, threads whose number changes while they run; the engine serves on."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import graphdecode
from graphdecode import LLM, SamplingParams

PROMPTS = ["417+385=", "rev oceanic=", "sort zebra=", "12+30="]
SIGNALS = """
import os, queue, random, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from graphdecode import LLM, SamplingParams
prompts = ["417+385=", "rev oceanic=", "sort zebra=", "12+30="]
llm = LLM("demo", device="cpu", max_batch_size=3, max_sequence_length=64, page_size=4)
greedy, endless = SamplingParams(temperature=0.0), SamplingParams(max_tokens=None, ignore_eos=True)
def answers():
    return [output.outputs[0].text for output in llm.generate(prompts, greedy, use_tqdm=False)]
alone, rng, interrupted = answers(), random.Random(5), 0
wanted, done = queue.SimpleQueue(), threading.Event()
def storms():
    while True:
        count, pause = wanted.get()
        time.sleep(rng.random() * 0.01)
        for _ in range(count):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(pause)
        done.set()
threading.Thread(target=storms, daemon=True).start()
rounds = [(2, 0.0002)] * 10 + [(50, 0.0002)] * 4 + [(12, 0.06)]
for count, pause in rounds:
    try:
        done.clear()
        wanted.put((count, pause))
        while not done.is_set():
            llm.generate(prompts, endless, use_tqdm=False)
    except KeyboardInterrupt:
        interrupted += 1
    while True:
        try:
            done.wait()
            break
        except KeyboardInterrupt:
            pass
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert handler is signal.default_int_handler, handler
    assert answers() == alone
    while llm.engine.has_work:
        llm.step()
    assert llm.cache.pool.used == 0 and llm.num_waiting == 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
print(interrupted, len(rounds), flush=True)
os._exit(0)
"""


@pytest.mark.timeout(120)
def test_no_storm_of_ctrl_c_breaks_the_engine() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(graphdecode.__file__).parents[1])}
    ran = subprocess.run([sys.executable, "-c", SIGNALS], capture_output=True, text=True, env=environment, timeout=110)
    assert ran.returncode == 0, ran.stderr[-3000:]
    interrupted, rounds = map(int, ran.stdout.split())
    assert interrupted > rounds // 2  # or nothing was attacked


def test_the_number_of_threads_may_change_while_many_threads_generate() -> None:
    greedy = SamplingParams(temperature=0.0)
    with LLM("demo", device="cpu", max_batch_size=4, max_sequence_length=64, batch_invariant=True) as llm:
        alone = {prompt: llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS}
        wrong = []

        def ask(start: int) -> None:
            for number in range(start, start + 6):
                prompt = PROMPTS[number % len(PROMPTS)]
                given = llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].token_ids
                if given != alone[prompt]:
                    wrong.append((prompt, given))

        threads = [threading.Thread(target=ask, args=(start,)) for start in range(8)]
        for thread in threads:
            thread.start()
        before = torch.get_num_threads()
        try:
            while any(thread.is_alive() for thread in threads):
                for count in (1, 3, 2):
                    torch.set_num_threads(count)
                    threads[0].join(0.002)
        finally:
            torch.set_num_threads(before)
        assert not wrong
        assert llm.cache.pool.used == 0
