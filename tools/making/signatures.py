"""tests/surfaces/signatures.json: parameters of what the drop-in surfaces stand for, from the originals' wheels."""

from __future__ import annotations

import ast
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from harness import ROOT

FILE = ROOT / "tests" / "surfaces" / "signatures.json"
_KV_CACHE = "optimum/neuron/models/inference/backend/modules/kvcache/kv_cache_manager.py"
_ATTENTION = "transformer_engine/pytorch/attention"
# wheel -> file -> classes, whose public methods are taken, and functions
_ORIGINALS: dict[str, dict[str, tuple[str, ...]]] = {
    "flashinfer_python": {
        "flashinfer/decode.py": (
            *("single_decode_with_kv_cache", "BatchDecodeWithPagedKVCacheWrapper", "fast_decode_plan"),
            *("CUDAGraphBatchDecodeWithPagedKVCacheWrapper", "trtllm_batch_decode_with_kv_cache"),
            "xqa_batch_decode_with_kv_cache",
        ),
        "flashinfer/mla/_batch_mla/_wrapper.py": ("BatchMLAPagedAttentionWrapper",),
        "flashinfer/mla/_batch_mla/_contracts.py": ("MLAPlanMetadata",),
        "flashinfer/mla/_core.py": ("trtllm_batch_decode_with_kv_cache_mla", "xqa_batch_decode_with_kv_cache_mla"),
        "flashinfer/cascade.py": (
            *("merge_state", "merge_state_in_place", "merge_states", "MultiLevelCascadeAttentionWrapper"),
            "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
        ),
        "flashinfer/page.py": (
            *("append_paged_kv_cache", "append_paged_mla_kv_cache", "get_batch_indices_positions", "get_seq_lens"),
        ),
        "flashinfer/sampling.py": (
            *("softmax", "sampling_from_logits", "sampling_from_probs", "top_p_sampling_from_probs"),
            *("top_k_sampling_from_probs", "min_p_sampling_from_probs", "top_k_top_p_sampling_from_logits"),
            *("top_k_top_p_sampling_from_probs", "top_p_renorm_probs", "top_k_renorm_probs", "top_k_mask_logits"),
            "chain_speculative_sampling",
        ),
    },
    "transformer_engine": {
        f"{_ATTENTION}/inference.py": (
            *("KVCacheManager", "InferenceParams", "NonPagedKVCacheManager", "PagedKVCacheManager"),
        ),
        f"{_ATTENTION}/dot_product_attention/dot_product_attention.py": ("DotProductAttention",),
        f"{_ATTENTION}/multi_head_attention.py": ("MultiheadAttention",),
        f"{_ATTENTION}/rope.py": ("RotaryPositionEmbedding", "apply_rotary_pos_emb"),
        "transformer_engine/pytorch/transformer.py": ("TransformerLayer",),
    },
    "optimum_neuron": {_KV_CACHE: ("KVCacheManager",)},
}


def _parameters(function: ast.FunctionDef) -> list[str]:
    """Return the parameters as text, without `self` of a method, `*` before those that have names only."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    texts = [_text(each, default) for each, default in zip(positional, defaults, strict=True)]
    if given.vararg or given.kwonlyargs:
        texts.append(f"*{given.vararg.arg if given.vararg else ''}")
    texts += [_text(each, default) for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return texts + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def _text(parameter: ast.arg, default: ast.expr | None) -> str:
    return parameter.arg if default is None else f"{parameter.arg}={ast.unparse(default)}"


def _found(source: str, names: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield name and parameters of functions and of classes' methods; of overloads the last, which has the body."""
    functions: dict[str, list[str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            functions[node.name] = _parameters(node)
        elif isinstance(node, ast.ClassDef) and node.name in names:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and (method.name[0] != "_" or method.name in _PRIVATE):
                    functions[f"{node.name}.{method.name}"] = _parameters(method)[1:]
    yield from functions.items()


_PRIVATE = ("__init__", "_plan_impl")  # `plan` passes the rest on


def main(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Of wheels: pip download --no-deps flashinfer-python transformer_engine optimum-neuron",
            exists=True,
            file_okay=False,
        ),
    ],
) -> None:
    """Write the file."""
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    told: dict[str, dict[str, list[str]]] = {}
    for package, files in _ORIGINALS.items():
        wheels = list(folder.glob(f"{package}-*.whl"))
        if len(wheels) != 1:
            told |= {name: known for name, known in before.items() if name.startswith(f"{package} ")}
            print(f"{package}: {len(wheels)} wheels, its signatures are left as they are")
            continue
        (wheel,) = wheels
        version = wheel.name.split("-")[1]
        of_package = told[f"{package} {version}"] = {}
        with zipfile.ZipFile(wheel) as archive:
            for file, names in files.items():
                of_package.update(_found(archive.read(file).decode(), names))
    FILE.write_text(json.dumps(told, indent=1) + "\n")
    print(f"{FILE.relative_to(ROOT)}: {sum(map(len, told.values()))} functions of {', '.join(told)}")
