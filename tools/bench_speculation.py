"""Decode speed with and without speculation on one model, in turns: A B A B ...

    python tools/bench_speculation.py                                   SmolLM2, n-gram drafts, batch 1 and 8
    python tools/bench_speculation.py --llama-python ENV/bin/python     beside llama.cpp's prompt lookup
    python tools/bench_speculation.py --model demo --kinds prose --new-tokens 32

Prompts of four kinds: code to be edited, a page to be summarised, people to be written as JSON, and free prose. A turn
answers them greedily with the same engine; its speed is that of the tokens behind the first ones. The tokens are
compared, too. llama.cpp runs in another environment's Python (it needs llama-cpp-python alone) on the same file.
"""

import json
import statistics
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from graphdecode import LLM, SamplingParams
from graphdecode.models import resolve_model_path
from graphdecode.profiling.environment import describe_environment
from speculation_texts import KINDS, conversations

LLAMA = Path(__file__).parent / "llama_lookup.py"
Turn = tuple[float, list[list[int]]]  # tokens a second, and the answers


class Ours:
    """An engine, and what its drafts came to.

    Args:
        model: as for `LLM`.
        batch_size: rows.
        speculation: as for `LLM`.
        dtype: of the weights.
    """

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
        """Return the prompts of a kind as tokens, up to the beginning of the answer."""
        tokenizer = self.llm.tokenizer
        if tokenizer.chat_template is None:
            texts = [each[0]["content"] for each in conversations(kind, count)]
            return [tokenizer.encode(text) for text in texts]
        rendered = (
            tokenizer.apply_chat_template(each, continue_final_message=True, tokenize=False)
            for each in conversations(kind, count)
        )
        return [tokenizer.encode(text, add_special_tokens=False) for text in rendered]

    def turn(self, prompts: list[list[int]], new_tokens: int) -> Turn:
        """Answer the prompts together."""
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens)
        outputs = self.llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        begins = max(output.metrics.first_token_time for output in outputs)
        seconds = max(output.metrics.finished_time for output in outputs) - begins
        return (sum(map(len, answers)) - len(answers)) / seconds, answers

    def drafted(self) -> list[int]:
        """Return runs of drafts, drafts and accepted drafts up to now."""
        stats = self.llm.stats
        counts = (stats.spec_decode_num_drafts, stats.spec_decode_num_draft_tokens)
        return [*counts, stats.spec_decode_num_accepted_tokens]


class Llama:
    """llama.cpp in a process of another environment: one sequence at a time.

    Args:
        python: of the environment.
        file: GGUF.
        drafts: of its prompt lookup; 0: none.
        is_plain: do not let it repack its weights.
    """

    def __init__(self, python: Path, file: Path, drafts: int, *, is_plain: bool) -> None:
        command = [str(python), str(LLAMA), str(file), str(drafts), str(torch.get_num_threads()), *["plain"] * is_plain]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def turn(self, prompts: list[list[int]], new_tokens: int) -> Turn:
        """Answer the prompts one by one; the speed is that of one."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process has no pipes")
        print(json.dumps({"prompts": prompts, "new_tokens": new_tokens}), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return answer["tokens_per_second"], answer["tokens"]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def same_share(answers: list[list[int]], others: list[list[int]]) -> float:
    """Return the share of tokens before the first that differs, over all answers."""
    same = total = 0
    for mine, theirs in zip(answers, others, strict=True):
        equal = [a == b for a, b in zip(mine, theirs, strict=False)]
        same += equal.index(False) if False in equal else len(equal)
        total += max(len(mine), len(theirs))
    return same / total


def measure(engines: dict[str, Callable[[], Turn]], drafted: Callable[[], list[int]], rounds: int) -> dict[str, Any]:
    """Let the engines take turns, and return the figures of all.

    Args:
        engines: what takes a turn, by name; "plain" and "speculating" among them.
        drafted: returns the counts of the speculating one.
        rounds: turns of each, after those that do not count.
    """
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    answers = {name: turn()[1] for name, turn in engines.items()}
    engines["speculating"]()  # what its first turn used is captured now
    before = drafted()
    for _ in range(rounds):
        for name, turn in engines.items():
            speeds[name].append(turn()[0])
    runs, drafts, accepted = (now - then for now, then in zip(drafted(), before, strict=True))
    ratios = [fast / slow for fast, slow in zip(speeds["speculating"], speeds["plain"], strict=True)]
    return {
        "tokens_per_second": {name: statistics.median(values) for name, values in speeds.items()},
        "turns": speeds,
        "times_plain": statistics.median(ratios),
        "same_tokens": same_share(answers["speculating"], answers["plain"]),
        "tokens": sum(map(len, answers["plain"])),
        "draft_tokens": drafts // rounds,
        "accepted_tokens": accepted // rounds,
        "tokens_per_verification": 1 + accepted / runs if runs else 1.0,
    }


def main(
    model: Annotated[str, typer.Option(help="As for LLM.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "auto",
    batch_sizes: Annotated[str, typer.Option(help="Separated by commas; 8 at most.")] = "1,8",
    kinds: Annotated[str, typer.Option(help=f"Of {', '.join(KINDS)}; separated by commas.")] = ",".join(KINDS),
    new_tokens: Annotated[int, typer.Option(help="Of an answer at most.")] = 96,
    rounds: Annotated[int, typer.Option(help="Turns of each engine.")] = 3,
    speculation: Annotated[str, typer.Option(help="A method, or the section [speculation] as JSON.")] = "ngram",
    llama_python: Annotated[Path | None, typer.Option(help="A Python that has llama-cpp-python.")] = None,
    llama_drafts: Annotated[int, typer.Option(help="Of llama.cpp's prompt lookup.")] = 4,
    llama_plain: Annotated[bool, typer.Option("--llama-plain", help="Let llama.cpp repack no weights.")] = False,
    out: Annotated[Path | None, typer.Option(help="Add the figures to this file, as JSON.", dir_okay=False)] = None,
) -> None:
    """Compare decode speed with and without speculation."""
    method = json.loads(speculation) if speculation.startswith("{") else speculation
    environment = describe_environment(torch.device("cpu"))  # the load is to be that of others
    rows = []
    for batch_size in map(int, batch_sizes.split(",")):
        plain, fast = Ours(model, batch_size, None, dtype), Ours(model, batch_size, method, dtype)
        peers: dict[str, Llama] = {}
        if llama_python is not None and batch_size == 1:
            file = Path(resolve_model_path(model))
            peers = {"llama.cpp": Llama(llama_python, file, 0, is_plain=llama_plain)}
            peers["llama.cpp lookup"] = Llama(llama_python, file, llama_drafts, is_plain=llama_plain)
        for kind in kinds.split(","):
            prompts = plain.prompts(kind, batch_size)
            engines = {"plain": plain, "speculating": fast, **peers}
            turns = {name: partial(engine.turn, prompts, new_tokens) for name, engine in engines.items()}
            rows.append({"kind": kind, "batch_size": batch_size} | measure(turns, fast.drafted, rounds))
        for engine in (plain, fast):
            engine.llm.close()
        for peer in peers.values():
            peer.close()
    table = Table("batch", "prompts", "plain", "speculating", "times", "tokens a verification", "same", *_others(rows))
    for row in rows:
        speeds = row["tokens_per_second"]
        figures = [f"{speeds['plain']:.1f}", f"{speeds['speculating']:.1f}", f"{row['times_plain']:.2f}"]
        figures += [f"{row['tokens_per_verification']:.2f}", f"{row['same_tokens']:.0%}"]
        figures += [f"{speeds[name]:.1f}" if name in speeds else "" for name in _others(rows)]
        table.add_row(str(row["batch_size"]), row["kind"], *figures)
    Console().print(table)
    if out is not None:
        facts = {"model": model, "dtype": dtype, "speculation": method, "new_tokens": new_tokens, "rounds": rounds}
        facts |= {"llama_plain": llama_plain, "llama_drafts": llama_drafts, "environment": environment}
        before = json.loads(out.read_text())["runs"] if out.exists() else []
        out.write_text(json.dumps({"runs": [*before, facts | {"rows": rows}]}, indent=1) + "\n")


def _others(rows: list[dict[str, Any]]) -> list[str]:
    names = (name for row in rows for name in row["tokens_per_second"])
    return [name for name in dict.fromkeys(names) if name not in ("plain", "speculating")]


if __name__ == "__main__":
    typer.run(main)
