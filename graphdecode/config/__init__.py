"""Configurations of a runtime, in Python and in TOML."""

from graphdecode.config.settings import BucketConfig, EngineConfig, EngineKeywords
from graphdecode.errors import ConfigError

__all__ = ["BucketConfig", "ConfigError", "EngineConfig", "EngineKeywords"]
