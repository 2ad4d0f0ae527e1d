"""What a token costs the host when a launch runs one step, and when it runs many.

Time is that of a long answer less a short one, so that neither prefill nor the first launch count; the engines take
turns, and medians are compared. The host's share is the time in which it does not wait for a GPU. On a CPU the step is
the host's own work, and both are the same.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Annotated, Any

import typer

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.engine.runner import Launch
from graphdecode.engine.steps import StepTokens
from graphdecode.models import resolve_device
from harness import Device, Dtype, Model, Out, Rounds, Sizes, in_turn, numbers, record, show, write

PROMPT_TOKENS = 32


class Engine:
    """An engine with so many steps a launch, and a clock for the time that it waits.

    Args:
        model: as for `LLM`.
        dtype: of the weights.
        device: "cpu" or "cuda".
        batch_size: rows.
        steps_per_launch: of the loop; 1 is no loop.
        capacity: tokens of a prompt and its answer.
    """

    def __init__(
        self, model: str, dtype: str, device: str, batch_size: int, steps_per_launch: int, capacity: int
    ) -> None:
        config = BucketConfig(
            max_batch_size=batch_size,
            max_sequence_length=capacity,
            batch_sizes=[batch_size],
            steps_per_launch=steps_per_launch,
        )
        self.llm = LLM(model, config=config, dtype=dtype, device=device, prefix_cache=False)
        self.steps_per_launch = steps_per_launch
        self.batch_size = batch_size
        self.waited = 0.0
        self._read = self.llm.engine.runner.read
        self.llm.engine.runner.read = self._timed_read  # type: ignore[method-assign]

    def _timed_read(self, launch: Launch, *, logprobs: int | None = None) -> list[StepTokens]:
        if launch.done is not None:
            began = time.perf_counter()
            launch.done.synchronize()
            self.waited += time.perf_counter() - began
        return self._read(launch, logprobs=logprobs)

    def answer(self, new_tokens: int) -> tuple[float, float, list[list[int]]]:
        """Answer a full batch; return the seconds it took, those of them that the host did not wait, and the tokens."""
        prompts = [[97 + (7 * row + place) % 26 for place in range(PROMPT_TOKENS)] for row in range(self.batch_size)]
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        self.waited, began = 0.0, time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return seconds, seconds - self.waited, [output.outputs[0].token_ids for output in outputs]

    def per_token(self, new_tokens: int, before: int) -> tuple[float, float]:
        """Return the seconds of a token, and the host's, behind the first `before` ones."""
        short_seconds, short_host, _ = self.answer(before)
        seconds, host, _ = self.answer(before + new_tokens)
        tokens = new_tokens * self.batch_size
        return (seconds - short_seconds) / tokens, (host - short_host) / tokens


def main(
    model: Model = "demo",
    dtype: Dtype = "float32",
    steps_per_launch: Sizes = "1,8,64",
    batch_size: Annotated[int, typer.Option(help="Rows.")] = 1,
    new_tokens: Annotated[int, typer.Option(help="Tokens that are timed.")] = 256,
    repeats: Rounds = 5,
    device: Device = "auto",
    out: Out = None,
) -> None:
    """Time the same answers with different numbers of steps a launch, and check that they are the same."""
    place = resolve_device(device).type
    lengths = numbers(steps_per_launch, "--steps-per-launch")
    before = max(lengths)  # the same for all, and a whole launch of each
    capacity = PROMPT_TOKENS + before + new_tokens
    engines = {str(length): Engine(model, dtype, place, batch_size, length, capacity) for length in lengths}
    answers = {name: engine.answer(before + new_tokens)[2] for name, engine in engines.items()}  # warm-up, too
    calls = {name: partial(engine.per_token, new_tokens, before) for name, engine in engines.items()}
    rows: list[dict[str, Any]] = []
    for name, times in in_turn(calls, repeats).items():
        bucket = engines[name].llm.graphs.report().buckets[-1]
        total, host = (1e6 * statistics.median(values) for values in zip(*times, strict=True))
        rows.append(
            {
                "steps_per_launch": engines[name].steps_per_launch,
                "loop": bucket.loop,
                "loop_reason": bucket.loop_reason,
                "us_per_token": total,
                "host_us_per_token": host,
                "same_tokens": answers[name] == answers[str(lengths[0])],
            }
        )
        engines[name].llm.close()
    columns = {"steps a launch": "{steps_per_launch}", "loop": "{loop}", "us/token": "{us_per_token:.1f}"}
    columns |= {"host us/token": "{host_us_per_token:.1f}", "same tokens": "{same_tokens}"}
    show(columns, rows, f"{model} on {place}")
    facts = {"model": model, "dtype": dtype, "device": place, "batch_size": batch_size, "new_tokens": new_tokens}
    write(out, record(place, **facts, rows=rows))
    if not all(row["same_tokens"] for row in rows):
        raise SystemExit("the answers differ")
