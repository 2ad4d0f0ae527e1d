"""This engine and its peers on one checkpoint: their tokens are compared first, then they are timed in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from graphdecode.profiling.bandwidth import read_bandwidth
from harness import in_turn
from peers.gpu_engines import NanoVllm, Sglang, Vllm
from peers.greedy import Reference
from peers.llama_cpp import LlamaCpp
from peers.peer import Graphdecode, Peer, Tokens, Workload, attempt, choose, random_prompts
from peers.transformers_generate import Transformers, TransformersCompiled, TransformersStatic

PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (Transformers, TransformersStatic, TransformersCompiled, LlamaCpp, Vllm, Sglang, NanoVllm)
}


def parse_peers(text: str) -> list[Peer]:
    """Return the peers of a list such as `"transformers,llama-cpp"`, in its order, each once; `"all"` is all of them.

    Raises:
        ValueError: one is unknown; names those that there are.
    """
    return [peer() for peer in choose(text, PEERS)]


def compare_engines(
    peers: Sequence[Peer], folder: Path, workload: Workload, *, repeats: int = 5, progress: bool = False
) -> dict[str, Any]:
    """Compare this engine with its peers at every batch size of the workload.

    A peer that is absent, that fails, or whose tokens are not the greedy ones is left out with its reason, and does
    not disturb the others. These are timed in turn (A B A B ...), and the memory between them, whose speed is not the
    same for long.

    Args:
        peers: in the order of the table.
        folder: the checkpoint.
        workload: what to run.
        repeats: turns of each engine.
        progress: show a bar on standard error.

    Returns:
        `weight_bytes` that a step reads, `tolerance` of the tokens, `versions` of the peers' packages, `left_out`
        (peer -> reason) and `rows`, one for each batch size, with the fields that `_Round.row` gives.

    Raises:
        ValueError: this engine's own tokens are not the greedy ones.
    """
    own = Graphdecode()
    left_out: dict[str, str] = {}
    with ExitStack() as opened:
        own.open(folder, workload)
        opened.callback(own.close)
        engines: dict[str, Peer] = {own.name: own}
        for peer in tqdm(peers, desc="opening peers", unit="peer", disable=not progress, leave=False):
            reason = peer.why_not(folder, workload) or attempt(partial(peer.open, folder, workload))[1]
            if reason:
                left_out[peer.name] = reason
                continue
            engines[peer.name] = peer
            opened.callback(attempt, peer.close)
        reference = Reference(folder, workload)
        rounds = [_Round(engines, size, workload, reference.vocab_size) for size in workload.batch_sizes]
        for each in tqdm(rounds, desc="comparing tokens", unit="batch size", disable=not progress, leave=False):
            each.compare(reference)
        tolerance = reference.tolerance
        del reference  # its weights would take memory from those that are timed
        for each in tqdm(rounds, desc="timing", unit="batch size", disable=not progress, leave=False):
            each.time(repeats)
        return {
            "weight_bytes": own.weight_bytes,
            "tolerance": tolerance,
            "versions": {name: version for peer in engines.values() for name, version in peer.versions.items()},
            "left_out": left_out,
            "rows": [each.row(own.weight_bytes) for each in rounds],
        }


class _Round:
    """All engines at one batch size; this engine is the first of them."""

    def __init__(self, engines: Mapping[str, Peer], batch_size: int, workload: Workload, vocab_size: int) -> None:
        self._prompts = random_prompts(batch_size, workload.prompt_tokens, vocab_size)
        self._workload = workload
        self._engines = dict(engines)
        self._own = next(iter(engines))
        self._left_out: dict[str, str] = {}
        self._same_tokens: dict[str, float] = {}
        self._shortfall: dict[str, float | None] = {}
        self._seconds: dict[str, list[float]] = {}
        self._bandwidth = 0.0

    def compare(self, reference: Reference) -> None:
        """Let every engine answer, which warms it up too, and leave out those whose tokens are wrong."""
        new_tokens = self._workload.new_tokens + 1  # the longest answer that is timed
        answers: dict[str, Tokens] = {}
        for name, engine in list(self._engines.items()):
            answer, wrong = attempt(partial(engine.generate, self._prompts, new_tokens))
            if answer is not None:
                self._shortfall[name], wrong = reference.judge(self._prompts, answer, new_tokens)
                answers[name] = answer
            if wrong:
                self._leave_out(name, wrong)
        self._same_tokens = {
            name: _shared_prefix(answers[self._own], answers[name]) for name in answers if name in self._engines
        }

    def time(self, repeats: int) -> None:
        """Time the engines that are left, in turn; a first turn warms up and does not count."""
        calls: dict[str, Callable[[], Any]] = {"": partial(read_bandwidth, self._workload.device, repeats=2)}
        for name, engine in self._engines.items():
            measure = partial(engine.seconds_per_step, self._prompts, self._workload.new_tokens)
            calls[name] = partial(attempt, measure)
        turns = in_turn(calls, repeats, warm=1)
        self._bandwidth = statistics.median(turns.pop(""))
        for name, found in turns.items():
            self._seconds[name] = [seconds for seconds, failure in found if not failure]
            if failure := next((failure for _, failure in found if failure), ""):
                self._leave_out(name, failure)

    def row(self, weight_bytes: int) -> dict[str, Any]:
        """Return the figures: medians, each engine's turns, ratios to this engine, and multiples of the floor.

        The floor is the time that reading the weights once takes at the median bandwidth of the turns.
        """
        seconds = {name: statistics.median(self._seconds[name]) for name in self._engines}
        floor = weight_bytes / self._bandwidth
        return {
            "batch_size": len(self._prompts),
            "read_bandwidth": self._bandwidth,
            "floor_ms": 1000 * floor,
            "ms_per_step": {name: 1000 * value for name, value in seconds.items()},
            "turns_ms": {name: [1000 * value for value in self._seconds[name]] for name in seconds},
            "tokens_per_second": {name: len(self._prompts) / value for name, value in seconds.items()},
            "times_faster_than": {name: value / seconds[self._own] for name, value in seconds.items()},
            "times_floor": {name: value / floor for name, value in seconds.items()},
            "same_tokens": {name: self._same_tokens[name] for name in seconds},
            "below_best_logit": self._shortfall,
            "left_out": self._left_out,
        }

    def _leave_out(self, name: str, reason: str) -> None:
        if name == self._own:
            raise ValueError(f"{name} itself, at batch size {len(self._prompts)}: {reason}")
        del self._engines[name]
        self._left_out[name] = reason


def _shared_prefix(a: Tokens, b: Tokens) -> float:
    """Return the share of tokens before the first difference; near-ties of logits may go either way."""
    pairs = zip(a, b, strict=True)
    equal = sum(next((i for i, (x, y) in enumerate(zip(p, q, strict=True)) if x != y), len(p)) for p, q in pairs)
    return equal / sum(map(len, a))
