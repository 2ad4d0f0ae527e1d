"""Passes of prompts: time, operations per second, and the host's part, captured and by launches.

python -m gpu_checks.prompts DEVICE SHAPE,... WEIGHTS,... TOKENS,...      known figures are not measured again
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

import gpu_checks.absent  # noqa: F401 (first)
from gpu_checks.clock import ClockUnderLoad
from gpu_checks.figures import Figures
from gpu_checks.models import prompt_runner_of, shape_of
from graphdecode.engine.prompts import PromptChunk
from graphdecode.engine.runner import LaunchPlan, Runner
from graphdecode.engine.steps import SequenceMemory

REPEATS = 5


def operations_of(runner: Runner, tokens: int) -> int:
    """Return the operations of a prompt's products and attention; its last token's logits are a step's."""
    config = runner.model.config
    products = sum(form.shape[-2] * form.shape[-1] for name, form in runner.model.products() if "lm_head" not in name)
    attention = 2 * tokens * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return 2 * tokens * (products + attention // 2)


def pass_ms(runner: Runner, tokens: int) -> tuple[float, float]:
    """Return the time of a prompt's passes, and the host's until all are launched."""
    most = runner.setting.prefill_tokens
    times, launched = [], []
    name = object()
    runner.cache.add(name, ())
    runner.cache.reserve(name, tokens)
    memory = SequenceMemory(runner.cache.pages_of(name), runner.cache.state_row_of(name))
    chunks = [
        PromptChunk([1 + place % 97 for place in range(begin, min(begin + most, tokens))], begin, memory)
        for begin in range(0, tokens, most)
    ]
    for _ in range(REPEATS + 2):  # the first may be captured after it
        began = time.perf_counter()
        for chunk in chunks:
            runner.stage(chunks=[chunk])
            runner.launch(LaunchPlan.of_chunks([chunk]))
        launched.append(1000 * (time.perf_counter() - began))
        if not runner.is_cpu:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    runner.cache.free(name)
    return statistics.median(times[2:]), statistics.median(launched[2:])


def measure(device: str, shape: str, weights: str, lengths: list[int], figures: Figures) -> None:
    """Measure prompts of some lengths."""
    name = shape + (f":{weights}" if weights != "bf16" else "")
    keys = {tokens: f"prompt {name}, {tokens} tokens" for tokens in lengths}
    if all(key in figures for key in keys.values()):
        return
    layers = 8 if shape == "llama-3.1-8b" and device == "cuda" else None
    path = shape_of(shape, layers=layers, is_small=device != "cuda")
    runner = prompt_runner_of(path, max(lengths), device, None if weights == "bf16" else weights)
    runner.graphs.capture(progress=False)
    for tokens, key in keys.items():
        if key in figures:
            continue
        with ClockUnderLoad() as clock:
            taken_ms, host_ms = pass_ms(runner, tokens)
        rate = operations_of(runner, tokens) / taken_ms * 1000
        captured = [bucket.bucket for bucket in runner.reports()["prompts"].buckets if bucket.state == "captured"]
        figures.add(
            key, ms=taken_ms, host_ms=host_ms, layers=layers, operations_per_s=rate,
            captured=captured, clock=clock.medians(),
        )  # fmt: skip
    runner.close()


def main() -> None:
    """Measure the prompts of the arguments."""
    device, shapes, weights, lengths = sys.argv[1:]
    figures = Figures()
    for shape in shapes.split(","):
        for each in weights.split(","):
            measure(device, shape, each, [int(length) for length in lengths.split(",")], figures)


if __name__ == "__main__":
    main()
