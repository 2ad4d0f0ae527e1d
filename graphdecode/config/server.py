"""Sections [server] and [replicas] of a configuration file: the server, and several engines behind it."""

from __future__ import annotations

from dataclasses import dataclass

from graphdecode.config.key import auto_or, boolean, check_keys, integer, key, matching, none_or, number, one_of, texts
from graphdecode.errors import ConfigError

SERVER = "server"  # the section
REPLICAS = "replicas"  # the section
# Of the way down, at a time. Requests in flight tell little of what few replicas could take: 17 that are half busy have
# as many as one that is full, and one step down to what these would fill leaves a backlog that takes more than 17.
DOWNSCALING_FACTOR = 0.25


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the server: address, access and limits.

    Raises:
        ConfigError: a value that no server could work with.
    """

    host: str = key(
        SERVER, "127.0.0.1", matching(r"\S+", "an address or a host's name", "HOST"), "Address to listen on."
    )
    port: int = key(SERVER, 8000, integer(0, 65535), "Port to listen on; 0 takes a free one.")
    api_keys: tuple[str, ...] | list[str] = key(
        SERVER,
        (),
        texts("KEY"),
        "Who brings one of them as a bearer token may use /v1; none: everybody may. GRAPHDECODE_API_KEY adds one.",
        flag="--api-key",
    )
    served_model_name: str | None = key(
        SERVER, None, none_or(matching(r"\S+", "a name", "NAME"), '"my-model"'), "What clients call the model."
    )
    allowed_hosts: tuple[str, ...] | list[str] = key(
        SERVER,
        (),
        texts("HOST"),
        'Names that clients may call the server by, besides localhost and addresses; "*" is all. Left out: no others '
        "where it listens on this machine alone, else all.",
        flag="--allowed-host",
    )
    max_connections: int = key(SERVER, 1000, integer(1), "Open at a time; beyond, one is answered with 503.")
    max_waiting: int = key(
        SERVER, 256, integer(0), "Requests without a row at most; beyond, a request is answered with 429."
    )
    max_body_bytes: int = key(
        SERVER, 16 << 20, integer(1), "Of a request; those not read yet take eight times as much together at most."
    )
    max_prompts: int = key(SERVER, 1024, integer(1), "Prompts of one request.")
    max_answers: int = key(SERVER, 128, integer(1), "Answers of one prompt: the largest n.")
    request_timeout_s: float = key(SERVER, 600.0, number(0), "A request is given up after so long; 0: never.")
    idle_timeout_s: float = key(
        SERVER, 30.0, number(0), "A client that sends no whole request, or takes nothing, is let go then; 0: never."
    )
    drain_timeout_s: float = key(SERVER, 30.0, number(0), "How long work may go on when the server is told to end.")
    cors_origins: tuple[str, ...] | list[str] = key(
        SERVER, (), texts("ORIGIN"), 'Origins whose pages may call the server; "*" is all.', flag="--cors-origin"
    )
    otlp_traces_endpoint: str | None = key(
        SERVER,
        None,
        none_or(matching(r"https?://\S+", "an http address"), '"http://127.0.0.1:4318/v1/traces"'),
        "Where OpenTelemetry's traces go, over OTLP's HTTP; it needs the extra `otel`.",
    )
    chat_template: str | None = key(
        SERVER,
        None,
        none_or(matching(r"(?s).*\S.*", "a path", "FILE"), '"template.jinja"'),
        "A file with the template, in Jinja, that conversations go through; left out: the model's own.",
    )
    trust_request_chat_template: bool = key(
        SERVER, False, boolean(), "Let requests bring their own `chat_template`: a program, run in a child with limits."
    )
    lora_modules: tuple[str, ...] | list[str] = key(
        SERVER,
        (),
        texts("NAME=FOLDER"),
        "Adapters (LoRA, as PEFT saves them) that requests name as their model. Where [adapters] max_adapters is left "
        "out, each has a slot.",
    )
    lora_folder: str | None = key(
        SERVER,
        None,
        none_or(matching(r"(?s).*\S.*", "a path", "FOLDER"), '"/srv/adapters"'),
        "A folder from which POST /v1/load_lora_adapter may load further adapters; left out: none are loaded so.",
    )
    log_requests: bool = key(SERVER, False, boolean(), "Log prompts and answers.")

    def __post_init__(self) -> None:
        check_keys(self)
        for name in ("api_keys", "allowed_hosts", "cors_origins", "lora_modules"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True)
class ReplicaConfig:
    """Settings of replicas on Ray: how many, where, and how requests are routed.

    Raises:
        ConfigError: a value that no cluster could work with.
    """

    count: int | None = key(
        REPLICAS,
        None,
        none_or(integer(1), "2"),
        "Engines that share the requests, on Ray; left out, and without autoscale: one, without Ray.",
        flag="--replicas",
    )
    autoscale: str | None = key(
        REPLICAS,
        None,
        none_or(matching(r"[1-9]\d*:[1-9]\d*", "MIN:MAX", "MIN:MAX"), '"1:4"'),
        "Engines at least and at most, on Ray, as the load asks for; in place of a number.",
    )
    ray_address: str | None = key(
        REPLICAS,
        None,
        none_or(matching(r"\S+", "an address", "HOST:PORT"), '"10.0.0.1:6379"'),
        "A cluster to join; left out: a Ray of its own on this machine, which ends with the command.",
    )
    cpus_per_device: int = key(
        REPLICAS, 1, integer(1), "Processors that Ray reserves for each device of an engine, and that the engine uses."
    )
    direct: bool = key(
        REPLICAS, False, boolean(), "Listen in the command itself, and take answers from the engines past Ray's proxy."
    )
    fronts: int = key(REPLICAS, 1, integer(1), "Processes behind Ray's proxies that choose an engine for each request.")
    slack: int = key(
        REPLICAS, 8, integer(0), "Requests by which an engine may be ahead and still get one whose beginning it knows."
    )
    routing: str = key(
        REPLICAS,
        "prefix",
        one_of("prefix", "random"),
        "Who gets a request: the least loaded and, within slack, who has the beginning of its prompt; or anybody.",
    )
    target_requests: int | str = key(
        REPLICAS, "auto", auto_or(integer(1)), "Requests of an engine to aim at; auto: a quarter of max_batch_size."
    )
    upscale_delay_s: float = key(REPLICAS, 10.0, number(0), "Load must be above the target for so long.")
    downscale_delay_s: float = key(REPLICAS, 300.0, number(0), "Load must be below the target for so long.")

    def __post_init__(self) -> None:
        check_keys(self)
        least, most = self.bounds
        if least > most:
            raise ConfigError(f"autoscale must be MIN:MAX with MIN at most MAX, got {self.autoscale!r}")
        if self.autoscale is not None and self.count is not None:
            raise ConfigError("count and autoscale cannot both be given: a number of engines is fixed, or it is not")

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
    """Return how many requests each replica should have in flight, so that it can take more while others start."""
    return max(rows // 4, 1)
