"""GGUF files as a source of models: the container, its block types, and what they are in a config.json's words."""
