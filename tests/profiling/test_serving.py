"""An open-loop load is played as it was written, and counted right."""

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from repeated import holds

from benchmarks.servers import Setting, parse_servers
from benchmarks.serving import (
    Arrival,
    Lengths,
    check_fits,
    main,
    offered_rate,
    poisson_arrivals,
    serve,
    weighted_percentiles,
)
from graphdecode import LLM, BucketConfig

ROOT = Path(__file__).parent.parent.parent
TOOL = [sys.executable, str(ROOT / "tools" / "bench"), "serving"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", config=BucketConfig(max_batch_size=4, max_sequence_length=64)) as engine:
        yield engine


def test_every_request_is_served_and_every_token_counted(llm: LLM) -> None:
    arrivals = [Arrival(0.001 * i, 4 + i, 3 + i % 5) for i in range(12)]
    result = serve(llm, arrivals, progress=False)
    assert llm.cache.pool.used == 0
    assert result["requests"] == 12
    tokens = sum(arrival.answer_tokens for arrival in arrivals)
    fed = sum(int(size) * steps for size, steps in result["batch_sizes"].items())
    # a launch that is under way when a row ends has the row still
    assert tokens <= fed <= tokens + len(arrivals) * llm.engine.loop.lookahead
    assert result["tokens_per_second"] == pytest.approx(tokens / result["seconds"])
    assert result["offered_per_second"] == pytest.approx(1000)
    for kind in ("ttft_ms", "tpot_ms", "itl_ms", "queue_ms"):
        assert 0 < result[kind]["p50"] <= result[kind]["p90"] <= result[kind]["p99"] <= result[kind]["max"]


@pytest.mark.alone
def test_queue_times_of_a_burst_and_of_one_request(llm: LLM) -> None:
    burst = [Arrival(0.0, 4, 30)] * 12  # of which four have a row
    crowd = serve(llm, burst, seed=1, progress=False)
    assert crowd["queue_depth"]["max"] == 8
    assert crowd["queue_depth"]["p50"] >= 4
    assert crowd["queue_ms"]["max"] < 1000 * crowd["seconds"]
    assert crowd["offered_per_second"] is None
    lone = serve(llm, [Arrival(0.002, 4, 30)], seed=2, progress=False)
    assert lone["queue_depth"]["p50"] == 0

    def waits(attempt: int) -> bool:
        many = serve(llm, burst, seed=attempt, progress=False)
        one = serve(llm, [Arrival(0.002, 4, 30)], seed=attempt, progress=False)
        is_longer = one["queue_ms"]["max"] < many["queue_ms"]["p90"]
        return is_longer and many["queue_ms"]["p90"] > 0.3 * many["ttft_ms"]["p90"]

    assert holds(waits)
    assert (lone["requests"], lone["batch_sizes"]) == (1, {"1": 30})


def test_requests_that_do_not_fit_are_refused_before_serving(llm: LLM) -> None:
    steps = llm.stats.batch_sizes.total()
    with pytest.raises(ValueError, match=r"a request of 60 \+ 5 tokens does not fit: prompt and answer can have 64"):
        serve(llm, [Arrival(0.0, 4, 4), Arrival(0.0, 60, 5)], progress=False)
    check_fits(llm, [Arrival(0.0, 60, 4)])
    assert llm.stats.batch_sizes.total() == steps


def test_weighted_percentiles_count_by_weight() -> None:
    uneven = weighted_percentiles({0: 9.5, 3: 0.4, 7: 0.1, 9: 0.0})
    assert uneven == {"p50": 0.0, "p90": 0.0, "p99": 3.0, "max": 7.0}
    assert weighted_percentiles({2: 1.0}) == {"p50": 2.0, "p90": 2.0, "p99": 2.0, "max": 2.0}


def test_the_tool_serves_one_request_and_adds_to_a_record_of_batches(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text('{"batch_sizes": {"1": 2, "9": 1}}')
    load = ["--rates", "5", "--requests", "1", "--prompt-tokens", "3", "--answer-tokens", "4"]
    command = [*TOOL, *load, "--out", "out", "--record-batches", "b.json"]
    result = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "b.json").read_text()) == {"batch_sizes": {"1": 6, "9": 1}}
    written = json.loads((tmp_path / "out" / "serving.json").read_text())
    assert (written["schema"], written["model"], written["dtype"]) == (1, "demo", "float32")
    assert [(row["load"], row["requests"], row["batch_sizes"]) for row in written["rows"]] == [("5/s", 1, {"1": 4})]
    for text in ("TTFT p50", "TPOT", "ITL", "queued p50", "queue p50", "preempted", "5/s"):
        assert text in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rates": "5,x"}, "--rates must be numbers separated by commas, such as 5,20,80; got '5,x'"),
        ({"rates": "0"}, "--rates must be > 0"),
        ({"prompt_tokens": "9-3"}, "--prompt-tokens must be"),
        ({"requests": 0}, "the number of requests and a burst >= 1"),
        ({"answer_tokens": "5000"}, "tokens does not fit"),
        ({"record_batches": Path("none/b.json")}, "must be a file in a folder that exists"),
    ],
)
def test_the_tool_refuses_what_cannot_be_served(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        main(**options)


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_ctrl_c_keeps_the_loads_that_were_finished(tmp_path: Path) -> None:
    command = [*TOOL, "--rates", "500,0.01", "--requests", "8", "--out", str(tmp_path / "out")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "out" / "serving.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "500/s" in output
    assert [row["load"] for row in json.loads((tmp_path / "out" / "serving.json").read_text())["rows"]] == ["500/s"]


def test_poisson_arrivals_keep_rate_and_lengths() -> None:
    def made(rate: float) -> list[Arrival]:
        return poisson_arrivals(rate, 4000, Lengths(3, 9), Lengths(1, 5), seed=1)

    arrivals = made(50.0)
    assert arrivals == made(50.0)
    assert offered_rate(arrivals) == pytest.approx(50.0, rel=0.06)
    gaps = [later.at - earlier.at for earlier, later in itertools.pairwise(arrivals)]
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.1)  # as of an exponential distribution
    assert {a.prompt_tokens for a in arrivals} == set(range(3, 10))
    assert {a.answer_tokens for a in arrivals} == set(range(1, 6))
    assert [(a.prompt_tokens, a.answer_tokens) for a in made(5.0)] == [
        (a.prompt_tokens, a.answer_tokens) for a in arrivals
    ]


def test_bursts_arrive_together_at_the_same_mean_rate() -> None:
    arrivals = poisson_arrivals(50.0, 40000, Lengths(3, 9), Lengths(1, 5), burst=40)
    assert sorted(Counter(arrival.at for arrival in arrivals).values()) == [40] * 1000
    assert offered_rate(arrivals) == pytest.approx(50.0, rel=0.1)


def test_lengths_are_drawn_from_their_distribution() -> None:
    rng = random.Random(2)
    assert {Lengths.parse("--l", "7").draw(rng) for _ in range(20)} == {7}
    lengths = Lengths.parse("--l", "lognormal:64:0.8:400")
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert statistics.median(drawn) == pytest.approx(64, rel=0.08)
    assert min(drawn) >= 1
    assert max(drawn) == 400
    assert statistics.mean(drawn) > 75  # the long tail


@pytest.mark.parametrize("text", ["", "a", "0", "9-3", "-3", "lognormal:64", "lognormal:64:0.8", "lognormal:a:1:9"])
def test_impossible_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--l must be"):
        Lengths.parse("--l", text)


BENCH = Path(__file__).parents[2] / "tools" / "bench"


def test_our_server_is_measured_beside_the_engine_below_it(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH), "servers", "--clients", "3", "--answer-tokens", "6", "--rounds", "2"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "server.json").read_text())
    assert list(told["medians"]) == ["library", "server"]
    for name, turns in told["rounds"].items():
        assert len(turns) == 2
        assert all(value > 0 for turn in turns for value in turn.values()), name
    assert "of the library's" in done.stdout


def test_peers_are_named_with_the_python_that_has_them(tmp_path: Path) -> None:
    llama, vllm = parse_servers(["llama-cpp=/opt/python", "vllm"])
    file, folder = tmp_path / "model.gguf", tmp_path
    assert (llama.unavailable_reason(file), vllm.unavailable_reason(folder)) == ("", "")
    assert "GGUF" in llama.unavailable_reason(folder)
    assert "--checkpoint" in vllm.unavailable_reason(file)
    command = llama.command(Setting(file, 8, 512, (0, 1)), 1234)
    assert command[0] == "/opt/python"
    assert command[command.index("--n_threads") + 1] == "2"
    assert vllm.command(Setting(folder, 8, 512, (0,)), 1234)[0] == sys.executable
    with pytest.raises(ValueError, match="unknown peer: other; there are llama-cpp, vllm"):
        parse_servers(["other"])
