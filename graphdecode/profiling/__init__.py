"""Measurements: read bandwidth, and the latency of steps with its floor."""

from graphdecode.profiling.environment import read_bandwidth

__all__ = ["read_bandwidth"]
