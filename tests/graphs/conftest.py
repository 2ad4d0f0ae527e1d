"""Lets the tests of this folder import the corpus of steps by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
