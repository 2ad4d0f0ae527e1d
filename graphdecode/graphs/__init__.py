"""Capture, replay and inspection of step graphs; knows nothing of models."""

from graphdecode.graphs.backend import StalePointer, StalePointerError
from graphdecode.graphs.errors import CaptureError
from graphdecode.graphs.inspect.check import Finding, check
from graphdecode.graphs.report import BucketReport, GraphReport
from graphdecode.graphs.step_graph import Loop, Node, StepGraph
from graphdecode.graphs.table import GraphManager, GraphTable

__all__ = [
    "BucketReport",
    "CaptureError",
    "Finding",
    "GraphManager",
    "GraphReport",
    "GraphTable",
    "Loop",
    "Node",
    "StalePointer",
    "StalePointerError",
    "StepGraph",
    "check",
]
