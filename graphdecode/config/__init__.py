"""Configurations of a runtime, in Python and in TOML."""

from graphdecode.config.settings import (
    BucketConfig,
    EngineConfig,
    ReplicaConfig,
    ServerConfig,
    load_replica_config,
    load_server_config,
)
from graphdecode.errors import ConfigError

__all__ = [
    "BucketConfig",
    "ConfigError",
    "EngineConfig",
    "ReplicaConfig",
    "ServerConfig",
    "load_replica_config",
    "load_server_config",
]
