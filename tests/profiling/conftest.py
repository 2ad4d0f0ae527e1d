"""Puts `tools/` on the path: the adapters of other engines are imported as its scripts import them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
