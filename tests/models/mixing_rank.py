"""The process of a rank other than 0 whose steps take prompts along, however small the model."""

from graphdecode.engine import rank_process
from graphdecode.engine.steps import step

if __name__ == "__main__":
    step.CACHED_BYTES = 0
    rank_process.main()
