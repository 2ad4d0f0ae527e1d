"""Looking into steps and graphs: what they do, whose memory they touch, and what of it has moved."""
