"""Fuzzing of all untrusted input: seeded mutations, each in its own process, counted by outcome."""
