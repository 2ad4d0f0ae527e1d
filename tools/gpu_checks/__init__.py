"""What `tools/gpu_check` runs, and how: parts with limits, tests in processes of their own, one archive."""
