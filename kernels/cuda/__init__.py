"""CUDA C++ kernels, compiled by NVRTC for the GPU at hand."""
