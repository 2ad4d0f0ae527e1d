"""Causal decoders that have no family here: transformers' own modules over our cache, attention and graphs."""

from graphdecode.models.transformers_backend.folder import AdoptedFolder
from graphdecode.models.transformers_backend.module_decoder import AdoptedConfig, ModuleDecoder

__all__ = ["AdoptedConfig", "AdoptedFolder", "ModuleDecoder"]
