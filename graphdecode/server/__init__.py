"""OpenAI's HTTP surface over an engine in a process of its own."""
