"""FlashInfer's module path of the same name: `from graphdecode.cascade import ...`."""

from graphdecode.attention import merge_state as merge_state
from graphdecode.attention import merge_state_in_place as merge_state_in_place
from graphdecode.attention import merge_states as merge_states
from graphdecode.surfaces.flashinfer import *  # noqa: F403
