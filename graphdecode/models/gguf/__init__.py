"""GGUF files as a source of models: container, blocks, tokenizer, and the config.json that metadata stand for."""
