"""The distance of each dtype, weight form, cache and instruction set from float64 of the same weights.

    tools/bench accuracy measure --out FILE [--model smollm2] [--tokens 1360] [--isa avx2 --isa none ...]
    tools/bench accuracy measure --llama-python PYTHON --out FILE   llama.cpp too, from a Python that has it

The text is `accuracy.txt`. The reference is `Float64Model`, which shares no code with what it judges. Log-probabilities
of the text's tokens and whole distributions are compared, of prompts in chunks and of steps over one and eight rows.
Each instruction set runs in a process of its own, under `GRAPHDECODE_ISA`.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import torch
import typer
from torch import Tensor

from float64_model import Float64Model
from graphdecode import BucketConfig
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.steps import StepSetting
from graphdecode.engine.steps.decode import decode_attention_of
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.instructions import instructions
from graphdecode.models import load_model, resolve_model_path
from graphdecode.models.model import Chunks, DecodeInputs, Model
from graphdecode.text import load_tokenizer
from harness import LlamaPython, Out, command_of, elsewhere, json_of, record, show, write

TEXT = Path(__file__).with_suffix(".txt")
TOKENS, STEP_TOKENS = 1360, 128
CHUNK, PAGE = 512, 16
AS_IT_IS, WITHOUT_COMPILER = "as it is", "none"
app = typer.Typer(add_completion=False)


class Subject(NamedTuple):
    """Arguments of `load_model`, and the dtype of the cache."""

    dtype: str = "auto"
    quantize: str | None = None
    kv_cache_dtype: str = "auto"


EXPANDED = "none"  # as `quantize`: dequantized
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
    """The distance of log-probabilities from the reference's."""

    tokens: int  # compared
    mean: float  # of the |difference| of the text's tokens, in nats
    p99: float  # its 99th percentile
    kl: float  # mean Kullback-Leibler divergence from the reference, in nats
    other_first: float  # share of positions with another most likely token
    # the reference's gap at the first such position, in nats; None without one
    first_margin: float | None

    @classmethod
    def of(cls, logits: Tensor, reference: Tensor, ids: list[int]) -> Distance:
        """Compare logits [n, vocab] with log-probabilities float64 [>= n, vocab] of ids [> n]; NaN is a ValueError."""
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
        return not (self.mean <= mean and self.other_first <= other_first)


class Scored:
    """A loaded model that computes the logits of a text."""

    def __init__(self, model: Model, kv_cache_dtype: Any = "auto", *, tokens: int = TOKENS, rows: int = 8) -> None:
        self._model, self._pages = model, -(-tokens // PAGE)
        config = BucketConfig(
            max_batch_size=rows,
            batch_sizes=[rows],
            max_sequence_length=tokens,
            page_size=PAGE,
            total_num_pages=rows * self._pages,
        )
        cache = make_runner(model, config, kv_cache_dtype=kv_cache_dtype, prefix_cache=False).cache
        self._caches = cache.layers
        setting = StepSetting(model, cache.layers, cache.null_page, cache.dtype, PAGE, self._pages, config)
        self._attention = decode_attention_of(setting, rows, batch_invariant=False)

    def _int32(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=self._model.device)

    def prompt(self, ids: list[int], chunk: int = CHUNK) -> Tensor:
        """Return the logits of a prompt computed in chunks, float32 [tokens, vocab]."""
        pages = self._int32(range(self._pages)).unsqueeze(0)
        given = torch.tensor(ids, device=self._model.device)
        found = []
        for begin in range(0, len(ids), chunk):
            end = min(begin + chunk, len(ids))
            count = self._int32([end - begin])
            places = (torch.zeros_like(given[begin:end], dtype=torch.int32), self._int32(range(begin, end)), count)
            lengths = (self._int32([0, end - begin]), self._int32([0, end]))
            passed = self._model.prefill(Chunks(given[begin:end], *places, *lengths, pages), self._caches)
            for first in range(0, end - begin, 128):
                last = min(first + 128, end - begin)
                found.append(self._model.logits(passed, first, last).float().cpu())
        return torch.cat(found)

    @torch.no_grad()
    def steps(self, ids: list[int], rows: int) -> Tensor:
        """Return the last row's logits of steps that feed the text to several equal rows, float32 [tokens, vocab]."""
        table = self._int32(range(rows * self._pages)).view(rows, self._pages)
        found = []
        for position, token in enumerate(ids):
            batch = DecodeInputs(
                size=rows,
                tokens=torch.full((rows,), token, device=self._model.device),
                rows=self._int32(range(rows)),
                pre_step_seqlens=self._int32([position] * rows),
                live_rows=self._int32([rows]),
                page_table=table,
            )
            logits = self._model.decode(batch, self._caches, self._attention)
            found.append(logits[-1].float().cpu())
        return torch.stack(found)


def text_ids(path: Path, tokens: int, text: Path = TEXT) -> list[int]:
    ids = load_tokenizer(path).encode(text.read_text())[:tokens]
    if len(ids) < tokens:
        raise typer.BadParameter(f"the text has {len(ids)} tokens for this model", param_hint="--tokens")
    return ids


def distances(
    path: str | Path, subject: Subject, reference: Tensor, ids: list[int], step_tokens: int = STEP_TOKENS
) -> dict[str, Distance]:
    """Return a subject's distance from the reference: as a prompt, and in steps of one and of eight rows."""
    dtype, quantize, kv_cache_dtype = subject
    model = load_model(path, device="cpu", dtype=dtype, quantize=quantize, max_sequence_length=len(ids))
    scored = Scored(model, kv_cache_dtype, tokens=len(ids))
    begun = ids[: step_tokens + 1]
    found = {"prompt": Distance.of(scored.prompt(ids), reference, ids)}
    for rows in (1, 8):
        found[f"step_{rows}"] = Distance.of(scored.steps(begun[:-1], rows), reference, begun)
    return found


def by_transformers(path: Path, dtype: str, reference: Tensor, ids: list[int]) -> dict[str, Any]:
    """Return the distance of transformers' own Llama over the same weights, as a prompt."""
    from transformers import AutoModelForCausalLM, GgufConfig

    folder, source = path, cast(dict[str, Any], {})
    if path.suffix == ".gguf":
        folder = path.parent
        source = {"gguf_file": path.name, "quantization_config": GgufConfig(gguf_file=path.name, dequantize=True)}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **source).eval()
    with torch.no_grad():
        logits = loaded(torch.tensor([ids])).logits[0]
    return {"prompt": asdict(Distance.of(logits, reference, ids))}


def by_llama(python: Path, path: Path, ids: Path, reference: Tensor, folder: Path) -> dict[str, Any]:
    """Return the distance of llama.cpp from another Python, as a prompt."""
    made = folder / "llama.npy"
    subprocess.run(elsewhere(python, "llama-logits", path, ids, made), check=True)
    distance = Distance.of(torch.from_numpy(np.load(made)), reference, json.loads(ids.read_text()))
    return {"prompt": asdict(distance)}


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
    out: Out = None,
    model: str = "smollm2",
    tokens: int = TOKENS,
    step_tokens: int = STEP_TOKENS,
    text: Annotated[Path, typer.Option(help="what is read")] = TEXT,
    isa: Annotated[
        list[str] | None, typer.Option(help=f"sets of instructions; {WITHOUT_COMPILER}: torch alone")
    ] = None,
    subject: Annotated[list[str] | None, typer.Option(help="names of subjects; all where none is given")] = None,
    llama_python: LlamaPython = None,
    peers: bool = True,
) -> None:
    """Measure every subject with every set of instructions, and write and print the table."""
    path = resolve_model_path(model)
    ids = text_ids(path, tokens, text)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        wanted, given = Path(folder) / "reference.npy", Path(folder) / "ids.json"
        given.write_text(json.dumps(ids))
        reference = Float64Model(path).log_probabilities(ids)
        np.save(wanted, reference.numpy())
        calls: dict[tuple[str, str], Callable[[], dict[str, Any]]] = {}
        for dtype in ("float32", "bfloat16", "float16") if peers else ():
            calls["", f"transformers {dtype}"] = partial(by_transformers, path, dtype, reference, ids)
        if llama_python is not None:
            calls["", "llama.cpp"] = partial(by_llama, llama_python, path, given, reference, Path(folder))
        for each in isa or [AS_IT_IS]:
            setting = {AS_IT_IS: {}, WITHOUT_COMPILER: {"GRAPHDECODE_NATIVE": "0"}}.get(each, {"GRAPHDECODE_ISA": each})
            for name in subject or SUBJECTS:
                if each == WITHOUT_COMPILER and SUBJECTS[name].quantize == "gguf":
                    continue  # blocks need compiled kernels
                command = command_of("bench", "accuracy", "one", model, name, wanted, given, step_tokens)
                calls[each, name] = partial(json_of, command, env=os.environ | setting)
        for (each, name), found in calls.items():
            print(f"{each} {name}", flush=True)
            row: dict[str, Any] = {"isa": each, "subject": name}
            try:
                given_distances = found()
            except Exception as error:  # in another library or process
                rows.append(row | {"left_out": str(error).strip().splitlines()[-1]})
            else:
                rows.append(row | given_distances)
    write(out, record(model=model, text=text.name, tokens=tokens, rows=rows))
    ways = [row | {"way": way} | found for row in rows for way, found in row.items() if isinstance(found, dict)]
    ways += [row | {"way": row["left_out"]} for row in rows if "left_out" in row]
    columns = {"instructions": "{isa}", "subject": "{subject}", "way": "{way}", "mean": "{mean:.5f}"}
    columns |= {"p99": "{p99:.5f}", "KL": "{kl:.5f}", "other first": "{other_first:.2%}"}
    show(columns | {"margin of the first": "{first_margin:.4f}"}, ways)
