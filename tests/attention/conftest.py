"""Lets the tests of attention import what they share by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
