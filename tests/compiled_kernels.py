"""Marks of tests that need the compiled kernels."""

import pytest
import torch

from graphdecode.kernels.native import library as native

WITHOUT = f"no compiled kernels: {native.unavailable_reason()}"
compiled = pytest.mark.skipif(native.library() is None, reason=WITHOUT)
compiled_or_gpu = pytest.mark.skipif(native.library() is None and not torch.cuda.is_available(), reason=WITHOUT)
NATIVE = pytest.param("native", marks=compiled)
