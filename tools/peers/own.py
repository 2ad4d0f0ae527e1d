"""This engine, as a peer among others."""

from __future__ import annotations

from pathlib import Path

from graphdecode.config import BucketConfig
from graphdecode.text import LLM, SamplingParams
from peers.peer import Peer, Tokens, Workload


class Graphdecode(Peer):
    """`LLM.generate`, with a bucket for each batch size of the workload."""

    name = "graphdecode"

    def open(self, folder: Path, workload: Workload) -> None:
        """Load and capture."""
        config = BucketConfig(
            max_batch_size=workload.max_batch_size,
            max_sequence_length=workload.capacity,
            batch_sizes=list(workload.batch_sizes),
        )
        self._llm = LLM(folder, config=config, dtype=workload.dtype, device=workload.device, prefix_cache=False)

    @property
    def weight_bytes(self) -> int:
        """That one step reads."""
        return self._llm.model.weight_bytes

    def generate(self, prompts: Tokens, new_tokens: int) -> Tokens:
        """Return greedy tokens."""
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        return [output.outputs[0].token_ids for output in self._llm.generate(prompts, params, use_tqdm=False)]

    def close(self) -> None:
        """Release the graphs."""
        self._llm.close()
