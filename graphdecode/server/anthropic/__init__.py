"""Anthropic's Messages API: its requests as chat completions, and their outputs as its messages and events."""
