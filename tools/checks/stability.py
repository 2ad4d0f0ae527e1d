"""How many sampled tokens differ where a request runs otherwise: again, in chunks, in a batch, on other instructions.

    tools/check stability --isa avx2 --isa portable
    PYTHONPATH=OTHER_CHECKOUT tools/check stability       of another commit's package

Conversations are answered at temperature 1, each seed and prompt alone first. A divergence is an answer's first other
token; tokens behind it are not counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Annotated, Any

import typer

from graphdecode import LLM, SamplingParams
from harness import Model, Out, command_of, record, write

PROMPTS = (
    "Tell me a story about a dragon.", "What is gravity?", "Write a haiku about rain.", "How do I bake bread?",
    "Explain recursion to a child.", "Name three famous paintings.", "Why is the sky blue?",
    "Give me tips for a job interview.", "What happened in 1969?", "Describe a sunset in Rome.",
)  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {"alone": {}, "chunks of 8": {"max_prefill_tokens": 8}, "batch of 10": {}}


def answers(model: str, seeds: int, tokens: int, way: str, times: int = 1) -> list[list[int]]:
    """Return the answers to all prompts under all seeds, in order; of several runs of each the last counts."""
    talks = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    found: list[list[int]] = []
    with LLM(model, device="cpu", **WAYS[way]) as llm:
        for seed in range(seeds):
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens)
            for part in [talks] if way == "batch of 10" else [[talk] for talk in talks]:
                for _ in range(times):
                    outputs = llm.chat(part, params)  # type: ignore[arg-type]
                found += [output.outputs[0].token_ids for output in outputs]
    return found


def compared(first: list[list[int]], second: list[list[int]]) -> tuple[int, int]:
    """Return the number of divergences, and of compared tokens."""
    tokens = divergences = 0
    for one, other in zip(first, second, strict=True):
        places = [place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]]
        divergences += bool(places)
        tokens += places[0] + 1 if places else len(one)
    return divergences, tokens


def main(
    model: Model = "smollm2",
    seeds: Annotated[int, typer.Option(help="Of each prompt.", min=1)] = 8,
    tokens: Annotated[int, typer.Option(help="Of an answer.", min=1)] = 64,
    isa: Annotated[list[str] | None, typer.Option(help="GRAPHDECODE_ISA of another run.")] = None,
    print_answers: Annotated[bool, typer.Option(hidden=True)] = False,
    out: Out = None,
) -> None:
    alone = answers(model, seeds, tokens, "alone")
    if print_answers:
        print(json.dumps(alone))
        raise typer.Exit
    others = {"again": answers(model, seeds, tokens, "alone", 2)}
    others |= {way: answers(model, seeds, tokens, way) for way in WAYS if way != "alone"}
    for name in isa or ():
        command = command_of("check", "stability", "--model", model, "--seeds", seeds, "--tokens", tokens)
        environment = os.environ | {"GRAPHDECODE_ISA": name}
        done = subprocess.run([*command, "--print-answers"], env=environment, stdout=subprocess.PIPE, check=True)
        others[name] = json.loads(done.stdout)
    rows = []
    for way, given in others.items():
        divergences, count = compared(alone, given)
        rows.append({"way": way, "divergences": divergences, "tokens": count, "per_10000": 1e4 * divergences / count})
        print(f"{way:12} {divergences:4} of {count} tokens, {rows[-1]['per_10000']:.1f} in 10,000", file=sys.stderr)
    write(out, record(model=model, seeds=seeds, rows=rows))
