"""How long the random lives of the caches are, and a count of the steps that they took.

`GRAPHDECODE_CACHE_STEPS` says how many steps each machine takes at least.
"""

import os
from collections import Counter

from hypothesis import HealthCheck, settings

STEPS = int(os.environ.get("GRAPHDECODE_CACHE_STEPS", "10000"))
STEPS_PER_LIFE = 50

machine_settings = settings(
    max_examples=STEPS // 35 + 1,  # some lives end early
    stateful_step_count=STEPS_PER_LIFE,
    deadline=None,
    derandomize="GRAPHDECODE_CACHE_STEPS" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)


taken = Counter()  # steps of each machine
