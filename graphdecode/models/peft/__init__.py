"""Adapters as PEFT saves them: the fields of their configuration, and their matrices."""
