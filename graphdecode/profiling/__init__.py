"""Measuring: read bandwidth, step latency, and what a step could cost at best."""

from graphdecode.profiling.environment import read_bandwidth

__all__ = ["read_bandwidth"]
