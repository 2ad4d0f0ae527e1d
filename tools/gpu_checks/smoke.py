"""A first look at a device: tokens against the CPU's, what the graphs hold, how loops are launched, and the audit.

python -m gpu_checks.smoke [DEVICE]        prints JSON; ends with 1 where something is not as it has to be
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch

from graphdecode import LLM, BucketConfig, SamplingParams

PROMPTS = ["417+385=", "rev oceanic=", "sort bdca="]
STEPS_PER_LAUNCH = 4


def answers(device: str, steps_per_launch: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Return greedy tokens, and what was captured for them."""
    config = BucketConfig(max_batch_size=4, max_sequence_length=128, steps_per_launch=steps_per_launch)
    with LLM("demo", config=config, device=device, dtype="float32") as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=16))
        stale = llm.graphs.audit()
        graphs = {
            "backend": llm.graphs.backend,
            "buckets": llm.graphs.report().as_dict(),
            "edges": {bucket: edges_of(graph) for bucket, graph in llm.graphs.graphs.items()},
            "audit": [str(pointer) for pointer in stale],
            "audit_certain": sum(pointer.is_certain for pointer in stale),
        }
        return [list(output.outputs[0].token_ids) for output in outputs], graphs


def edges_of(graph: Any) -> dict[str, int] | None:
    """Count the edges of a captured graph by their type: programmatic ones let a kernel start early."""
    if not hasattr(graph, "raw_graph"):
        return None
    from cuda.bindings import driver

    handle = driver.CUgraph(init_value=graph.raw_graph())
    error, *found = driver.cuGraphGetEdges(handle, 0)
    if int(error) == 0:
        error, *found = driver.cuGraphGetEdges(handle, found[-1])
    if int(error) != 0:
        return {error.name: 1}
    return dict(Counter(str(getattr(edge.type, "name", edge.type)) for edge in found[2]))


def main() -> int:
    """Print what was seen."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
    expected, _ = answers("cpu", 1)
    seen: dict[str, Any] = {"device": device, "tokens": expected}
    problems = []
    for steps in (1, STEPS_PER_LAUNCH):
        tokens, graphs = answers(device, steps)
        seen[f"{steps} steps a launch"] = graphs
        if tokens != expected:
            problems.append(f"{steps} steps a launch: {tokens} instead of the CPU's {expected}")
        if graphs["audit_certain"]:
            problems.append(f"{steps} steps a launch: {graphs['audit_certain']} pointers whose owner has left them")
    print(json.dumps(seen | {"problems": problems}, indent=1, default=str))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
