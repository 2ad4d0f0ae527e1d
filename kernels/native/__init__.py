"""Registration of operators, the compiled CPU kernels, and optional Triton."""
