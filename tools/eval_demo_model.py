"""Measure the demo model through this project's engine: exact match on fresh samples of each task.

    python tools/eval_demo_model.py

Greedy decoding; an answer counts if its text is exactly right: with nothing before it, and ended where it ends. Exits
1 if any task is below 99%.
"""

import argparse
import random
import sys
import time

from rich.console import Console
from rich.table import Table

from demo_tasks import TASKS, is_correct, sample
from graphdecode import LLM, SamplingParams

REQUIRED_SHARE = 0.99
MAX_TOKENS = 16  # the longest answer is 8 letters and the end of the sequence


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="model name or folder (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=1000, help="of each task (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=12345, help="of the samples (default: %(default)s)")
    parser.add_argument("--show", type=int, default=3, help="wrong answers to print per task (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.samples <= 0:
        parser.error(f"--samples must be positive, got {arguments.samples}")

    llm = LLM(arguments.model)
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    table = Table("task", "exact", "samples", "share", "required", "seconds", title=f"model {arguments.model}")
    wrong: list[str] = []
    passed = True
    for task in TASKS:
        rng = random.Random(f"{arguments.seed} {task}")
        samples = [sample(task, rng) for _ in range(arguments.samples)]
        start = time.perf_counter()
        results = llm.generate([prompt for prompt, _ in samples], greedy)
        seconds = time.perf_counter() - start
        texts = [result.outputs[0].text for result in results]
        misses = [
            f"{prompt} -> {text!r}, not {answer!r}"
            for (prompt, answer), text in zip(samples, texts, strict=True)
            if not is_correct(prompt, text)
        ]
        exact = len(samples) - len(misses)
        share = exact / len(samples)
        passed &= share >= REQUIRED_SHARE
        row = (str(exact), str(len(samples)), f"{share:.2%}", f"{REQUIRED_SHARE:.0%}", f"{seconds:.2f}")
        table.add_row(task, *row, style=None if share >= REQUIRED_SHARE else "red")
        wrong += misses[: arguments.show]

    Console().print(table)
    for line in wrong:
        print(f"wrong: {line}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
