"""FlashInfer's module path of the same name: `from graphdecode.sampling import ...`."""

from graphdecode.surfaces.flashinfer import *  # noqa: F403
from graphdecode.surfaces.flashinfer import top_k_renorm_probs, top_p_renorm_probs

top_k_renorm_prob, top_p_renorm_prob = top_k_renorm_probs, top_p_renorm_probs
