"""GGUF files as a source of models: container, blocks, tokenizer, and metadata as a config.json."""
