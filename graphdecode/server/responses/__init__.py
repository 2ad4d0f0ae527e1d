"""OpenAI's Responses API: its requests as chat completions, their outputs as items and events, and the stored ones."""
