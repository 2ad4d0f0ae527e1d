"""Compare the tokens of several ranks with those of one, for the small checkpoints of every family.

    python tools/try_tensor_parallel.py [--ranks 2,4] [--collectives shared,gloo] [--families llama-3,qwen2-moe]

Each family's requests are sampled and greedy, longer than a chunk and shorter, over few pages, so that some are
preempted, with prefixes that are shared. A group of processes loads one family after the other. The last lines are what
torchrun gives: the demo's answer, printed by rank 0 alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "models"))

from family_checkpoints import FAMILIES, save_checkpoint

from graphdecode import Engine, EngineConfig, Request, SamplingParams
from graphdecode.engine.loading import load_engine, start_ranks_of

_LAUNCHED = """
from graphdecode import LLM, SamplingParams
with LLM("demo", tensor_parallel_size={ranks}, collectives="{how}", max_batch_size=2) as llm:
    print("torchrun answers", llm.generate("417+385=", SamplingParams(temperature=0.0))[0].outputs[0].text)
"""


def settings(ranks: int, how: str = "auto") -> EngineConfig:
    """Return settings under which pages run out."""
    return EngineConfig.of(
        None, tensor_parallel_size=ranks, collectives=how, max_batch_size=4, batch_sizes=[4], page_size=4,
        total_num_pages=22, max_sequence_length=64, max_prefill_tokens=16, dtype="float32",
    )  # fmt: skip


def answers(engine: Engine) -> list[list[int]]:
    """Return the tokens of some requests."""
    found: dict[int, list[int]] = {}
    for seed, length in enumerate((1, 3, 9, 17, 24, 30)):
        params = SamplingParams(temperature=0.8 * (seed % 2), seed=seed, max_tokens=16, ignore_eos=True)
        found[engine.add(Request([5, 6, 7, 8, 9, 10, *range(20 + seed, 20 + seed + length)], params))] = []
    while engine.has_work:
        for event in engine.step():
            found[event.request_id] += event.token_ids
    return list(found.values())


def compared(names: list[str], folders: dict[str, Path], ranks: int, how: str) -> int:
    """Print what becomes of each family; return how many differ."""
    differ, leader = 0, start_ranks_of(settings(ranks, how))
    for name in names:
        alone = load_engine(folders[name], settings(1))
        expected, began = answers(alone), time.perf_counter()
        alone.close()
        shared = load_engine(folders[name], settings(ranks, how), ranks=leader)
        is_same = answers(shared) == expected
        differ += not is_same
        whole, own = alone.model.weight_bytes, shared.model.weight_bytes
        print(
            f"{name:22s} {ranks} ranks, {how}: {'the same tokens' if is_same else 'OTHER TOKENS'}, "
            f"{shared.num_preemptions} preemptions, weights read {own / whole:.3f} of one rank's, "
            f"{time.perf_counter() - began:.1f} s",
            flush=True,
        )
        shared.close()
    leader.close()
    return differ


def launched(ranks: int, how: str) -> int:
    """Start the demo by torchrun; return 1 where it does not answer as it should."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(_LAUNCHED.format(ranks=ranks, how=how))
        script.flush()
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), script.name]
        ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    print(f"{ranks} ranks, {how}: {ran.stdout.strip()}", flush=True)
    return int(ran.stdout.split() != ["torchrun", "answers", "802"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--collectives", default="shared,gloo")
    parser.add_argument("--families", default=",".join(FAMILIES))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    names, failures = [name for name in given.families.split(",") if name], 0
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch) / name for name in names}
        with contextlib.redirect_stderr(io.StringIO()):
            for name, folder in folders.items():
                save_checkpoint(name, folder)
        for ranks in map(int, given.ranks.split(",")):
            for how in given.collectives.split(","):
                failures += compared(names, folders, ranks, how) + launched(ranks, how)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
