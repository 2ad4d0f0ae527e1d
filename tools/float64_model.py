"""A reference Llama in float64 that shares no code with this package."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ERROR = 5e-6  # largest error in float32, relative to a head's largest entry


class Float64Model:
    """A Llama in float64, from a GGUF file or a checkpoint folder (Touvron et al., 2023, section 2.2).

    Args:
        path: of the file or folder; another architecture is a ValueError.
        cache: the rounding of keys and values per token and head: "int8" (codes times the largest value over 127, in
            bfloat16; keys are multiplied by a Hadamard matrix first), "fp8" (e4m3), or "auto" (none).

    Attributes:
        sure: leading tokens of the last call whose keys and values float32 cannot round otherwise.
    """

    def __init__(self, path: Path, cache: str = "auto") -> None:
        self._cache = cache
        self.sure = 0
        self._is_gguf = path.suffix == ".gguf"
        self._read = self._gguf(path) if self._is_gguf else self._folder(path)

    def _gguf(self, path: Path) -> Callable[[str], Tensor]:
        from gguf import GGUFReader, dequantize  # type: ignore[attr-defined]

        reader = GGUFReader(path)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = reader.fields["general.architecture"].contents()
        if architecture != "llama":
            raise ValueError(f"{path.name} is a {architecture}; the reference supports only llama")

        def setting(name: str) -> Any:
            return reader.fields[f"llama.{name}"].contents()

        self.layers = setting("block_count")
        self.heads, self.kv_heads = setting("attention.head_count"), setting("attention.head_count_kv")
        self.eps, self.base = setting("attention.layer_norm_rms_epsilon"), setting("rope.freq_base")

        def read(name: str) -> Tensor:
            tensor = tensors["token_embd.weight" if name == "output.weight" and name not in tensors else name]
            return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype(np.float64))

        return read

    def _folder(self, path: Path) -> Callable[[str], Tensor]:
        from gguf import MODEL_ARCH, get_tensor_name_map  # type: ignore[attr-defined]
        from safetensors import safe_open

        config = json.loads((path / "config.json").read_text())
        if config["model_type"] != "llama":
            raise ValueError(f"{path.name} is a {config['model_type']}; the reference supports only llama")
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.kv_heads, self.eps = config["num_key_value_heads"], config["rms_norm_eps"]
        self.base = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        file = safe_open(next(path.glob("*.safetensors")), "pt")
        named = get_tensor_name_map(MODEL_ARCH.LLAMA, self.layers)
        names = {named.get_name(stored, (".weight",)): stored for stored in file.keys()}  # noqa: SIM118 (no mapping)

        def read(name: str) -> Tensor:
            return file.get_tensor(names.get(name, names["token_embd.weight"])).double()

        return read

    def _cached(self, x: Tensor) -> Tensor:
        """Return heads [tokens, heads, head_dim], rounded like the cache's; note where float32 may differ."""
        if self._cache != "auto":
            error = _ERROR * x.abs().amax(-1, keepdim=True)
            moved = self._rounded(x + error) - self._rounded(x - error)
            unsure = (moved > 4 * error).flatten(1).any(1).nonzero()
            if len(unsure):
                self.sure = min(self.sure, int(unsure[0]))
        return self._rounded(x)

    def _rounded(self, x: Tensor) -> Tensor:
        if self._cache == "fp8":
            return x.to(torch.float8_e4m3fn).double()
        if self._cache == "int8":
            unit = (x.abs().amax(-1, keepdim=True) / 127).bfloat16().double()
            return (x / unit).round().clamp(-127, 127) * unit
        return x

    @torch.no_grad()
    def log_probabilities(self, ids: list[int]) -> Tensor:
        """Return the log-probabilities after each token, float64 [tokens, vocab]."""
        return self.logits(ids).log_softmax(-1)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """Return the logits after each token, float64 [tokens, vocab]."""
        self.sure = len(ids)
        hidden = self._read("token_embd.weight")[ids]
        count, head_dim = len(ids), hidden.shape[1] // self.heads
        frequencies = self.base ** (-torch.arange(0, head_dim, 2).double() / head_dim)
        angles = torch.arange(count).double()[:, None] * frequencies
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        hidden_later = torch.full((count, count), -math.inf, dtype=torch.float64).triu(1)

        def norm(x: Tensor, name: str) -> Tensor:
            return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self._read(name)

        mixing = _hadamard(head_dim) if self._cache == "int8" else torch.eye(head_dim, dtype=torch.float64)

        def rotated(x: Tensor) -> Tensor:
            # in GGUF a pair's channels are adjacent, in folders half a head apart
            pairs = x.unflatten(-1, (-1, 2)) if self._is_gguf else x.unflatten(-1, (2, -1)).transpose(-1, -2)
            turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
            return turned.transpose(-1, -2).flatten(-2)  # first and second channels of all pairs

        for layer in range(self.layers):

            def weight(name: str, layer: int = layer) -> Tensor:
                return self._read(f"blk.{layer}.{name}.weight")

            x = norm(hidden, f"blk.{layer}.attn_norm.weight")
            q, k, v = (
                (x @ weight(f"attn_{name}").T).unflatten(-1, (heads, head_dim))
                for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
            )
            q, k, v = (
                each.transpose(0, 1)
                for each in (rotated(q) @ mixing, self._cached(rotated(k) @ mixing), self._cached(v))
            )
            k, v = (each.repeat_interleave(self.heads // self.kv_heads, 0) for each in (k, v))
            seen = (q @ k.transpose(1, 2) / math.sqrt(head_dim) + hidden_later).softmax(-1) @ v
            hidden = hidden + seen.transpose(0, 1).flatten(1) @ weight("attn_output").T
            x = norm(hidden, f"blk.{layer}.ffn_norm.weight")
            gated = torch.nn.functional.silu(x @ weight("ffn_gate").T) * (x @ weight("ffn_up").T)
            hidden = hidden + gated @ weight("ffn_down").T
        return norm(hidden, "output_norm.weight") @ self._read("output.weight").T


def _hadamard(dim: int) -> Tensor:
    """Return an orthonormal Hadamard matrix, float64 [dim, dim], in blocks of the largest power of two."""
    size = dim & -dim
    parity = [[(-1.0) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    block = torch.tensor(parity, dtype=torch.float64) / math.sqrt(size)
    return torch.block_diag(*[block] * (dim // size))
