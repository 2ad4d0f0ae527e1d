"""SGLang's offline engine. Written against its documented interface; nobody has run it here yet, as it needs a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from peers.peer import GPU_SHARE, Peer, Tokens, Workload


class Sglang(Peer):
    """`sglang.Engine.generate` on token ids, with its CUDA graphs as they come."""

    name = "sglang"
    requires: ClassVar = {"sglang": "sglang"}
    devices = ("cuda",)

    def open(self, folder: Path, workload: Workload) -> None:
        """Start the engine's processes and capture."""
        import sglang

        self._engine = sglang.Engine(
            model_path=str(folder),
            dtype=workload.dtype,
            skip_tokenizer_init=True,
            context_length=workload.capacity,
            max_running_requests=workload.max_batch_size,
            mem_fraction_static=GPU_SHARE,
            disable_radix_cache=True,
            random_seed=0,
            log_level="error",
        )

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        """Return greedy tokens."""
        params = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        outputs = self._engine.generate(input_ids=prompts, sampling_params=params)
        return [list(output["output_ids"]) for output in outputs]

    def close(self) -> None:
        """Stop the engine's processes."""
        self._engine.shutdown()
