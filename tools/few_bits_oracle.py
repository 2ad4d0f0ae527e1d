"""Compare all forms of few bits, caches of 8 bits and fp16 with float64, for every set of instructions of the C.

    python tools/few_bits_oracle.py whole --out FILE  every form, shape and number of rows, for each set, a process each
    python tools/few_bits_oracle.py one               some of it, for the set that GRAPHDECODE_ISA names

What weights stand for is computed by the gguf library, by compressed-tensors and from the formats' definitions, in
float64 (`tests/kernels/few_bits_weights.py`, `tests/models/quantised_checkpoints.py`). A difference is given as a share
of what sums in float32 and one rounding to the result's dtype may cost: above 1 it is a fault.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # must stand before the first import of triton

import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "attention"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "models"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))  # the last, for its test_quantised_experts
import test_append_attention as append_cases
import test_decode_attention as decode_cases
import test_experts as expert_cases
import test_extend_attention as extend_cases
import test_quantised_experts as few_bit_experts
import test_tiled_linear as tiled_cases
from few_bits_weights import float8_weight, integer_weight, product, share_of_allowed, stored_weight
from hostile_rows import quick_interpreter
from interpreted_launches import strict
from quantised_checkpoints import FORMS, write_pair

from graphdecode.kernels.linear.native_linear import native_linear, to_panels
from graphdecode.kernels.linear.quantised_linear import QuantisedPanels
from graphdecode.kernels.model.quantised_embedding import quantised_embedding
from graphdecode.kernels.moe.expert_linear import GATES
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.compiler import Compiler
from graphdecode.kernels.native.instructions import VARIABLE
from graphdecode.kernels.native.registration import versions
from graphdecode.linear.gguf_blocks import BLOCK_OF, GGUF_BLOCKS, GgufBlocks
from graphdecode.linear.kept import KeptPanels
from graphdecode.models import load_model
from graphdecode.profiling.environment import describe_environment

SETS = {
    "AVX-512 and AMX": "amx",
    "AVX-512 with bf16": "avx512_bf16",
    "AVX-512 with VNNI": "avx512_vnni",
    "AVX-512": "avx512",
    "AVX2": "avx2",
}
TRITON = "Triton's interpreter"
EXTENSIONS = ("__AVX2__", "__AVX512F__", "__AVX512BF16__", "__AVX512VBMI__", "__AMX_TILE__")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL_ROWS, SOME_ROWS = (*range(1, 34), 64, 70, 257, 1030), (1, 7, 33, 70)
SHAPES = [(70, 512), (1, 256), (257, 1280), (33, 2304)]  # panels of 32 that are not full, one chunk of columns and some
NARROW = [(70, 96), (31, 544)]  # of blocks of 32 columns: no multiple of 64
Shares = dict[str, list[tuple[str, float]]]  # by form, of each comparison the dtype and the share
app = typer.Typer(add_completion=False)


def of_rows(held: QuantisedPanels, weight: torch.Tensor, rows: tuple[int, ...]) -> Iterator[tuple[str, float]]:
    """Yield dtype and share of each product with so many rows, every other one with a bias."""
    draw = torch.Generator().manual_seed(1)
    out_features, columns = weight.shape
    for dtype in DTYPES:
        bias = torch.randn(out_features, generator=draw).to(dtype)
        for count in rows:
            x = torch.randn(count, columns, generator=draw).to(dtype)
            given = bias if count % 2 else None
            yield str(dtype), share_of_allowed(product(x, held, out_features, given), x, weight, given)


def blocks(is_whole: bool) -> Shares:
    """Return the shares of GGUF's types."""
    found: Shares = {}
    for name in sorted(GGUF_BLOCKS):
        shapes = SHAPES + NARROW * (BLOCK_OF[name].values == 32) if is_whole else SHAPES[:1]
        found[name] = []
        for shape in shapes:
            stored, weight = stored_weight(name, shape)
            found[name] += of_rows(GgufBlocks(stored, name).some_panels(), weight, ALL_ROWS if is_whole else SOME_ROWS)
    return found


def integers(is_whole: bool) -> Shares:
    """Return the shares of integers and float8 in groups of 384, 128, 96, 64, 32 and 16 input features."""
    found: Shares = {}
    rows = ALL_ROWS if is_whole else SOME_ROWS
    for groups in (1, 3, 4, 6, 12, 24) if is_whole else (3, 24):
        found.setdefault("e4m3", []).extend(of_rows(*float8_weight(groups), rows))
        for bits in (2, 3, 4, 5, 6, 8):
            kinds = [(dtype, zeros) for dtype in (torch.float16, torch.bfloat16, torch.float32) for zeros in (0, 1)]
            for dtype, zeros in kinds if is_whole else kinds[1:4:2]:
                held, weight = integer_weight(bits, groups, dtype, bool(zeros))
                found.setdefault(f"{bits} bits", []).extend(of_rows(held, weight, rows))
    return found


def checkpoints(is_whole: bool) -> Shares:
    """Return the shares of layers as they are loaded from Hugging Face's forms of checkpoints."""
    found: Shares = {}
    for name, form in FORMS.items():
        if not is_whole or name.startswith("nf4"):  # which is expanded
            continue
        found[name] = []
        with tempfile.TemporaryDirectory() as folder:
            packed, plain = write_pair(form, Path(folder))
            meant = load_model(plain, device="cpu", dtype="float32").layers[0].linears
            for dtype in DTYPES:
                model = load_model(packed, device="cpu", dtype=dtype)
                for place, layer in model.layers[0].linears.items():
                    if not isinstance(layer, KeptPanels):
                        raise TypeError(f"{name}: {place} is {type(layer).__name__}")
                    weight = torch.empty(layer.in_features, layer.out_features)
                    meant[place].apply(weight, torch.eye(layer.in_features))
                    for count in ALL_ROWS:
                        x = torch.randn(count, layer.in_features, generator=torch.Generator().manual_seed(count))
                        x, out = x.to(dtype), torch.full((count, layer.out_features), torch.nan, dtype=dtype)
                        layer.apply(out, x)
                        found[name].append((str(dtype), share_of_allowed(out, x, weight.T.double())))
    return found


def embeddings(is_whole: bool) -> Shares:
    """Return the shares of rows that are gathered from GGUF's types."""
    found: Shares = {}
    for name in sorted(GGUF_BLOCKS):
        found[name] = []
        for shape in SHAPES if is_whole else SHAPES[:1]:
            stored, weight = stored_weight(name, shape)
            held, tokens = GgufBlocks(stored, name).some_panels(), torch.arange(shape[0]).flip(0)
            for dtype in DTYPES:
                out = torch.full((len(tokens), shape[1]), torch.nan, dtype=dtype)
                quantised_embedding(out, tokens, held, torch.tensor([len(tokens)], dtype=torch.int32), shape[0])
                expected = weight[tokens]
                step = 4 * 2**-24 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
                allowed = step * expected.abs() + 2**-24 * float(weight.abs().max())
                share = ((out.double() - expected).abs() / allowed).nan_to_num(nan=torch.inf).max()
                found[name].append((str(dtype), float(share)))
    return found


def plain(is_whole: bool) -> Shares:
    """Return the shares of products with weights that are not quantised, in the dtype of the activations."""
    found: Shares = {}
    for dtype in DTYPES:
        found[str(dtype).removeprefix("torch.")] = shares = []
        for shape in SHAPES + NARROW if is_whole else SHAPES[:1]:
            draw = torch.Generator().manual_seed(2)
            weight, bias = (torch.randn(size, generator=draw).to(dtype) for size in (shape, shape[0]))
            panels = to_panels(weight)
            for rows in ALL_ROWS if is_whole else SOME_ROWS:
                x, given = torch.randn(rows, shape[1], generator=draw).to(dtype), bias if rows % 2 else None
                out = torch.full((rows, shape[0]), torch.nan, dtype=dtype)
                native_linear(out, x, panels, None, given)
                shares.append((str(dtype), share_of_allowed(out, x, weight.double(), given)))
    return found


def passes(check: Callable[[], None]) -> tuple[str, float]:
    """Return 1 where a test's check passes, whose limit is its own; else infinity."""
    try:
        check()
    except AssertionError as error:
        print(error, file=sys.stderr)
        return "check", float("inf")
    return "check", 1.0


def largest(shares: list[tuple[str, float]]) -> dict[str, float]:
    """Return the largest share by dtype."""
    kinds = sorted({kind for kind, _ in shares})
    return {kind.removeprefix("torch."): round(max(share for of, share in shares if of == kind), 3) for kind in kinds}


def caches(is_whole: bool) -> Shares:
    """Return whether attention over caches of 8 bits or fp16, and what appends to them, pass their tests' checks."""

    def called(operation: str) -> Callable[..., None]:
        return lambda *given: versions(operation).native(*given)()

    found: Shares = {"append_attention": [], "decode_attention": [], "extend_attention": []}
    step, kinds = 1 if is_whole else 5, ("int8", "e4m3", "fp16")
    chosen = [
        [(number, case) for number, case in enumerate(cases) if case["dtype"].endswith(kinds)][::step]
        for cases in (append_cases.NATIVE_CASES, decode_cases.NATIVE_CASES, extend_cases.NATIVE_CASES)
    ]
    for number, case in chosen[0]:
        problem = append_cases.Problem(case, "cpu", number)
        found["append_attention"].append(passes(lambda p=problem: p.check(called("append_attention"))))
    common = {"layout": "NHD", "mode": "NONE", "fixed_split": 0, "dense": True}
    for number, case in chosen[1]:
        given = (decode_cases.decode_attention_native, common | case, "cpu", number)
        found["decode_attention"].append(passes(lambda g=given: decode_cases.check(*g)))
    for number, case in chosen[2]:
        given = (called("extend_attention"), case, "cpu", number, False)
        found["extend_attention"].append(passes(lambda g=given: extend_cases.check(*g)))
    return found


def experts(is_whole: bool) -> Shares:
    """Return whether products of experts, of few bits and plain ones, pass their tests' checks."""
    found: Shares = {}
    rows = (*range(1, 34), 300) if is_whole else (1, 33)
    kinds = [*sorted(GGUF_BLOCKS), (4, False), (4, True), (8, False), "e4m3"]
    for kind in kinds if is_whole else kinds[::4]:
        for dtype in DTYPES:
            for gate in ("none", "silu") if is_whole else ("silu",):
                given = (kind, gate, dtype, rows, gate == "silu")
                checked = passes(lambda given=given: few_bit_experts.check(*given))
                found.setdefault(str(kind), []).append(checked)
    for dtype in DTYPES:
        for gate in GATES if is_whole else ("silu",):
            given = ("native", gate, dtype, True, 23, 71, 40)
            checked = passes(lambda given=given: expert_cases.check_product(*given))
            found.setdefault(str(dtype).removeprefix("torch."), []).append(checked)
    return found


def tiles(is_whole: bool) -> Shares:
    """Return whether the kernel for GPUs, interpreted, passes its tests' check for any number of rows."""
    found: Shares = {}
    with quick_interpreter(), strict(0):
        for name in tiled_cases.FORMATS:
            held, weight = tiled_cases.weight_of(name, 50, 450)
            found[name] = []
            for rows in (*range(1, 34), 64) if is_whole else (1, 33):
                x = tiled_cases.activations(rows, weight.shape[1], torch.float16, "cpu")
                block_m = next(most for most in (8, 16, 32, 64) if rows <= most)
                out = tiled_cases.launch(tiled_cases.config(1 + rows % 2, block_m), x, held)
                found[name].append(passes(lambda given=(out, x, weight): tiled_cases.check(*given)))
    return found


PARTS = {
    "plain": plain,
    "blocks": blocks,
    "integers": integers,
    "checkpoints": checkpoints,
    "embeddings": embeddings,
    "experts": experts,
    "caches": caches,
}


def extensions() -> list[str]:
    """Return which of the extensions that the kernels ask for the compiler may use."""
    command = [*Compiler.found().command, "-dM", "-E", "-x", "c", "/dev/null"]
    defined = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.split()
    return [name.strip("_") for name in EXTENSIONS if name in defined]


@app.command()
def one(
    is_whole: Annotated[bool, typer.Option("--whole", help="All of it.")] = False,
    triton: Annotated[bool, typer.Option("--triton", help="The kernel for GPUs, interpreted, alone.")] = False,
) -> None:
    """Print a line of JSON: for each part and form, how many comparisons there were, and the largest share."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    if not triton and native.library() is None:
        raise SystemExit(native.why_not())
    parts: dict[str, Callable[[bool], Shares]] = {"tiles": tiles} if triton else PARTS
    shares = {part: compare(is_whole) for part, compare in parts.items()}
    seen = {
        part: {name: {"compared": len(each), "worst_share": largest(each)} for name, each in found.items()}
        for part, found in shares.items()
        if found
    }
    record: dict[str, Any] = {"extensions": [] if triton else extensions(), "parts": seen}
    print(json.dumps(record | {"seconds": round(time.perf_counter() - began, 1)}))


@app.command()
def whole(
    out: Annotated[Path | None, typer.Option(help="Where to write what was seen.")] = None,
    only: Annotated[str | None, typer.Option(help="One of the sets; what FILE has of the others stays.")] = None,
) -> None:
    """Compare everything for each set of instructions; ends with 1 where something is beyond what is allowed."""
    rows = json.loads(out.read_text())["sets"] if only and out is not None and out.exists() else []
    for name in [only] if only else [*SETS, TRITON]:
        environment = os.environ | ({VARIABLE: SETS[name]} if name in SETS else {})
        command = [sys.executable, __file__, "one", "--whole", *["--triton"] * (name == TRITON)]
        ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
        rows = [row for row in rows if row["set"] != name] + [{"set": name, **json.loads(ran.stdout.splitlines()[-1])}]
        for part, found in rows[-1]["parts"].items():
            count = sum(each["compared"] for each in found.values())
            worst = max(share for each in found.values() for share in each["worst_share"].values())
            print(f"{name:22} {part:12} {count:6} compared, the largest share is {worst:.3f}", flush=True)
        result = {"schema": 1, "environment": describe_environment(torch.device("cpu")), "sets": rows}
        if out is not None:
            out.write_text(json.dumps(result, indent=1) + "\n")
    forms = [form for row in rows for part in row["parts"].values() for form in part.values()]
    raise typer.Exit(any(share > 1 for form in forms for share in form["worst_share"].values()))


if __name__ == "__main__":
    app()
