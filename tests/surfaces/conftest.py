"""Lets the tests of the surfaces import what they share by name, with those of the cache and of attention too."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cache"), str(HERE.parent / "attention")]
