"""The parts of `tools/gpu_check`, each with a time limit, with tests in separate processes and one archive."""
