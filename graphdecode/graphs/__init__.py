"""Capture, replay and inspection of step graphs; knows nothing of models."""

from graphdecode.graphs.audit import StalePointer, StalePointerError
from graphdecode.graphs.check import Finding, check
from graphdecode.graphs.errors import CaptureError
from graphdecode.graphs.loop import Loop
from graphdecode.graphs.manager import GraphManager
from graphdecode.graphs.report import BucketReport, GraphReport
from graphdecode.graphs.step_graph import Node, StepGraph

__all__ = [
    "BucketReport",
    "CaptureError",
    "Finding",
    "GraphManager",
    "GraphReport",
    "Loop",
    "Node",
    "StalePointer",
    "StalePointerError",
    "StepGraph",
    "check",
]
