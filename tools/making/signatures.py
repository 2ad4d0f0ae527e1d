"""tests/surfaces/signatures.ini: parameters of what the drop-in surfaces stand for, from the originals' wheels."""

from __future__ import annotations

import ast
import configparser
import textwrap
import zipfile
from pathlib import Path
from typing import Annotated

import typer

from harness import ROOT

FILE = ROOT / "tests" / "surfaces" / "signatures.ini"
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


def _parameters(function: ast.FunctionDef) -> str:
    """Return the parameters as text, without annotations."""
    for node in ast.walk(function.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(function.args)


def _signatures(source: str, names: tuple[str, ...]) -> dict[str, str]:
    """Return name and parameters of functions and of classes' methods; of overloads the last, which has the body."""
    functions: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            functions[node.name] = _parameters(node)
        elif isinstance(node, ast.ClassDef) and node.name in names:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and (method.name[0] != "_" or method.name in _PRIVATE):
                    functions[f"{node.name}.{method.name}"] = _parameters(method).partition(", ")[2]  # behind `self`
    return functions


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
    signatures = configparser.ConfigParser(delimiters=(":",), interpolation=None)
    signatures.optionxform = str  # type: ignore[assignment,method-assign]
    signatures.read(FILE)
    lines = []
    for package, files in _ORIGINALS.items():
        wheels = list(folder.glob(f"{package}-*.whl"))
        version = next((each for each in signatures.sections() if each.startswith(f"{package} ")), package)
        functions = dict(signatures[version]) if version in signatures else {}
        if len(wheels) == 1:
            version = f"{package} {wheels[0].name.split('-')[1]}"
            with zipfile.ZipFile(wheels[0]) as archive:
                functions = {}
                for file, names in files.items():
                    functions |= _signatures(archive.read(file).decode(), names)
        else:
            print(f"{package}: {len(wheels)} wheels, its signatures are left as they are")
        lines += ["", f"[{version}]"]
        lines += [_wrapped(f"{name}: {' '.join(text.split())}".rstrip()) for name, text in functions.items()]
        print(f"{version}: {len(functions)} functions")
    FILE.write_text("\n".join(lines[1:]) + "\n")


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 120, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
