"""How operations become operators: registration, the compiled kernels, what Triton needs to be optional."""
