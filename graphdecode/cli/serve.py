"""`graphdecode serve`: OpenAI's HTTP surface."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer

from graphdecode.cli.capacity import limited
from graphdecode.cli.checkpoint import find_checkpoint
from graphdecode.cli.options import (
    STDERR,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    KvCacheDtypeOption,
    MaxSequenceLengthOption,
    ModelImplOption,
    ModelOption,
    QuantizeOption,
    SpeculateOption,
    TokenizerOption,
    TrustRemoteCodeOption,
    settings_of,
)
from graphdecode.errors import ArgumentError

_NEEDED = ("pydantic", "starlette", "uvicorn", "prometheus_client")


def serve(
    model: ModelOption = "demo",
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; left out: the configuration's.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. Left out: the configuration's.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Clients of /v1 must bring it as a bearer token; may be repeated.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Requests side by side at most; left out: the configuration's.")
    ] = None,
    max_sequence_length: MaxSequenceLengthOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    kv_cache_dtype: KvCacheDtypeOption = None,
    speculate: SpeculateOption = None,
    model_impl: ModelImplOption = None,
    trust_remote_code: TrustRemoteCodeOption = False,
    tokenizer: TokenizerOption = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="An origin whose pages may call the server; may be repeated.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A name that clients may call the server by; may be repeated.")
    ] = None,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Log prompts and answers.")] = False,
) -> None:
    """Serve a model to OpenAI's clients, until SIGTERM or Ctrl-C; running answers are finished first."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ArgumentError(f"serving needs {', '.join(missing)}: pip install 'graphdecode[serve]'")
    from graphdecode.config import ServerConfig, load_server_config

    settings = settings_of(
        config, device=device, dtype=dtype, quantize=quantize, kv_cache_dtype=kv_cache_dtype, speculation=speculate,
        model_impl=model_impl, trust_remote_code=trust_remote_code or None,
    )  # fmt: skip
    settings = limited(settings, max_batch_size=max_batch_size, max_sequence_length=max_sequence_length)
    options = {
        "host": host,
        "port": port,
        "api_keys": api_key,
        "served_model_name": served_model_name,
        "cors_origins": cors_origin,
        "allowed_hosts": allowed_host,
        "log_requests": log_requests or None,
    }
    limits = load_server_config(config) if config is not None else ServerConfig()
    limits = limits.with_settings(**{name: value for name, value in options.items() if value is not None})
    _run(model, tokenizer, settings, limits)


def _run(model: str, tokenizer: str | None, settings: object, limits: object) -> None:
    import asyncio
    import logging

    from graphdecode import __version__
    from graphdecode.config import EngineConfig, ServerConfig
    from graphdecode.models import generation_defaults
    from graphdecode.server.run import bind, run
    from graphdecode.server.service import Service

    assert isinstance(settings, EngineConfig)
    assert isinstance(limits, ServerConfig)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("graphdecode.server").setLevel(logging.INFO)
    bound = bind(limits.host, limits.port)
    checkpoint = find_checkpoint(model, tokenizer, settings)
    name = limits.served_model_name or (Path(model).name if Path(model).exists() else model)
    service = Service(
        checkpoint.path,
        name,
        checkpoint.tokenizer,
        generation_defaults(checkpoint.path),
        settings,
        limits,
        version=__version__,
        progress=STDERR.is_terminal,
    )
    address = f"http://{limits.host}:{bound.getsockname()[1]}"

    def on_ready() -> None:
        STDERR.print(f"serving {name} on {address}", highlight=False, soft_wrap=True)
        has_template = bool(service.tokenizer.chat_template)
        for line in _how_to_try(address, has_template=has_template, guarded=bool(service.api_keys)):
            STDERR.print(line, highlight=False, soft_wrap=True, markup=False)

    asyncio.run(run(service, bound, on_ready))


def _how_to_try(address: str, *, has_template: bool, guarded: bool) -> list[str]:
    path, body = "completions", {"prompt": "417+385=", "max_tokens": 16}
    if has_template:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    key = "-H 'Authorization: Bearer KEY' " if guarded else ""
    return [f"try: {address} in a browser, or", f"curl {address}/v1/{path} {key}--json '{json.dumps(body)}'"]
