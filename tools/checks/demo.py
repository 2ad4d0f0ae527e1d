"""The demo model: greedy exact match on fresh samples of each task, at least 99%."""

from __future__ import annotations

import random
from typing import Annotated, Any

import typer

from demo_tasks import TASKS, is_correct, sample
from graphdecode import LLM, SamplingParams
from harness import Model, show

REQUIRED_SHARE = 0.99
MAX_TOKENS = 16  # the longest answer is 8 letters and the end of the sequence


def main(
    model: Model = "demo",
    samples: Annotated[int, typer.Option(help="Of each task.", min=1)] = 1000,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 12345,
    shown: Annotated[int, typer.Option("--show", help="Wrong answers to print of each task.")] = 3,
) -> None:
    """Measure each task; exit code 1 if one is below the goal."""
    llm = LLM(model)
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    for task in TASKS:
        rng = random.Random(f"{seed} {task}")
        asked = [sample(task, rng) for _ in range(samples)]
        results = llm.generate([prompt for prompt, _ in asked], greedy)
        texts = [result.outputs[0].text for result in results]
        misses = [
            f"{prompt} -> {text!r}, not {answer!r}"
            for (prompt, answer), text in zip(asked, texts, strict=True)
            if not is_correct(prompt, text)
        ]
        share = 1 - len(misses) / samples
        rows.append({"task": task, "exact": samples - len(misses), "share": share})
        wrong += misses[:shown]
    columns = {"task": "{task}", "exact": "{exact}", "samples": str(samples), "share": "{share:.2%}"}
    show(columns | {"required": f"{REQUIRED_SHARE:.0%}"}, rows, f"model {model}")
    for line in wrong:
        print(f"wrong: {line}")
    raise typer.Exit(any(row["share"] < REQUIRED_SHARE for row in rows))
