"""What `tools/make` makes: a module for each subject, with a function `main` that takes its options."""
