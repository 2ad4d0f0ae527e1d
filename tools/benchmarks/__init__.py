"""What `tools/bench` measures: a module for each subject, with a function `main` that takes its options."""
