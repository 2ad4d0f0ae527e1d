"""Compare the sampler's kernels, in Triton's interpreter, with the torch version on rows that ask for anything.

    python tools/fuzz_sampler.py --rows 10000 --seed 0

A batch has rows of every kind of logits (flat, sharp, tied, of two values, huge, -inf, +inf, NaN) and of every wish
(temperature, top-k, top-p, min-p, penalties, biases, masks, bad words, stops), over a vocabulary of several blocks,
with lists of candidates that are long enough or too short. Tokens have to be the same, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # must stand before the first import of triton

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))
from hostile_rows import hostile_rows, quick_interpreter

from graphdecode.kernels.native.registration import versions
from graphdecode.kernels.sampling.sample import sample_triton

ROWS = 50


def main() -> None:
    """Run the comparison, and say how many rows differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began, different, done = time.perf_counter(), 0, 0
    with quick_interpreter():
        for seed in range(arguments.seed, arguments.seed + -(-arguments.rows // ROWS)):
            logits, positions, slots, counts, recent, sizes = hostile_rows(ROWS, seed)
            live = torch.tensor([ROWS - 1], dtype=torch.int32)
            expected, found = (torch.zeros(ROWS, dtype=torch.int64) for _ in range(2))
            versions("sample").torch(expected, logits, positions, live, *slots, counts, recent)
            sample_triton(found, logits, positions, live, slots, counts, recent, *sizes)
            wrong = (expected != found).nonzero().flatten().tolist()
            different, done = different + len(wrong), done + ROWS
            for row in wrong:
                print(f"seed {seed} row {row}: {found[row]} instead of {expected[row]}", flush=True)
    seconds = time.perf_counter() - began
    print(f"{done} rows, {different} different, {seconds:.0f} s")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
