"""A server whose model is on two ranks: what its clients see when one dies, and what is left when it ends."""

import os
import signal
import subprocess
import time
from pathlib import Path

from served import Served, serving

QUESTION = {"model": "demo", "prompt": "417+385=", "temperature": 0, "max_tokens": 8}
LONG = {"model": "demo", "prompt": "rev abc=", "max_tokens": 200, "ignore_eos": True, "stream": True}
OPTIONS = ("--tensor-parallel", "2", "--max-batch-size", "2", "--max-sequence-length", "256")


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, check=False)
    own = [int(each) for each in found.stdout.split()]
    return own + [each for child in own for each in children(child)]


def until_ended(pids: list[int], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def answer(server: Served) -> str:
    with server.client() as http:
        response = http.post("/v1/completions", json=QUESTION)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]


def test_a_killed_rank_is_named_new_ranks_serve_and_ctrl_c_leaves_none() -> None:
    with serving(*OPTIONS) as server, server.client() as http:
        assert answer(server) == "802"
        engine = server.engine_pid
        (rank,) = children(engine)
        assert http.get("/health").status_code == 200
        with http.stream("POST", "/v1/completions", json=LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(rank, signal.SIGKILL)
            rest = "\n".join(lines)
        assert '"error"' in rest
        assert "rank 1 of 2 was ended by SIGKILL" in rest
        until_ended([rank, engine])
        seen = set()
        end = time.monotonic() + 120
        while (status := http.get("/health").status_code) != 200:
            seen.add(status)
            assert time.monotonic() < end
            time.sleep(0.05)
        assert seen == {503}
        assert any("rank 1 of 2 was ended by SIGKILL" in line for line in server.lines)
        started = children(server.process.pid)
        assert len(started) == 2
        assert not {engine, rank} & set(started)
        with http.stream("POST", "/v1/completions", json=LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            for pid in (server.process.pid, *started):  # as a terminal sends it: to all
                os.kill(pid, signal.SIGINT)
            assert "[DONE]" in "\n".join(lines)
        assert server.process.wait(20) == 0
        until_ended(started)
