"""Decode speed with and without speculation on one model, alternating.

    tools/bench speculation                                   SmolLM2, n-gram drafts, batch 1 and 8
    tools/bench speculation --llama-python ENV/bin/python     beside llama.cpp's prompt lookup
    tools/bench speculation --model demo --kinds prose --new-tokens 32

Prompts are of four kinds: code to edit, a page to summarize, people to write as JSON, and free prose. Decoding is
greedy; the speed is that of the tokens after the first ones. Tokens are compared. llama.cpp runs on the same file.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from graphdecode import LLM, SamplingParams
from graphdecode.models import resolve_model_path
from harness import (
    Dtype,
    JsonProcess,
    LlamaPython,
    Model,
    Out,
    Rounds,
    alternated,
    elsewhere,
    medians,
    names,
    numbers,
    read,
    record,
    request_times,
    show,
    write,
)

KINDS = ("edit", "summary", "json", "prose")
PROMPTS = Path(__file__).with_name("speculation_prompts.json")  # of each kind eight questions, and how answers begin
Turn = tuple[float, list[list[int]]]  # tokens a second, and the answers


def conversations(kind: str, count: int) -> list[list[dict[str, str]]]:
    """Return conversations of a kind, 8 at most, each ending with the beginning of the assistant's message."""
    pairs = json.loads(PROMPTS.read_text())[kind][:count]
    return [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] for question, answer in pairs
    ]


class Ours:
    """An engine, and its draft statistics."""

    def __init__(self, model: str, batch_size: int, speculation: Any, dtype: str) -> None:
        self.llm = LLM(
            model,
            dtype=dtype,
            max_batch_size=batch_size,
            max_sequence_length=2048,
            batch_sizes=[batch_size],
            speculation=speculation,
            prefix_cache=False,
        )

    def prompts(self, kind: str, count: int) -> list[list[int]]:
        """Return the prompts of a kind as tokens."""
        tokenizer, chats = self.llm.tokenizer, conversations(kind, count)
        if tokenizer.chat_template is None:
            return [tokenizer.encode(each[0]["content"]) for each in chats]
        render = partial(tokenizer.apply_chat_template, continue_final_message=True, tokenize=False)
        return [tokenizer.encode(render(each), add_special_tokens=False) for each in chats]

    def turn(self, prompts: list[list[int]], new_tokens: int) -> Turn:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens)
        outputs = self.llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        _, began, ended = request_times(outputs)
        return (sum(map(len, answers)) - len(answers)) / (ended - began), answers

    def drafted(self) -> list[int]:
        """Return verifications, drafts and accepted drafts so far."""
        stats = self.llm.stats
        counts = (stats.spec_decode_num_drafts, stats.spec_decode_num_draft_tokens)
        return [*counts, stats.spec_decode_num_accepted_tokens]


def of_llama(process: JsonProcess, prompts: list[list[int]], new_tokens: int) -> Turn:
    """Let llama.cpp complete prompts one at a time."""
    answer = process.ask({"prompts": prompts, "new_tokens": new_tokens})
    return answer["tokens_per_second"], answer["tokens"]


def same_share(answers: list[list[int]], others: list[list[int]]) -> float:
    """Return the share of tokens before the first that differs, over all outputs."""
    same = total = 0
    for mine, theirs in zip(answers, others, strict=True):
        equal = [a == b for a, b in zip(mine, theirs, strict=False)]
        same += equal.index(False) if False in equal else len(equal)
        total += max(len(mine), len(theirs))
    return same / total


def measure(engines: Mapping[str, Callable[[], Turn]], drafted: Callable[[], list[int]], rounds: int) -> dict[str, Any]:
    answers = {name: turn()[1] for name, turn in engines.items()}
    engines["speculating"]()  # what its first turn used is captured now
    before = drafted()
    speeds = {name: [speed for speed, _ in turns] for name, turns in alternated(engines, rounds).items()}
    runs, drafts, accepted = (now - then for now, then in zip(drafted(), before, strict=True))
    ratios = [fast / slow for fast, slow in zip(speeds["speculating"], speeds["plain"], strict=True)]
    return {
        "tokens_per_second": medians(speeds),
        "turns": speeds,
        "times_plain": statistics.median(ratios),
        "same_tokens": same_share(answers["speculating"], answers["plain"]),
        "tokens": sum(map(len, answers["plain"])),
        "draft_tokens": drafts // rounds,
        "accepted_tokens": accepted // rounds,
        "tokens_per_verification": 1 + accepted / runs if runs else 1.0,
    }


def main(
    model: Model = "smollm2",
    dtype: Dtype = "auto",
    batch_sizes: Annotated[str, typer.Option(help="Separated by commas; 8 at most.")] = "1,8",
    kinds: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(KINDS),
    new_tokens: Annotated[int, typer.Option(help="Of an answer at most.")] = 96,
    rounds: Rounds = 3,
    speculation: Annotated[str, typer.Option(help="A method, or the section [speculation] as JSON.")] = "ngram",
    llama_python: LlamaPython = None,
    llama_drafts: Annotated[int, typer.Option(help="Of llama.cpp's prompt lookup.")] = 4,
    llama_plain: Annotated[bool, typer.Option("--llama-plain", help="Let llama.cpp repack no weights.")] = False,
    out: Out = None,
) -> None:
    method = json.loads(speculation) if speculation.startswith("{") else speculation
    run = record(model=model, dtype=dtype, speculation=method, new_tokens=new_tokens, rounds=rounds, rows=[])
    run |= {"llama_plain": llama_plain, "llama_drafts": llama_drafts}
    rows = run["rows"]
    for batch_size in numbers(batch_sizes):
        plain, fast = Ours(model, batch_size, None, dtype), Ours(model, batch_size, method, dtype)
        peers: dict[str, JsonProcess] = {}
        if llama_python is not None and batch_size == 1:
            file, end = resolve_model_path(model), (torch.get_num_threads(), *["plain"] * llama_plain)
            for name, drafts in (("llama.cpp", 0), ("llama.cpp lookup", llama_drafts)):
                peers[name] = JsonProcess(elsewhere(llama_python, "llama-lookup", file, drafts, *end))
        for kind in names(kinds, KINDS, "--kinds"):
            prompts = plain.prompts(kind, batch_size)
            engines = {"plain": plain, "speculating": fast}
            turns = {name: partial(engine.turn, prompts, new_tokens) for name, engine in engines.items()}
            turns |= {name: partial(of_llama, process, prompts, new_tokens) for name, process in peers.items()}
            rows.append({"kind": kind, "batch_size": batch_size} | measure(turns, fast.drafted, rounds))
        for engine in (plain, fast):
            engine.llm.close()
        for process in peers.values():
            process.close()
    others = dict.fromkeys(name for row in rows for name in row["tokens_per_second"])
    speeds = {name: f"{{tokens_per_second[{name}]:.1f}}" for name in ("plain", "speculating", *others)}
    columns = {"batch": "{batch_size}", "prompts": "{kind}"} | speeds
    columns |= {"times": "{times_plain:.2f}", "tokens a verification": "{tokens_per_verification:.2f}"}
    show(columns | {"same": "{same_tokens:.0%}"}, rows)
    write(out, {"runs": [*read(out, runs=[])["runs"], run]})
