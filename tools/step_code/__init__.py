"""What a decode step launches on an NVIDIA GPU, looked at without one: its launches, their code, and what they cost."""
