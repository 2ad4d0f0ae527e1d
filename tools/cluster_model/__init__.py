"""A cluster of replicas as discrete events: what `tools/simulate_cluster.py` runs."""
