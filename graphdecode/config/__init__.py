"""Configurations of a runtime, in Python and in TOML."""

from graphdecode.config.keywords import EngineKeywords
from graphdecode.config.replicas import ReplicaConfig
from graphdecode.config.server import ServerConfig
from graphdecode.config.settings import (
    BucketConfig,
    EngineConfig,
    load_replica_config,
    load_server_config,
)
from graphdecode.errors import ConfigError

__all__ = [
    "BucketConfig",
    "ConfigError",
    "EngineConfig",
    "EngineKeywords",
    "ReplicaConfig",
    "ServerConfig",
    "load_replica_config",
    "load_server_config",
]
