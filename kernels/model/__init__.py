"""What else a step is made of: embedding, activation, and the batch's advance to the next step."""
