"""llama.cpp through llama-cpp-python, on a CPU, over the same weights: a Llama checkpoint is written as GGUF first."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from elsewhere import Sequences, llama_cpp_of, llama_model
from graphdecode.linear.weight_form import read_fused
from graphdecode.models import describe_model
from graphdecode.models.checkpoint import Checkpoint
from graphdecode.models.config import ModelConfig
from graphdecode.models.families.llama import Llama
from graphdecode.models.transformers_backend import AdoptedConfig
from peers.peer import Peer, Tokens, Workload

_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def why_not_gguf(config: ModelConfig | AdoptedConfig) -> str:
    """Return why `write_gguf` cannot write a model, or ""."""
    if not isinstance(config, ModelConfig) or config.architecture != Llama.architecture:
        return f"only Llama checkpoints are written as GGUF here, this is {config.architecture}"
    if config.rope.rope_type != "default":
        return f"only the default rope is written as GGUF here, this is {config.rope.rope_type}"
    if config.qkv_bias or config.o_bias or config.mlp_bias or config.activation != "silu":
        return "only Llamas without biases and with silu are written as GGUF here"
    return ""


def gguf_type(dtype: str) -> Any:
    import gguf

    return gguf.GGMLQuantizationType[_TYPES[dtype]]


def write_gguf(folder: Path, file: Path, dtype: str) -> None:
    """Write safetensors as GGUF without a vocabulary; weights are rounded to `dtype`, norms too."""
    import gguf

    checkpoint = Checkpoint(folder)
    config = checkpoint.config()
    writer = gguf.GGUFWriter(file, "llama")
    fields = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "rope_freq_base": config.rope.theta,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "tokenizer_model": "no_vocab",
    } | dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), config.head_dim)
    for field, value in fields.items():
        getattr(writer, f"add_{field}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for stored in checkpoint.tensors:
        name = names.get_name(stored, (".weight",))
        if name is None or (name == "output.weight" and config.tie_word_embeddings):
            continue
        tensor = read_fused(checkpoint, (stored,), getattr(torch, dtype), torch.device("cpu"))
        part = name.split(".")[-2]
        if part in heads:
            tensor = interleaved(tensor, heads[part])
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor.float().numpy())
        else:
            writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=gguf_type(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Return a weight [heads * head_dim, hidden] whose rotary pairs (i, i + head_dim / 2) are adjacent."""
    rows, hidden = weight.shape
    return weight.view(heads, 2, rows // heads // 2, hidden).transpose(1, 2).reshape(rows, hidden)


class LlamaCpp(Peer):
    """`llama_decode` on batches of token ids; each batch size has its own context, in the workload's dtype."""

    name = "llama-cpp"
    requires: ClassVar = {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}
    devices = ("cpu",)

    def unavailable_reason(self, folder: Path, workload: Workload) -> str:
        return super().unavailable_reason(folder, workload) or why_not_gguf(describe_model(folder))

    def open(self, folder: Path, workload: Workload) -> None:
        self._api = llama_cpp_of()
        self._scratch = tempfile.TemporaryDirectory()
        file = Path(self._scratch.name) / "model.gguf"
        write_gguf(folder, file, workload.dtype)
        self._model = llama_model(self._api, str(file))
        sizes = (workload.capacity, workload.threads, gguf_type(workload.dtype))
        self._contexts = {size: Sequences(self._api, self._model, size, *sizes) for size in workload.batch_sizes}

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        answers, _ = self._contexts[len(prompts)].answer(np.array(prompts), new_tokens)
        return np.stack(answers, axis=1).tolist()

    def close(self) -> None:
        for context in self._contexts.values():
            context.close()
        self._api.llama_model_free(self._model)
        self._scratch.cleanup()
