"""What `tools/check` tries: a module for each subject, with a function `main` that takes its options."""
