"""The server's own settings: the section [server] of a configuration file."""

from __future__ import annotations

from dataclasses import dataclass

from graphdecode.config.key import boolean, integer, key, keys_of, matching, none_or, number, texts

SERVER = "server"  # the section


@dataclass(frozen=True)
class ServerConfig:
    """How a server listens, whom it lets in, and how much it takes on.

    Raises:
        ConfigError: a value that no server could work with.
    """

    host: str = key(SERVER, "127.0.0.1", matching(r"\S+", "an address or a host's name"), "Address to listen on.")
    port: int = key(SERVER, 8000, integer(0, 65535), "Port to listen on; 0 takes a free one.")
    api_keys: tuple[str, ...] | list[str] = key(
        SERVER,
        (),
        texts(),
        "Who brings one of them as a bearer token may use /v1; none: everybody may. The environment's "
        "GRAPHDECODE_API_KEY adds one.",
        flag="--api-key",
    )
    served_model_name: str | None = key(
        SERVER, None, none_or(matching(r"\S+", "a name"), '"my-model"'), "What clients call the model."
    )
    allowed_hosts: tuple[str, ...] | list[str] = key(
        SERVER,
        (),
        texts(),
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
        SERVER,
        30.0,
        number(0),
        "A client that sends no whole request, or takes nothing, for so long is let go; 0: never.",
    )
    drain_timeout_s: float = key(
        SERVER, 30.0, number(0), "How long running work may go on when the server is told to end."
    )
    cors_origins: tuple[str, ...] | list[str] = key(
        SERVER, (), texts(), 'Origins whose pages may call the server; "*" is all.', flag="--cors-origin"
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
        none_or(matching(r"(?s).*\S.*", "a path"), '"template.jinja"'),
        "A file with the template, in Jinja, that conversations go through; left out: the model's own.",
    )
    trust_request_chat_template: bool = key(
        SERVER,
        False,
        boolean(),
        "Let requests bring their own `chat_template`. It is a program, which runs in a child with limits.",
    )
    log_requests: bool = key(SERVER, False, boolean(), "Log prompts and answers.")

    def __post_init__(self) -> None:
        for each in keys_of(self):
            each.check(getattr(self, each.field))
        for name in ("api_keys", "allowed_hosts", "cors_origins"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
