"""The subjects of `tools/check`: modules with a function `main`; references are those of the tests."""

import sys

from harness import ROOT

# the first one's test_quantized_experts is imported
sys.path += [str(ROOT / "tests" / folder) for folder in ("kernels", "models", "attention", ".")]
