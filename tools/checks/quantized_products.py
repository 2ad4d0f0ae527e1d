"""All quantized formats, 8-bit caches and fp16, compared with float64 for every instruction set of the C kernels.

    tools/check quantized-products whole --out FILE  every form, shape and number of rows, for each set, a process each
    tools/check quantized-products one               some of it, for the set that GRAPHDECODE_ISA names

Weights are dequantized in float64 by the gguf library, by compressed-tensors and from the formats' definitions (see
`tests/kernels/quantized_weights.py`, `tests/models/quantized_checkpoints.py`). A difference is given as a share of what
float32 sums and one rounding of the result may cost: above 1 is a fault.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product as combinations
from pathlib import Path
from typing import Annotated, Any

import test_append_attention as append_cases
import test_decode_attention as decode_cases
import test_experts as expert_cases
import test_extend_attention as extend_cases
import test_quantized_experts as few_bit_experts
import test_tiled_linear as tiled_cases
import torch
import typer
from hostile_rows import quick_interpreter
from interpreted_launches import strict
from quantized_checkpoints import FORMS, write_pair
from quantized_weights import float8_weight, integer_weight, product, share_of_allowed, stored_weight

from graphdecode.kernels.linear.linear import native_linear, to_panels
from graphdecode.kernels.linear.quantized_linear import QuantizedPanels
from graphdecode.kernels.model.embedding import quantized_embedding
from graphdecode.kernels.moe.expert_linear import GATES
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.compiler import Compiler
from graphdecode.kernels.native.instructions import VARIABLE
from graphdecode.kernels.native.registration import versions
from graphdecode.linear.quantization.gguf import BLOCK_OF, BLOCKS_ON_CPU, GgufBlocks
from graphdecode.linear.quantized_linear import PanelLinear
from graphdecode.models import load_model
from harness import Out, command_of, json_of, read, record, replaced, write

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
SHAPES = [(70, 512), (1, 256), (257, 1280), (33, 2304)]  # partial panels of 32 rows, one and several chunks of columns
NARROW = [(70, 96), (31, 544)]  # blocks of 32 columns, no multiple of 64
Share = tuple[str, str, float]  # format, dtype, and share of the allowed error
app = typer.Typer(add_completion=False)


def of_rows(name: str, rows: tuple[int, ...], held: QuantizedPanels, weight: torch.Tensor) -> Iterator[Share]:
    """Yield the share of each product with a number of rows, every other one with a bias."""
    draw = torch.Generator().manual_seed(1)
    out_features, columns = weight.shape
    for dtype in DTYPES:
        bias = torch.randn(out_features, generator=draw).to(dtype)
        for count in rows:
            x = torch.randn(count, columns, generator=draw).to(dtype)
            given = bias if count % 2 else None
            yield name, str(dtype), share_of_allowed(product(x, held, out_features, given), x, weight, given)


def blocks(is_whole: bool) -> Iterator[Share]:
    for name in sorted(BLOCKS_ON_CPU):
        for shape in SHAPES + NARROW * (BLOCK_OF[name].values == 32) if is_whole else SHAPES[:1]:
            stored, weight = stored_weight(name, shape)
            yield from of_rows(
                name, ALL_ROWS if is_whole else SOME_ROWS, GgufBlocks(stored, name).some_panels(), weight
            )


def integers(is_whole: bool) -> Iterator[Share]:
    """Yield the shares of integers and float8 in groups of 16 to 384 input features."""
    rows = ALL_ROWS if is_whole else SOME_ROWS
    kinds = list(combinations((torch.float16, torch.bfloat16, torch.float32), (False, True)))
    for groups in (1, 3, 4, 6, 12, 24) if is_whole else (3, 24):
        yield from of_rows("e4m3", rows, *float8_weight(groups))
        for bits in (2, 3, 4, 5, 6, 8):
            for dtype, zeros in kinds if is_whole else kinds[1:4:2]:
                yield from of_rows(f"{bits} bits", rows, *integer_weight(bits, groups, dtype, zeros))


def checkpoints(is_whole: bool) -> Iterator[Share]:
    """Yield the shares of layers loaded from Hugging Face's quantized checkpoints."""
    for name, form in FORMS.items():
        if not is_whole or name.startswith("nf4"):  # dequantized on loading
            continue
        with tempfile.TemporaryDirectory() as folder:
            packed, plain = write_pair(form, Path(folder))
            expanded: Any = load_model(plain, device="cpu", dtype="float32")
            meant = expanded.layers[0].linears
            for dtype in DTYPES:
                model: Any = load_model(packed, device="cpu", dtype=dtype)
                for place, layer in model.layers[0].linears.items():
                    if not isinstance(layer, PanelLinear):
                        raise TypeError(f"{name}: {place} is {type(layer).__name__}")
                    weight = torch.empty(layer.in_features, layer.out_features)
                    meant[place].apply(weight, torch.eye(layer.in_features))
                    for count in ALL_ROWS:
                        x = torch.randn(count, layer.in_features, generator=torch.Generator().manual_seed(count))
                        x, out = x.to(dtype), torch.full((count, layer.out_features), torch.nan, dtype=dtype)
                        layer.apply(out, x)
                        yield name, str(dtype), share_of_allowed(out, x, weight.T.double())


def embeddings(is_whole: bool) -> Iterator[Share]:
    for name, shape in combinations(sorted(BLOCKS_ON_CPU), SHAPES if is_whole else SHAPES[:1]):
        stored, weight = stored_weight(name, shape)
        held, tokens = GgufBlocks(stored, name).some_panels(), torch.arange(shape[0]).flip(0)
        for dtype in DTYPES:
            out = torch.full((len(tokens), shape[1]), torch.nan, dtype=dtype)
            quantized_embedding(out, tokens, held, torch.tensor([len(tokens)], dtype=torch.int32), shape[0])
            expected = weight[tokens]
            step = 4 * 2**-24 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
            allowed = step * expected.abs() + 2**-24 * float(weight.abs().max())
            share = ((out.double() - expected).abs() / allowed).nan_to_num(nan=torch.inf).max()
            yield name, str(dtype), float(share)


def plain(is_whole: bool) -> Iterator[Share]:
    """Yield the shares of products with weights that are not quantized."""
    for dtype, shape in combinations(DTYPES, SHAPES + NARROW if is_whole else SHAPES[:1]):
        draw = torch.Generator().manual_seed(2)
        weight, bias = (torch.randn(size, generator=draw).to(dtype) for size in (shape, shape[0]))
        panels = to_panels(weight)
        for rows in ALL_ROWS if is_whole else SOME_ROWS:
            x, given = torch.randn(rows, shape[1], generator=draw).to(dtype), bias if rows % 2 else None
            out = torch.full((rows, shape[0]), torch.nan, dtype=dtype)
            native_linear(out, x, panels, given)
            yield str(dtype).removeprefix("torch."), str(dtype), share_of_allowed(out, x, weight.double(), given)


def passed(name: str, check: Callable[..., None], *given: Any) -> Share:
    """Return 1 if a test's check passes, else infinity."""
    try:
        check(*given)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return name, "check", float("inf")
    return name, "check", 1.0


def called(operation: str) -> Callable[..., None]:
    native: Any = versions(operation).native
    return lambda *given: native(*given)()


def caches(is_whole: bool) -> Iterator[Share]:
    """Yield whether attention over 8-bit and fp16 caches, and appends to them, pass their tests' checks."""
    common = {"layout": "NHD", "mode": "NONE", "fixed_split": 0, "dense": True}
    decode = decode_cases.decode_attention_native
    for module in (append_cases, decode_cases, extend_cases):
        chosen = [
            each for each in enumerate(module.NATIVE_CASES) if each[1]["dtype"].endswith(("int8", "e4m3", "fp16"))
        ]
        for number, case in chosen if is_whole else chosen[::5]:
            if module is append_cases:
                problem = append_cases.Problem(case, "cpu", number)
                yield passed("append_attention", problem.check, called("append_attention"))
            elif module is decode_cases:
                yield passed("decode_attention", decode_cases.check, decode, common | case, "cpu", number)
            else:
                given = (called("extend_attention"), case, "cpu", number, False)
                yield passed("extend_attention", extend_cases.check, *given)


def experts(is_whole: bool) -> Iterator[Share]:
    """Yield whether products of experts, quantized and plain, pass their tests' checks."""
    rows = (*range(1, 34), 300) if is_whole else (1, 33)
    kinds = [*sorted(BLOCKS_ON_CPU), (4, False), (4, True), (8, False), "e4m3"]
    gates = ("none", "silu") if is_whole else ("silu",)
    for kind, dtype, gate in combinations(kinds if is_whole else kinds[::4], DTYPES, gates):
        yield passed(str(kind), few_bit_experts.check, kind, gate, dtype, rows, gate == "silu")
    for dtype, gate in combinations(DTYPES, GATES if is_whole else ("silu",)):
        name = str(dtype).removeprefix("torch.")
        yield passed(name, expert_cases.check_product, "native", gate, dtype, True, 23, 71, 40)


def tiles(is_whole: bool) -> Iterator[Share]:
    """Yield whether the interpreted GPU kernel passes its tests' check for any number of rows."""
    with quick_interpreter(), strict(0):
        for name in tiled_cases.FORMATS:
            held, weight = tiled_cases.weight_of(name, 50, 450)
            for rows in (*range(1, 34), 64) if is_whole else (1, 33):
                x = tiled_cases.activations(rows, weight.shape[1], torch.float16, "cpu")
                block_m = next(most for most in (8, 16, 32, 64) if rows <= most)
                out = tiled_cases.launch(tiled_cases.config(1 + rows % 2, block_m), x, held)
                yield passed(name, tiled_cases.check, out, x, weight)


PARTS = {part.__name__: part for part in (plain, blocks, integers, checkpoints, embeddings, experts, caches)}


def seen(shares: Iterator[Share]) -> dict[str, Any]:
    """Return for each format the number of comparisons, and the largest share by dtype."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, kind, share in shares:
        found[name][kind.removeprefix("torch.")].append(share)
    return {
        name: {
            "compared": sum(map(len, kinds.values())),
            "worst_share": {kind: round(max(each), 3) for kind, each in sorted(kinds.items())},
        }
        for name, kinds in found.items()
    }


def extensions() -> list[str]:
    """Return the extensions that the compiler may use."""
    command = [*Compiler.detect().command, "-dM", "-E", "-x", "c", "/dev/null"]
    defined = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.split()
    return [name.strip("_") for name in EXTENSIONS if name in defined]


@app.command()
def one(
    is_whole: Annotated[bool, typer.Option("--whole", help="All of it.")] = False,
    triton: Annotated[bool, typer.Option("--triton", help="The kernel for GPUs, interpreted, alone.")] = False,
) -> None:
    """Print a line of JSON: the number of comparisons and the largest share of each part and format."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    if not triton and native.library() is None:
        raise SystemExit(native.unavailable_reason())
    found = {name: seen(part(is_whole)) for name, part in ({"tiles": tiles} if triton else PARTS).items()}
    told: dict[str, Any] = {"extensions": [] if triton else extensions()}
    told["parts"] = {name: forms for name, forms in found.items() if forms}
    print(json.dumps(told | {"seconds": round(time.perf_counter() - began, 1)}))


@app.command()
def whole(
    out: Out = None,
    only: Annotated[str | None, typer.Option(help="One of the sets; what FILE has of the others stays.")] = None,
) -> None:
    """Compare everything for each set of instructions; exit code 1 if an error is larger than allowed."""
    rows: Any = read(out, sets=[])["sets"] if only else []
    for name in [only] if only else [*SETS, TRITON]:
        environment = os.environ | ({VARIABLE: SETS[name]} if name in SETS else {})
        command = command_of("check", "quantized-products", "one", "--whole", *["--triton"] * (name == TRITON))
        row = {"set": name, **json_of(command, env=environment)}
        rows = replaced(rows, row, "set")
        for part, found in row["parts"].items():
            count = sum(each["compared"] for each in found.values())
            worst = max(share for each in found.values() for share in each["worst_share"].values())
            print(f"{name:22} {part:12} {count:6} compared, the largest share is {worst:.3f}", flush=True)
        write(out, record(schema=1, sets=rows))
    forms = [form for row in rows for part in row["parts"].values() for form in part.values()]
    raise typer.Exit(any(share > 1 for form in forms for share in form["worst_share"].values()))
