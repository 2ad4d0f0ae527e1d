"""A cluster of replicas as discrete events: what `tools/bench cluster` runs."""
