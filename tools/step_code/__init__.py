"""Models a decode step on an NVIDIA GPU without one: its launches, their machine code, and their time."""
