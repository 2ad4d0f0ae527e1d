"""What the tests of the cache share: their modules by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
