"""This engine and its peers on one checkpoint: tokens are compared first, then engines are timed alternately.

Near-ties of logits may go either way, and all later tokens then differ. So each token is compared given the tokens
before it: by the distance of its logit from the largest one in a float32 reference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from tqdm import tqdm

from graphdecode.profiling.environment import read_bandwidth
from harness import alternated, table
from peers.llama_cpp import LlamaCpp
from peers.peer import TRANSFORMERS, Graphdecode, Peer, Tokens, Workload, attempt, choose, random_prompts

PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (*TRANSFORMERS, LlamaCpp)}
TOLERANCE = {"float32": 0.005, "float16": 0.05, "bfloat16": 0.25}
"""Shortfall allowed for rounding, in standard deviations of the logits; other models differ by whole deviations."""
_NOISY = 0.2  # spread above which a median of few rounds is noise


def parse_peers(text: str) -> list[Peer]:
    return [peer() for peer in choose(text, PEERS).values()]


def compare_engines(
    peers: Sequence[Peer], folder: Path, workload: Workload, *, repeats: int = 5, progress: bool = False
) -> dict[str, Any]:
    """Compare this engine with its peers at every batch size; return what `generate-*.json` holds of it.

    A peer that is absent, fails, or gives tokens that are not greedy is left out with its reason. The others alternate
    (A B A B ...), with a measurement of the read bandwidth between them.

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
            reason = peer.unavailable_reason(folder, workload) or attempt(partial(peer.open, folder, workload))[1]
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
        del reference  # its weights would take memory from the timed engines
        for each in tqdm(rounds, desc="timing", unit="batch size", disable=not progress, leave=False):
            each.time(repeats)
        return {
            "weight_bytes": own.weight_bytes,
            "tolerance": tolerance,
            "versions": {name: version for peer in engines.values() for name, version in peer.versions.items()},
            "left_out": left_out,
            "rows": [each.row(own.weight_bytes) for each in rounds],
        }


class Reference:
    """The checkpoint in transformers: weights rounded to the workload's dtype, arithmetic in float32."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, workload.dtype))
        self._model = model.float().to(workload.device).eval()
        self._device = workload.device
        self.tolerance = TOLERANCE[workload.dtype]
        self.vocab_size: int = model.config.vocab_size

    def judge(self, prompts: Tokens, answers: Tokens, new_tokens: int) -> tuple[float | None, str]:
        """Return an answer's shortfall in standard deviations of the logits (or None), and its fault (or "")."""
        lengths = [len(answer) for answer in answers]
        if lengths != [new_tokens] * len(prompts):
            return None, f"gives {lengths} tokens, not {new_tokens} for each of {len(prompts)} prompts"
        if not all(0 <= token < self.vocab_size for answer in answers for token in answer):
            return None, f"gives tokens outside the vocabulary of {self.vocab_size}"
        shortfall = max(self._row_shortfall(*row) for row in zip(prompts, answers, strict=True))
        if shortfall <= self.tolerance:
            return shortfall, ""
        return shortfall, (
            f"gives other tokens: at worst {shortfall:.2g} standard deviations of the logits below the best, "
            f"tolerance {self.tolerance:g}"
        )

    def _row_shortfall(self, prompt: list[int], answer: list[int]) -> float:
        ids = torch.tensor([[*prompt, *answer]], device=self._device)
        with torch.no_grad():
            logits = self._model(ids).logits[0, len(prompt) - 1 : -1].double()  # [len(answer), vocab_size]
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        return ((logits.amax(1) - chosen) / logits.std(1)).max().item()


class _Round:
    """All engines at one batch size; this engine is the first."""

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
        """Let every engine generate, as a warm-up too, and drop those with wrong tokens."""
        new_tokens = self._workload.new_tokens + 1  # the longest timed output
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
        """Time the remaining engines alternately, after a round of warm-up."""
        calls: dict[str, Callable[[], Any]] = {"": partial(read_bandwidth, self._workload.device, repeats=2)}
        for name, engine in self._engines.items():
            measure = partial(engine.seconds_per_step, self._prompts, self._workload.new_tokens)
            calls[name] = partial(attempt, measure)
        turns = alternated(calls, repeats, warm=1)
        self._bandwidth = statistics.median(turns.pop(""))
        for name, found in turns.items():
            self._seconds[name] = [seconds for seconds, failure in found if not failure]
            if failure := next((failure for _, failure in found if failure), ""):
                self._leave_out(name, failure)

    def row(self, weight_bytes: int) -> dict[str, Any]:
        """Return the figures; the floor is the time to read the weights once at the turns' median bandwidth."""
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
    """Return the share of tokens before the first difference."""
    pairs = zip(a, b, strict=True)
    equal = sum(next((i for i, (x, y) in enumerate(zip(p, q, strict=True)) if x != y), len(p)) for p, q in pairs)
    return equal / sum(map(len, a))


def contest_table(record: dict[str, Any], title: str) -> Table:
    """Return the figures of `compare_engines` as a table."""
    columns = {"batch": "{batch_size}", "engine": "{name}", "ms/step": "{ms:.3f}", "spread": "{spread:.0%}"}
    columns |= {"tokens/s": "{tokens:.1f}", "ratio": "{ratio:.2f}", "floors": "{floors:.2f}", "same": "{same:.0%}"}
    figures = {"ms": "ms_per_step", "tokens": "tokens_per_second", "ratio": "times_faster_than"}
    figures |= {"floors": "times_floor", "same": "same_tokens"}
    rows = []
    for row in record["rows"]:
        for name in row["ms_per_step"] | row["left_out"] | record["left_out"]:
            rows.append({"batch_size": row["batch_size"], "name": name})
            if name in row["ms_per_step"]:
                rows[-1] |= {key: row[figure][name] for key, figure in figures.items()}
                rows[-1]["spread"] = _spread(row["turns_ms"][name])
    return table(columns, rows, title)


def contest_notes(record: dict[str, Any], cache_bytes: int = 0) -> list[str]:
    """Return the lines below the table: floors, tokens, and the reasons for missing engines."""
    lines = [
        "ms/step: the median of alternating rounds; spread: their interquartile range.",
        "ratio: its time over graphdecode's; floors: its time over that of reading the weights once.",
        "same: tokens before the first that graphdecode chose otherwise. All are greedy up to near-ties: no token's "
        f"logit lies more than {record['tolerance']:g} standard deviations of the logits below the best.",
    ]
    lines += [
        f"batch {row['batch_size']}: read bandwidth {row['read_bandwidth'] / 1e9:.1f} GB/s; "
        f"reading the weights once takes {row['floor_ms']:.3f} ms"
        for row in record["rows"]
    ]
    if record["weight_bytes"] <= cache_bytes:
        lines.append("the weights fit in the last-level cache: floors may be below 1")
    noisy = [str(row["batch_size"]) for row in record["rows"] if max(map(_spread, row["turns_ms"].values())) > _NOISY]
    if noisy:
        lines.append(f"the machine was too noisy at batch {', '.join(noisy)}: see the spread, and run again")
    lines += [f"{name}: left out: {reason}" for name, reason in record["left_out"].items()]
    for row in record["rows"]:
        lines += [f"{name}: left out at batch {row['batch_size']}: {why}" for name, why in row["left_out"].items()]
    return lines


def _spread(turns: list[float]) -> float:
    """Return the interquartile range over the median; infinite if the median is not positive."""
    median = statistics.median(turns)
    if median <= 0:
        return math.inf
    first, _, third = statistics.quantiles(turns, n=4, method="inclusive") if len(turns) > 1 else (median,) * 3
    return (third - first) / median
