"""What `tools/try_replicas.py` tries on a real Ray: a module for each claim, and what they share."""
