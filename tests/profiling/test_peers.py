"""Peers: found or not, right or not, timed in turn; none of them disturbs the others."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import attention as attention_module
from benchmarks.attention import PEERS as KERNEL_PEERS
from benchmarks.attention import AttentionProblem, AttentionShape, compare_attention, sdpa
from graphdecode.models import describe_model, resolve_model_path
from peers import contest as contest_module
from peers.contest import PEERS, Reference, compare_engines, parse_peers
from peers.llama_cpp import interleaved, why_not_gguf
from peers.peer import Peer, Transformers, TransformersStatic, Workload

ROOT = Path(__file__).parents[2]
DEMO = resolve_model_path("demo")
SMALL = Workload("cpu", "float32", (1, 2), prompt_tokens=5, new_tokens=3, threads=1)


class Absent(Peer):
    name = "absent"
    requires: ClassVar = {"no_such_module": "no-such-package"}

    def open(self, folder: Path, workload: Workload) -> None:
        raise AssertionError("an absent peer is not opened")

    generate = None


class Broken(Peer):
    name = "broken"

    def open(self, folder: Path, workload: Workload) -> None:
        raise OSError("out of luck\nand more")

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        raise AssertionError("what failed to open is not asked")


class Wrong(Peer):
    """Answers at once, with any tokens."""

    name = "wrong"

    def open(self, folder: Path, workload: Workload) -> None:
        self.closed = False

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        return [[7] * new_tokens for _ in prompts]

    def close(self) -> None:
        self.closed = True
        raise OSError("fails to close, too")


class Fainting(Transformers):
    """Right, until it is timed at batch 2."""

    name = "fainting"

    def seconds_per_step(self, prompts: list[list[int]], new_tokens: int) -> float:
        if len(prompts) == 2:
            raise RuntimeError("no memory")
        return super().seconds_per_step(prompts, new_tokens)


@pytest.fixture(scope="module")
def record() -> dict:
    peers = [Absent(), Transformers(), Broken(), Wrong(), Fainting(), TransformersStatic()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contest_module, "read_bandwidth", lambda device, repeats: 1e10)
        record = compare_engines(peers, DEMO, SMALL, repeats=2)
    assert peers[3].closed
    return record


def test_lists_of_peers_are_read_in_order_and_once() -> None:
    assert [peer.name for peer in parse_peers("transformers-static, transformers,,transformers")] == [
        "transformers-static",
        "transformers",
    ]
    assert [peer.name for peer in parse_peers("all")] == list(PEERS)
    assert parse_peers("") == []
    with pytest.raises(ValueError, match=r"tranformers, x;.*transformers-static"):
        parse_peers("tranformers,transformers,x")


@pytest.mark.alone  # what the tests behind it look at is measured here
def test_unavailable_peers_are_left_out_with_the_reason(record: dict) -> None:
    assert record["left_out"] == {"absent": "not installed: no-such-package", "broken": "OSError: out of luck"}


def test_peers_with_other_tokens_are_reported_without_times(record: dict) -> None:
    for row in record["rows"]:
        assert "standard deviations of the logits below the best" in row["left_out"]["wrong"]
        assert row["below_best_logit"]["wrong"] > 0.1 > record["tolerance"]
        for figures in ("ms_per_step", "turns_ms", "tokens_per_second", "times_faster_than", "times_floor"):
            assert "wrong" not in row[figures]


def test_a_peer_that_fails_at_one_batch_size_is_timed_at_the_others(record: dict) -> None:
    first, second = record["rows"]
    assert "fainting" in first["ms_per_step"]
    assert "fainting" not in first["left_out"]
    assert second["left_out"]["fainting"] == "RuntimeError: no memory"
    assert "fainting" not in second["ms_per_step"]


def test_transformers_gives_the_same_tokens_with_both_caches_and_is_timed(record: dict) -> None:
    assert [row["batch_size"] for row in record["rows"]] == [1, 2]
    for row in record["rows"]:
        for name in ("graphdecode", "transformers", "transformers-static"):
            assert row["same_tokens"][name] == 1.0
            assert row["below_best_logit"][name] <= record["tolerance"]
            assert len(row["turns_ms"][name]) == 2
            assert row["times_floor"][name] == pytest.approx(row["ms_per_step"][name] / row["floor_ms"])
        assert row["times_faster_than"]["graphdecode"] == 1.0
        assert row["floor_ms"] == pytest.approx(1000 * record["weight_bytes"] / 1e10)
    assert set(record["versions"]) == {"transformers"}


def test_this_engine_is_checked_against_the_greedy_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest_module.Graphdecode, "generate", Wrong.generate)
    with pytest.raises(ValueError, match="graphdecode itself, at batch size 1: gives other tokens"):
        compare_engines([], DEMO, SMALL, repeats=1)


def test_turns_are_taken_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    own = contest_module.Graphdecode.seconds_per_step

    def noted(self: Peer, prompts: list[list[int]], new_tokens: int) -> float:
        order.append(self.name)
        return own(self, prompts, new_tokens)

    monkeypatch.setattr(Peer, "seconds_per_step", noted)
    monkeypatch.setattr(contest_module, "read_bandwidth", lambda device, repeats: 1e10)
    compare_engines([Transformers()], DEMO, Workload("cpu", "float32", (1,), 5, 2, 1), repeats=3)
    assert order == ["graphdecode", "transformers"] * 4  # the first turn warms up


def test_outputs_of_another_length_or_vocabulary_are_refused() -> None:
    reference = Reference(DEMO, SMALL)
    prompts = [[5, 6, 7]]
    assert "gives [1] tokens, not 2" in reference.judge(prompts, [[1]], 2)[1]
    assert "outside the vocabulary of 259" in reference.judge(prompts, [[1, 259]], 2)[1]


@pytest.mark.parametrize("name", list(PEERS))
def test_every_peer_names_the_package_that_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    assert PEERS[name]().unavailable_reason(DEMO, SMALL).startswith("not installed: ")


SMALL_CONFIG: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


def checkpoint(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**SMALL_CONFIG | changes)).save_pretrained(folder)
    return folder


def test_rotary_pairs_become_neighbours() -> None:
    weight = torch.arange(2 * 6.0).view(12, 1)  # two heads of six channels
    assert interleaved(weight, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "default rope"),
        ({"attention_bias": True}, "without biases"),
        ({"mlp_bias": True}, "without biases"),
        ({"hidden_act": "gelu"}, "silu"),
        ({}, ""),
    ],
)
def test_models_that_are_not_written_are_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    found = why_not_gguf(describe_model(checkpoint(tmp_path, **changes)))
    assert reason in found
    assert bool(reason) == bool(found)


SMALL_SHAPES = AttentionShape("small", 4, 2, 16, torch.float16, torch.float16)
Calls = list[Callable[[], Tensor]]


def broken(problem: AttentionProblem) -> Calls:
    raise RuntimeError("no kernel\nfor this")


def short(problem: AttentionProblem) -> Calls:
    """Forgets the newest key."""
    q = problem.q.unsqueeze(2)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    return [partial(attend, q, k[:, :, :-1], v[:, :, :-1]) for k, v in problem.contiguous]


@pytest.fixture
def problem(monkeypatch: pytest.MonkeyPatch, device: str) -> AttentionProblem:
    monkeypatch.setattr(attention_module, "_MOST_COPIES", 2)
    monkeypatch.setattr(attention_module, "read_bandwidth", lambda device, repeats: 1e10)
    torch.manual_seed(0)
    return AttentionProblem(SMALL_SHAPES, 3, 37, torch.device(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_outputs_are_compared_before_times_and_wrong_ones_have_none(problem, dtype):
    problem.shape = replace(SMALL_SHAPES, dtype=dtype, kv_dtype=dtype)
    problem.q, problem.out = problem.q.to(dtype), problem.out.to(dtype)
    problem.caches = [(k.to(dtype), v.to(dtype)) for k, v in problem.caches]
    peers = {name: KERNEL_PEERS[name] for name in ("sdpa", "gather+sdpa")} | {"broken": broken, "short": short}
    results = {row["peer"]: row for row in compare_attention(peers, problem)}
    assert list(results) == ["graphdecode", "sdpa", "gather+sdpa", "broken", "short"]
    for name in ("graphdecode", "sdpa", "gather+sdpa"):
        assert results[name]["note"] == ""
        assert results[name]["error"] <= problem.shape.tolerance
        assert len(results[name]["rounds_us"]) == attention_module.ROUNDS
        assert results[name]["us"] > 0
        assert results[name]["of_read_bandwidth"] == pytest.approx(results[name]["bytes_per_s"] / 1e10)
    assert results["graphdecode"]["times_graphdecode"] == 1.0
    assert results["broken"]["note"] == "RuntimeError: no kernel"
    assert results["short"]["note"].startswith("gives another output: ")
    assert results["short"]["error"] > problem.shape.tolerance
    assert [results[name]["us"] for name in ("broken", "short")] == [None] * 2


def test_every_cache_is_attended_over(problem: AttentionProblem) -> None:
    def stuck(problem: AttentionProblem) -> Calls:
        """Is right for the first cache, and then gives that output again."""
        return [sdpa(problem)[0]] * len(problem.caches)

    assert len(problem.caches) == 2
    assert compare_attention({"stuck": stuck}, problem)[1]["note"].startswith("gives another output: ")
