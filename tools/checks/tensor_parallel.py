"""Compares tokens of several ranks with those of one, for small checkpoints of every family and weight format.

Requests are sampled and greedy, with shared prefixes, chunks, mixed steps, and few pages, so that some are preempted.
With batch_invariant, if a family supports it, a request has the same tokens alone and in a batch. The last rows run
the demo under torchrun. Each row replaces the same one in the file.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import family_checkpoints
import gguf_checkpoints
import typer
from quantized_checkpoints import FORMS, write_pair
from transformers import LlamaConfig, LlamaForCausalLM

from graphdecode import Engine, EngineConfig, Request, SamplingParams
from graphdecode.convert.gguf_model import GgufModel
from graphdecode.distributed import Leader
from graphdecode.distributed.started import start_ranks
from graphdecode.engine import rank_process
from graphdecode.engine.loading import load_engine
from graphdecode.engine.steps import step
from graphdecode.errors import ArgumentError
from graphdecode.models.checkpoint import Checkpoint
from graphdecode.models.quantize_on_load import quantized_on_load
from harness import TOOLS, Out, Sizes, numbers, read, record, replaced, write

_LIMIT_SECONDS = 300.0  # for four ranks on two busy cores
_KEYS = ("model", "weights", "collectives", "ranks")
_WIDE = {  # shards hold whole groups and blocks of 32, 128 and 256 columns
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
_ON_LOAD = ("int8", "int4", "fp8", "q8_0", "q4_k")
_OF_FILES = ("int4 group", "int4 group with zeros", "gptq", "gptq desc_act", "awq", "fp8 128x128", "fp8 channel")
_LAUNCHED = """
from graphdecode import LLM, SamplingParams
with LLM("demo", tensor_parallel_size={ranks}, collectives="{how}", max_batch_size=2) as llm:
    print("torchrun answers", llm.generate("417+385=", SamplingParams(temperature=0.0))[0].outputs[0].text)
"""


class Case(NamedTuple):
    """A model to compare."""

    model: str
    weights: str
    make: Callable[[Path], Path]
    options: dict[str, Any]


class Answers(NamedTuple):
    """The outputs of an engine."""

    tokens: list[list[int]]
    alone: list[int]
    seen: dict[str, int]
    model_bytes: int


def cases() -> Iterator[Case]:
    """Yield all families with plain weights, and one family with all formats."""
    for name in family_checkpoints.FAMILIES:
        yield Case(name, "plain", partial(family_checkpoints.save_checkpoint, name), {})
    family_checkpoints.FAMILIES["wide"] = (LlamaConfig, LlamaForCausalLM, _WIDE)
    gguf_checkpoints.ARCHITECTURES["wide"] = ("llama", "Llama", _WIDE | {"tie_word_embeddings": True})

    def wide(folder: Path) -> Path:
        return family_checkpoints.save_checkpoint("wide", folder)

    def packed(form: str, folder: Path) -> Path:
        return write_pair(FORMS[form], folder, "wide")[0]

    for name in _OF_FILES:
        yield Case("wide", name, partial(packed, name), {})
    for kind in ("Q4_0", "Q8_0"):

        def of_library(folder: Path, kind: str = kind) -> Path:
            folder.mkdir()
            types = {"weight": kind}
            return gguf_checkpoints.quantized_file(folder / "model.gguf", "wide", types)

        yield Case("wide", f"GGUF {kind}", of_library, {"quantize": "gguf"})
    yield Case("wide", "GGUF Q4_K", lambda folder: in_blocks(wide(folder), "q4_k"), {"quantize": "gguf"})
    for name in _ON_LOAD:
        yield Case("wide", f"{name} on load", wide, {"quantize": name})


def in_blocks(folder: Path, quantize: str) -> Path:
    """Write a checkpoint as a GGUF file in its folder; return the file."""
    source = Checkpoint(folder)
    config, path = source.config(), folder / "model.gguf"
    file = GgufModel(quantized_on_load(source, config, quantize, None), config)
    file.write(path, {}, file.names)
    return path


def settings(ranks: int, how: Any = "auto", **options: Any) -> EngineConfig:
    return EngineConfig.of(
        None, tensor_parallel_size=ranks, collectives=how, max_batch_size=4, batch_sizes=[4], page_size=4,
        total_num_pages=22, max_sequence_length=64, max_prefill_tokens=16, dtype="float32", **options,
    )  # fmt: skip


def request(seed: int, length: int) -> Request:
    """Return a request with a shared prefix."""
    params = SamplingParams(temperature=0.8 * (seed % 2), seed=seed, max_tokens=16, ignore_eos=True)
    return Request([5, 6, 7, 8, 9, 10, *range(20 + seed, 20 + seed + length)], params)


def served(engine: Engine, requests: list[Request]) -> tuple[list[list[int]], int]:
    """Return the tokens of requests that arrive two at a time, and the number of cached prompt tokens."""
    found: dict[int, list[int]] = {}
    from_cache = 0
    waiting = list(requests)
    while waiting or engine.has_work:
        for each in waiting[:2]:
            found[engine.add(each)] = []
        del waiting[:2]
        for event in engine.step():
            found[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                from_cache += event.metrics.num_cached_tokens
    return list(found.values()), from_cache


def answers(model: Path, config: EngineConfig, leader: Leader | None = None) -> Answers:
    engine = load_engine(model, config, ranks=leader)
    requests = [request(seed, length) for seed, length in enumerate((1, 3, 9, 17, 24, 30))]
    tokens, from_cache = served(engine, requests)
    seen = {
        "preemptions": engine.num_preemptions,
        "mixed_steps": engine.stats.mixed_steps,
        "tokens_from_cache": from_cache,
    }
    ((alone,), _) = served(engine, requests[5:])
    nbytes = sum(held.nbytes for held in engine.model.constants)
    engine.close()
    return Answers(tokens, alone, seen, nbytes)


def row_of(case: Case, model: Path, leader: Leader, ranks: int, how: str) -> dict[str, Any]:
    row: dict[str, Any] = dict(zip(_KEYS, (case.model, case.weights, how, ranks), strict=True))
    one = answers(model, settings(1, **case.options))
    began = time.perf_counter()
    try:
        several = answers(model, settings(ranks, how, **case.options), leader)
    except ArgumentError as error:
        return row | {"refused": str(error)}
    row |= {"same_tokens": several.tokens == one.tokens and several.alone == one.alone, **several.seen}
    row["share_of_bytes"] = round(several.model_bytes / one.model_bytes, 4)
    invariant = {**case.options, "batch_invariant": True}
    try:
        one = answers(model, settings(1, **invariant))
    except ArgumentError:
        row["batch_invariant"] = None
    else:
        several = answers(model, settings(ranks, how, **invariant), leader)
        row["batch_invariant"] = several.tokens == one.tokens and several.alone == several.tokens[5]
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def is_right(row: dict[str, Any]) -> bool:
    """Return whether tokens are the same, or the model was refused."""
    return "refused" in row or (row["same_tokens"] and row.get("batch_invariant") is not False)


def started(ranks: int, how: str) -> Leader:
    """Start ranks that mix steps, even for small models."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TOOLS), os.environ.get("PYTHONPATH"))))
    return start_ranks(ranks, "cpu", how, _LIMIT_SECONDS, "checks.tensor_parallel")


def compared(some: list[Case], models: dict[tuple[str, str], Path], ranks: int, how: str) -> Iterator[dict[str, Any]]:
    leader = started(ranks, how)
    for case in some:
        row = row_of(case, models[case.model, case.weights], leader, ranks, how)
        if "refused" in row:  # the ranks have ended
            leader = started(ranks, how)
        yield row
    leader.close()


def launched(ranks: int, how: str) -> dict[str, Any]:
    """Run the demo under torchrun; only one rank may print."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(_LAUNCHED.format(ranks=ranks, how=how))
        script.flush()
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), script.name]
        ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    values = ("demo", "started by torchrun", how, ranks)
    row: dict[str, Any] = dict(zip(_KEYS, values, strict=True))
    return row | {"same_tokens": ran.stdout.split() == ["torchrun", "answers", "802"]}


def main(
    ranks: Sizes = "2,4",
    collectives: Annotated[str, typer.Option(help="With commas between.")] = "shared,gloo",
    only: Annotated[str, typer.Option(help="Names of families or forms, with commas between.")] = "",
    out: Out = None,
) -> None:
    """Compare all; exit code 1 if tokens differ."""
    warnings.simplefilter("ignore")
    wanted = [name for name in only.split(",") if name]
    some = [each for each in cases() if not wanted or each.weights in wanted or each.model in wanted]
    found, is_right_everywhere = read(out, schema=1, rows=[]), True
    with tempfile.TemporaryDirectory() as scratch:
        with contextlib.redirect_stderr(io.StringIO()):
            models = {each[:2]: each.make(Path(scratch) / str(number)) for number, each in enumerate(some)}
        for count in numbers(ranks, "--ranks"):
            for how in collectives.split(","):
                by_torchrun = () if wanted else (launched(count, how),)
                for row in chain(compared(some, models, count, how), by_torchrun):
                    told = (f"{key}={value}" for key, value in row.items())
                    print("" if is_right(row) else "WRONG", *told, flush=True)
                    is_right_everywhere = is_right_everywhere and is_right(row)
                    rows = replaced(found["rows"], row, *_KEYS)
                    found |= record(rows=sorted(rows, key=lambda row: (row["collectives"], row["ranks"])))
                    write(out, found)
    raise typer.Exit(0 if is_right_everywhere else 1)


step.CACHED_BYTES = 0  # in all ranks
if __name__ == "__main__":  # as the process of a rank
    rank_process.main()
