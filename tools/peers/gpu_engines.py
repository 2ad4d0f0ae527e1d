"""Engines that need a GPU: vLLM, SGLang and nano-vllm. Written against their documented interfaces and published
source; nobody has run them here yet.
"""

from __future__ import annotations

import json
import tempfile
from abc import abstractmethod
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from graphdecode.models import describe_model
from graphdecode.models.families import Qwen3
from peers.peer import GPU_SHARE, Peer, Tokens, Workload

_NEARLY_GREEDY = 1e-5  # nano-vllm refuses a temperature of 0; at this one only what is nearly a tie is drawn


class GpuEngine(Peer):
    """A module's class that loads and captures when it is made.

    Attributes:
        engine: name of the class.
    """

    devices = ("cuda",)
    engine: ClassVar[str] = "LLM"

    def open(self, folder: Path, workload: Workload) -> None:
        """Make the engine."""
        (module,) = self.requires
        self._module: Any = import_module(module)
        self._engine: Any = getattr(self._module, self.engine)(**self.options(folder, workload))

    @abstractmethod
    def options(self, folder: Path, workload: Workload) -> dict[str, Any]:
        """Return what the engine is made with."""


class Vllm(GpuEngine):
    """`vllm.LLM.generate` on token ids, with its CUDA graphs and its compilation as they come."""

    name = "vllm"
    requires: ClassVar = {"vllm": "vllm"}

    def options(self, folder: Path, workload: Workload) -> dict[str, Any]:
        """Return the options of its engine."""
        sizes: dict[str, Any] = {"max_model_len": workload.capacity, "max_num_seqs": workload.max_batch_size}
        sizes |= {"gpu_memory_utilization": GPU_SHARE, "enable_prefix_caching": False, "seed": 0}
        return {"model": str(folder), "dtype": workload.dtype, "skip_tokenizer_init": True} | sizes

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        """Return greedy tokens."""
        greedy = {"temperature": 0.0, "max_tokens": new_tokens, "ignore_eos": True, "detokenize": False}
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._engine.generate(requests, self._module.SamplingParams(**greedy), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """Drop the engine, and its process with it."""
        del self._engine


class Sglang(GpuEngine):
    """`sglang.Engine.generate` on token ids, with its CUDA graphs as they come."""

    name = "sglang"
    requires: ClassVar = {"sglang": "sglang"}
    engine = "Engine"

    def options(self, folder: Path, workload: Workload) -> dict[str, Any]:
        """Return the options of its engine."""
        sizes: dict[str, Any] = {"context_length": workload.capacity, "max_running_requests": workload.max_batch_size}
        sizes |= {"mem_fraction_static": GPU_SHARE, "disable_radix_cache": True, "random_seed": 0, "log_level": "error"}
        return {"model_path": str(folder), "dtype": workload.dtype, "skip_tokenizer_init": True} | sizes

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        """Return greedy tokens."""
        params = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        outputs = self._engine.generate(input_ids=prompts, sampling_params=params)
        return [list(output["output_ids"]) for output in outputs]

    def close(self) -> None:
        """Stop the engine's processes."""
        self._engine.shutdown()


class NanoVllm(GpuEngine):
    """`nanovllm.LLM.generate` on token ids, with its CUDA graphs; it takes its dtype from config.json."""

    name = "nano-vllm"
    requires: ClassVar = {"nanovllm": "nano-vllm"}

    def why_not(self, folder: Path, workload: Workload) -> str:
        """Return why not; the checkpoint may be of a family that it does not know."""
        architecture = describe_model(folder).architecture
        known = "" if architecture == Qwen3.architecture else f"knows Qwen3 only, this is {architecture}"
        return super().why_not(folder, workload) or known

    def options(self, folder: Path, workload: Workload) -> dict[str, Any]:
        """Return the options of its engine, over a folder of links whose config.json has the workload's dtype."""
        self._scratch = tempfile.TemporaryDirectory()
        scratch = Path(self._scratch.name)
        for file in folder.iterdir():
            if file.name != "config.json":
                (scratch / file.name).symlink_to(file.resolve())
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config |= {"dtype": workload.dtype, "torch_dtype": workload.dtype}
        (scratch / "config.json").write_text(json.dumps(config), encoding="utf-8")
        sizes = {"max_model_len": workload.capacity, "max_num_seqs": workload.max_batch_size}
        return {"model": str(scratch), "gpu_memory_utilization": GPU_SHARE} | sizes

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        """Return tokens that are greedy up to near-ties."""
        params = self._module.SamplingParams(temperature=_NEARLY_GREEDY, max_tokens=new_tokens, ignore_eos=True)
        return [list(output["token_ids"]) for output in self._engine.generate(prompts, params, use_tqdm=False)]

    def close(self) -> None:
        """Release the graphs and the folder of links."""
        self._engine.exit()
        self._scratch.cleanup()
