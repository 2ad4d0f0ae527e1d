"""Capture, replay and inspection of step graphs; knows nothing of models."""

from graphdecode.graphs.check import Finding, check
from graphdecode.graphs.errors import CaptureError
from graphdecode.graphs.manager import GraphManager
from graphdecode.graphs.report import BucketReport, GraphReport
from graphdecode.graphs.step_graph import StepGraph

__all__ = ["BucketReport", "CaptureError", "Finding", "GraphManager", "GraphReport", "StepGraph", "check"]
