"""An open-loop load on the engine: when requests arrive, what they see, and a picture of it."""
