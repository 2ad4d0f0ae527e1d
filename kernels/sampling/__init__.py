"""From logits to tokens: penalties, masks, filters, random numbers, log-probabilities."""
