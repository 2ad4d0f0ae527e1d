"""How far each dtype, weight form, cache and set of instructions is from float64 of the same weights.

    python tools/accuracy.py measure --out FILE [--model smollm2] [--tokens 1360] [--isa avx2 --isa none ...]
    python tools/accuracy.py measure --llama-python PYTHON --out FILE   llama.cpp beside them, by a Python that has it

The text is `tools/accuracy.txt`. The reference is `Float64Model`: it reads the checkpoint with the packages of
its format alone, and shares no code with what it judges. What is compared are the log-probabilities of the text's
tokens and the whole distributions, of prompts in chunks and of steps over one and over eight rows. Each set of
instructions runs in a process of its own, under `GRAPHDECODE_ISA`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from float64_model import Float64Model
from graphdecode.attention import PagedDecodeAttention
from graphdecode.buffers import Batch
from graphdecode.cache import PagedKVCache
from graphdecode.engine.capacity import resolve_cache_dtype
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.instructions import instructions
from graphdecode.models import load_model, resolve_model_path
from graphdecode.models.model import Model
from graphdecode.profiling.environment import describe_environment
from graphdecode.text import load_tokenizer

TEXT = Path(__file__).with_suffix(".txt")
TOKENS, STEP_TOKENS = 1360, 128
CHUNK, PAGE = 512, 16
AS_IT_IS, WITHOUT_COMPILER = "as it is", "none"
app = typer.Typer(add_completion=False)


class Subject(NamedTuple):
    """What is measured: arguments of `load_model`, and what keys and values are kept in."""

    dtype: str = "auto"
    quantize: str | None = None
    kv_cache_dtype: str = "auto"


EXPANDED = "none"  # as `quantize`: no blocks are kept
SUBJECTS = {
    "default": Subject(),
    "float32": Subject("float32", EXPANDED),
    "bfloat16": Subject("bfloat16", EXPANDED),
    "float16": Subject("float16", EXPANDED),
    "float32 in blocks": Subject("float32", "gguf"),
    "bfloat16 in blocks": Subject("bfloat16", "gguf"),
    "float16 in blocks": Subject("float16", "gguf"),
    "bfloat16, cache int8": Subject("bfloat16", EXPANDED, "int8"),
    "bfloat16, cache fp8": Subject("bfloat16", EXPANDED, "fp8"),
    "float16, cache int8": Subject("float16", EXPANDED, "int8"),
    "float16, cache fp8": Subject("float16", EXPANDED, "fp8"),
}


@dataclass(frozen=True)
class Distance:
    """How far log-probabilities are from the reference's.

    Attributes:
        tokens: compared.
        mean: of the |difference| of the text's tokens, in nats.
        p99: its 99th percentile.
        kl: mean Kullback-Leibler divergence from the reference, in nats.
        other_first: share of places whose most likely token is another one.
        first_margin: by how much the reference prefers its own at the first such place, in nats; None without one.
    """

    tokens: int
    mean: float
    p99: float
    kl: float
    other_first: float
    first_margin: float | None

    @classmethod
    def of(cls, logits: Tensor, reference: Tensor, ids: list[int]) -> Distance:
        """Compare logits [n, vocab] with reference log-probabilities float64 [>= n, vocab] of ids [> n].

        Raises:
            ValueError: a logit is not a number, or infinite.
        """
        count = min(len(logits), len(ids) - 1)
        if not torch.isfinite(logits).all():
            raise ValueError("there are logits that are no finite numbers")
        found = logits[:count].double().log_softmax(-1)
        wanted = reference[:count]
        places, targets = torch.arange(count), torch.tensor(ids[1 : count + 1])
        off = (found[places, targets] - wanted[places, targets]).abs()
        divergence = (wanted.exp() * (wanted - found)).sum(-1)
        first, own = found.argmax(-1), wanted.argmax(-1)
        others = (first != own).nonzero().flatten()
        margin = None
        if len(others):
            place = others[0]
            margin = float(wanted[place, own[place]] - wanted[place, first[place]])
        return cls(
            count, float(off.mean()), float(off.quantile(0.99)), float(divergence.mean()), len(others) / count, margin
        )

    def exceeds(self, mean: float, other_first: float) -> bool:
        """Whether it is beyond bounds; what is no number is."""
        return not (self.mean <= mean and self.other_first <= other_first)


class Scored:
    """A loaded model that is fed a text, and gives logits.

    Args:
        model: the decoder.
        kv_cache_dtype: as in `EngineConfig`.
        tokens: of the text at most.
        rows: of a step at most.
    """

    def __init__(self, model: Model, kv_cache_dtype: str = "auto", *, tokens: int = TOKENS, rows: int = 8) -> None:
        self._model, self._pages = model, -(-tokens // PAGE)
        config, device = model.config, model.device
        kv_dtype = resolve_cache_dtype(kv_cache_dtype, model.dtype)
        self._cache = PagedKVCache(
            num_layers=model.num_layers,
            total_num_pages=rows * self._pages,
            page_size=PAGE,
            max_pages_per_row=self._pages,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=kv_dtype,
            device=device,
            scales=model.cache_scales,
        )
        self._attention = PagedDecodeAttention(
            max_batch_size=rows,
            num_qo_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            page_size=PAGE,
            max_pages_per_row=self._pages,
            dtype=model.dtype,
            kv_dtype=kv_dtype,
            windows=config.windows,
            device=device,
        )

    def _int32(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=self._model.device)

    def prompt(self, ids: list[int], chunk: int = CHUNK) -> Tensor:
        """Return the logits of all places of a prompt that is computed in chunks, float32 [tokens, vocab]."""
        pages = self._int32(range(self._pages)).unsqueeze(0)
        given = torch.tensor(ids, device=self._model.device)
        found = []
        for begin in range(0, len(ids), chunk):
            end = min(begin + chunk, len(ids))
            count = self._int32([end - begin])
            places = (torch.zeros_like(given[begin:end], dtype=torch.int32), self._int32(range(begin, end)), count)
            lengths = (self._int32([0, end - begin]), self._int32([0, end]))
            passed = self._model.prefill(given[begin:end], *places, *lengths, pages, self._cache.layers)
            for first in range(0, end - begin, 128):
                last = min(first + 128, end - begin)
                found.append(self._model.logits(passed, first, last).float().cpu())
        return torch.cat(found)

    @torch.no_grad()
    def steps(self, ids: list[int], rows: int) -> Tensor:
        """Return the logits of steps that feed the text to so many rows alike, those of the last, float32."""
        table = self._int32(range(rows * self._pages)).view(rows, self._pages)
        found = []
        for position, token in enumerate(ids):
            batch = SimpleNamespace(
                size=rows,
                tokens=torch.full((rows,), token, device=self._model.device),
                rows=self._int32(range(rows)),
                pre_step_seqlens=self._int32([position] * rows),
                live_rows=self._int32([rows]),
                page_table=table,
            )
            logits = self._model.decode(cast(Batch, batch), self._cache.layers, self._attention)
            found.append(logits[-1].float().cpu())
        return torch.stack(found)


def text_ids(path: Path, tokens: int, text: Path = TEXT) -> list[int]:
    """Return the first tokens of a text, as a model reads them."""
    ids = load_tokenizer(path).encode(text.read_text())[:tokens]
    if len(ids) < tokens:
        raise typer.BadParameter(f"the text has {len(ids)} tokens for this model", param_hint="--tokens")
    return ids


def distances(
    path: str | Path, subject: Subject, reference: Tensor, ids: list[int], step_tokens: int = STEP_TOKENS
) -> dict[str, Distance]:
    """Return how far a subject is from the reference: as a prompt, and in steps of one and of eight rows.

    Args:
        path: of the model.
        subject: what is asked for.
        reference: log-probabilities, float64 [len(ids), vocab].
        ids: the text.
        step_tokens: of the text that are fed to steps.
    """
    dtype, quantize, kv_cache_dtype = subject
    model = load_model(path, device="cpu", dtype=dtype, quantize=quantize, max_sequence_length=len(ids))
    scored = Scored(model, kv_cache_dtype, tokens=len(ids))
    begun = ids[: step_tokens + 1]
    found = {"prompt": Distance.of(scored.prompt(ids), reference, ids)}
    for rows in (1, 8):
        found[f"step_{rows}"] = Distance.of(scored.steps(begun[:-1], rows), reference, begun)
    return found


def by_transformers(path: Path, dtype: str, reference: Tensor, ids: list[int]) -> dict[str, Distance]:
    """Return the distance of transformers' own Llama over the same weights, as a prompt."""
    from transformers import AutoModelForCausalLM, GgufConfig

    folder, source = path, cast(dict[str, Any], {})
    if path.suffix == ".gguf":
        folder = path.parent
        source = {"gguf_file": path.name, "quantization_config": GgufConfig(gguf_file=path.name, dequantize=True)}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **source).eval()
    with torch.no_grad():
        logits = loaded(torch.tensor([ids])).logits[0]
    return {"prompt": Distance.of(logits, reference, ids)}


LLAMA = """
import json, sys
import llama_cpp
import numpy as np
model, ids = sys.argv[1], json.loads(sys.stdin.read())
llama = llama_cpp.Llama(model, n_ctx=len(ids), n_batch=len(ids), logits_all=True, verbose=False, n_threads=2)
llama.eval(ids)
np.save(sys.argv[2], np.asarray(llama.scores[: len(ids)], dtype=np.float32))
"""


def by_llama(python: str, path: Path, reference: Tensor, ids: list[int], folder: Path) -> dict[str, Distance]:
    """Return the distance of llama.cpp, as another Python has it, as a prompt."""
    made = folder / "llama.npy"
    subprocess.run([python, "-c", LLAMA, str(path), str(made)], input=json.dumps(ids), text=True, check=True)
    return {"prompt": Distance.of(torch.from_numpy(np.load(made)), reference, ids)}


def _environment(isa: str) -> dict[str, str]:
    chosen = {AS_IT_IS: {}, WITHOUT_COMPILER: {"GRAPHDECODE_NATIVE": "0"}}.get(isa, {"GRAPHDECODE_ISA": isa})
    return {**os.environ, **chosen}


def _subjects(isa: str, names: list[str] | None) -> Iterator[str]:
    for name, subject in SUBJECTS.items():
        if isa == WITHOUT_COMPILER and subject.quantize == "gguf":
            continue  # what multiplies blocks is compiled
        if not names or name in names:
            yield name


@app.command()
def one(model: str, name: str, reference: Path, ids: Path, step_tokens: int) -> None:
    """Print the distances of one subject as JSON; `measure` calls it."""
    path = resolve_model_path(model)
    wanted = torch.from_numpy(np.load(reference, mmap_mode="c"))
    found = distances(path, SUBJECTS[name], wanted, json.loads(ids.read_text()), step_tokens)
    kernels = "torch's operators" if native.library() is None else instructions().name
    print(json.dumps({"kernels": kernels} | {way: asdict(distance) for way, distance in found.items()}))


@app.command()
def measure(
    out: Annotated[Path, typer.Option(help="the file to write")],
    model: str = "smollm2",
    tokens: int = TOKENS,
    step_tokens: int = STEP_TOKENS,
    text: Annotated[Path, typer.Option(help="what is read")] = TEXT,
    isa: Annotated[
        list[str] | None, typer.Option(help=f"sets of instructions; {WITHOUT_COMPILER}: torch alone")
    ] = None,
    subject: Annotated[list[str] | None, typer.Option(help="names of subjects; all where none is given")] = None,
    llama_python: Annotated[str | None, typer.Option(help="a Python that has llama-cpp-python")] = None,
    peers: bool = True,
) -> None:
    """Measure every subject with every set of instructions, and write and print the table."""
    console, path = Console(stderr=True), resolve_model_path(model)
    ids = text_ids(path, tokens, text)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        wanted, given = Path(folder) / "reference.npy", Path(folder) / "ids.json"
        given.write_text(json.dumps(ids))
        console.print("float64 ...")
        reference = Float64Model(path).log_probabilities(ids)
        np.save(wanted, reference.numpy())
        others: dict[str, Callable[[], dict[str, Distance]]] = {}
        if peers:
            for dtype in ("float32", "bfloat16", "float16"):
                others[f"transformers {dtype}"] = partial(by_transformers, path, dtype, reference, ids)
        if llama_python is not None:
            others["llama.cpp"] = partial(by_llama, llama_python, path, reference, ids, Path(folder))
        for name, distance_of in others.items():
            console.print(name)
            row: dict[str, Any] = {"isa": "", "subject": name}
            try:
                rows.append(row | {way: asdict(distance) for way, distance in distance_of().items()})
            except Exception as error:  # of another library, which may lack a package
                rows.append(row | {"left_out": str(error).strip().splitlines()[-1]})
        for each in isa or [AS_IT_IS]:
            for name in _subjects(each, subject):
                console.print(f"{each}: {name}")
                command = [sys.executable, __file__, "one", model, name, str(wanted), str(given), str(step_tokens)]
                done = subprocess.run(command, env=_environment(each), capture_output=True, text=True)
                if done.returncode:
                    rows.append({"isa": each, "subject": name, "left_out": done.stderr.strip().splitlines()[-1]})
                else:
                    rows.append({"isa": each, "subject": name} | json.loads(done.stdout.splitlines()[-1]))
    result = {
        "model": model,
        "text": text.name,
        "tokens": tokens,
        "environment": describe_environment("cpu"),
        "rows": rows,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=120).print(table(rows))


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a person reads them."""
    made = Table("instructions", "subject", "way", "mean", "p99", "KL", "other first", "margin of the first")
    for row in rows:
        if "left_out" in row:
            made.add_row(row["isa"], row["subject"], row["left_out"])
        for way, distance in row.items():
            if isinstance(distance, dict):
                figures = (f"{distance[name]:.5f}" for name in ("mean", "p99", "kl"))
                margin = distance["first_margin"]
                share, shown = f"{distance['other_first']:.2%}", "" if margin is None else f"{margin:.4f}"
                made.add_row(row["isa"], row["subject"], way, *figures, share, shown)
    return made


if __name__ == "__main__":
    app()
