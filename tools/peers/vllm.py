"""vLLM's offline engine. Written against its documented interface; nobody has run it here yet, as it needs a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from peers.peer import GPU_SHARE, Peer, Tokens, Workload


class Vllm(Peer):
    """`vllm.LLM.generate` on token ids, with its CUDA graphs and its compilation as they come."""

    name = "vllm"
    requires: ClassVar = {"vllm": "vllm"}
    devices = ("cuda",)

    def open(self, folder: Path, workload: Workload) -> None:
        """Load, compile and capture."""
        import vllm

        self._sampling_params = vllm.SamplingParams
        self._llm = vllm.LLM(
            model=str(folder),
            dtype=workload.dtype,
            skip_tokenizer_init=True,
            max_model_len=workload.capacity,
            max_num_seqs=workload.max_batch_size,
            gpu_memory_utilization=GPU_SHARE,
            enable_prefix_caching=False,
            seed=0,
        )

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        """Return greedy tokens."""
        params = self._sampling_params(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """Drop the engine, and its process with it."""
        del self._llm
