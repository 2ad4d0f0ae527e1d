"""Other operators of a step: embedding, activation, and the advance to the next step."""
