"""What `tools/check` tries: a module for each subject, with a function `main`; oracles are those of the tests."""

import sys

from harness import ROOT

# what comes first has its test_quantized_experts
sys.path += [str(ROOT / "tests" / folder) for folder in ("kernels", "models", "attention", ".")]
