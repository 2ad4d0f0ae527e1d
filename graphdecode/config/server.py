"""Sections [server] and [replicas] of a configuration file: the server, and several engines behind it."""

from __future__ import annotations

from dataclasses import dataclass

from graphdecode.config.key import auto_or, boolean, check_keys, integer, key, matching, none_or, number, one_of, texts
from graphdecode.errors import ConfigError

SERVER = "server"  # the section
REPLICAS = "replicas"  # the section
# Share of the way down that one step of downscaling goes. Requests in flight do not show what fewer replicas can serve:
# 17 half-busy ones may have as many as one full one, and one step down to that would leave a backlog.
DOWNSCALING_FACTOR = 0.25


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the server: address, access and limits.

    Raises:
        ConfigError: a value is invalid.
    """

    host: str = key(
        SERVER, "127.0.0.1", matching(r"\S+", "an address or a host's name", "HOST"), "Address to listen on."
    )
    port: int = key(SERVER, 8000, integer(0, 65535), "Port to listen on; 0 takes a free one.")
    api_keys: tuple[str, ...] | list[str] = key(
        SERVER,
        (),
        texts("KEY"),
        "Bearer tokens that may use /v1; none: no token is needed. GRAPHDECODE_API_KEY adds one.",
        flag="--api-key",
    )
    served_model_name: str | None = key(
        SERVER, None, none_or(matching(r"\S+", "a name", "NAME"), '"my-model"'), "What clients call the model."
    )
    allowed_hosts: tuple[str, ...] | list[str] = key(
        SERVER,
        (),
        texts("HOST"),
        'Host names that requests may have, besides localhost and addresses; "*" allows all. Left out: no others if '
        "the server listens on this machine only, else all.",
        flag="--allowed-host",
    )
    max_connections: int = key(SERVER, 1000, integer(1), "Open connections at most; further ones get 503.")
    max_waiting: int = key(SERVER, 256, integer(0), "Waiting requests at most; further ones get 429.")
    max_body_bytes: int = key(
        SERVER,
        16 << 20,
        integer(1),
        "Bytes of a request body at most; all bodies in memory may take eight times as much.",
    )
    max_prompts: int = key(SERVER, 1024, integer(1), "Prompts of one request at most.")
    max_answers: int = key(SERVER, 128, integer(1), "Outputs of one prompt at most: the largest n.")
    request_timeout_s: float = key(SERVER, 600.0, number(0), "Seconds after which a request fails with 504; 0: never.")
    idle_timeout_s: float = key(
        SERVER,
        30.0,
        number(0),
        "Seconds after which a connection is closed whose client sends no whole request or reads nothing; 0: never.",
    )
    drain_timeout_s: float = key(SERVER, 30.0, number(0), "Seconds for requests in flight to finish after SIGTERM.")
    cors_origins: tuple[str, ...] | list[str] = key(
        SERVER, (), texts("ORIGIN"), 'Origins whose pages may call the server; "*" allows all.', flag="--cors-origin"
    )
    otlp_traces_endpoint: str | None = key(
        SERVER,
        None,
        none_or(matching(r"https?://\S+", "an http address"), '"http://127.0.0.1:4318/v1/traces"'),
        "OTLP/HTTP endpoint for OpenTelemetry traces; needs the extra `otel`.",
    )
    chat_template: str | None = key(
        SERVER,
        None,
        none_or(matching(r"(?s).*\S.*", "a path", "FILE"), '"template.jinja"'),
        "File with a chat template in Jinja; left out: the model's own.",
    )
    trust_request_chat_template: bool = key(
        SERVER,
        False,
        boolean(),
        "Allow `chat_template` in requests: a program, which runs in a child process with limits.",
    )
    lora_modules: tuple[str, ...] | list[str] = key(
        SERVER,
        (),
        texts("NAME=FOLDER"),
        "LoRA adapters, folders of PEFT or GGUF files, which requests name as their model. If [adapters] max_adapters "
        "is left out, each has a slot.",
    )
    lora_folder: str | None = key(
        SERVER,
        None,
        none_or(matching(r"(?s).*\S.*", "a path", "FOLDER"), '"/srv/adapters"'),
        "Folder from which POST /v1/load_lora_adapter may load adapters; left out: the endpoint is disabled.",
    )
    log_requests: bool = key(SERVER, False, boolean(), "Log prompts and outputs.")

    def __post_init__(self) -> None:
        check_keys(self)
        for name in ("api_keys", "allowed_hosts", "cors_origins", "lora_modules"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True)
class ReplicaConfig:
    """Settings of replicas on Ray: how many, where, and how requests are routed.

    Raises:
        ConfigError: a value is invalid.
    """

    count: int | None = key(
        REPLICAS,
        None,
        none_or(integer(1), "2"),
        "Number of engines on Ray; left out, and without autoscale: one engine, without Ray.",
        flag="--replicas",
    )
    autoscale: str | None = key(
        REPLICAS,
        None,
        none_or(matching(r"[1-9]\d*:[1-9]\d*", "MIN:MAX", "MIN:MAX"), '"1:4"'),
        "Smallest and largest number of engines on Ray, which follows the load; instead of count.",
    )
    ray_address: str | None = key(
        REPLICAS,
        None,
        none_or(matching(r"\S+", "an address", "HOST:PORT"), '"10.0.0.1:6379"'),
        "Ray cluster to join; left out: a local one, which ends with the command.",
    )
    cpus_per_device: int = key(REPLICAS, 1, integer(1), "CPU cores that Ray reserves for each device of an engine.")
    direct: bool = key(REPLICAS, False, boolean(), "Serve HTTP in the command itself, without Ray's proxy.")
    fronts: int = key(REPLICAS, 1, integer(1), "Processes behind Ray's proxies that route requests to engines.")
    slack: int = key(
        REPLICAS,
        8,
        integer(0),
        "Requests that the engine with the prompt's prefix may have in flight beyond the least loaded one.",
    )
    routing: str = key(
        REPLICAS,
        "prefix",
        one_of("prefix", "random"),
        "Routing of requests: prefix prefers, within slack, an engine that has cached the prompt's prefix.",
    )
    target_requests: int | str = key(
        REPLICAS,
        "auto",
        auto_or(integer(1)),
        "Requests in flight per engine that autoscaling aims at; auto: a quarter of max_batch_size.",
    )
    upscale_delay_s: float = key(
        REPLICAS, 10.0, number(0), "Seconds that the load must be above the target before an engine is added."
    )
    downscale_delay_s: float = key(
        REPLICAS, 300.0, number(0), "Seconds that the load must be below the target before an engine is removed."
    )

    def __post_init__(self) -> None:
        check_keys(self)
        least, most = self.bounds
        if least > most:
            raise ConfigError(f"autoscale must be MIN:MAX with MIN at most MAX, got {self.autoscale!r}")
        if self.autoscale is not None and self.count is not None:
            raise ConfigError("give count (a fixed number of engines) or autoscale, not both")

    @property
    def wanted(self) -> bool:
        """Whether there are replicas."""
        return self.count is not None or self.autoscale is not None

    @property
    def bounds(self) -> tuple[int, int]:
        """Engines at least and at most."""
        if self.autoscale is None:
            return (self.count or 1,) * 2
        least, _, most = self.autoscale.partition(":")
        return int(least), int(most)


def target_requests(rows: int) -> int:
    """Return the target of requests in flight per replica, which leaves room while others start."""
    return max(rows // 4, 1)
