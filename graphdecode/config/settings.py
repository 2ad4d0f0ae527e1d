"""The configurations of a runtime.

`BucketConfig` is for its graphs and cache, `EngineConfig` for all of it, `ServerConfig` for a server, `ReplicaConfig`
for several engines behind it. A file in TOML can hold any of them (`docs/configuration.md`, made from the fields below,
names the keys).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

from graphdecode.buckets import MOST_DRAFTS, BucketLadder
from graphdecode.config.key import (
    BOOLEAN,
    FRACTION,
    INTEGERS,
    LONG_INTEGER,
    ConfigDocument,
    Key,
    auto_or,
    check_keys,
    integer,
    key,
    keys_of,
    matching,
    none_or,
    number,
    one_of,
    texts,
    written,
)
from graphdecode.config.vllm_names import DTYPES, SETTINGS, check_keyword_names
from graphdecode.errors import ArgumentError, ConfigError

SERVER, REPLICAS = "server", "replicas"  # sections that are not the engine's
_capacity, _buckets, _capture, _loop = (partial(key, name) for name in ("capacity", "buckets", "capture", "loop"))
_scheduling, _model, _cache = (partial(key, name) for name in ("scheduling", "model", "cache"))
_adapters, _speculation = (partial(key, name) for name in ("adapters", "speculation"))
_server, _replicas = partial(key, SERVER), partial(key, REPLICAS)
_Texts: TypeAlias = tuple[str, ...] | list[str]
_DTYPES = "auto|float32|bfloat16|float16"
_QUANTIZE = (
    "Quantized weights: int8, int4, fp8, q8_0 or q4_k round while they are read; gguf keeps a file's blocks or "
    "refuses; none expands all. Left out: as the checkpoint has them, where there are kernels for it."
)
_AUTO_PREFILL_TOKENS = {"cuda": 2048, "cpu": 512}  # prompt tokens of one engine step


@dataclass(frozen=True)
class BucketConfig:
    """Capacity and buckets of a runtime: the sections [capacity], [buckets], [capture] and [loop] of a file.

    Invalid values of any configuration are a `ConfigError`.
    """

    max_batch_size: int = _capacity(64, integer(1, 65536), "Rows: sequences that are decoded at the same time.")
    max_sequence_length: int = _capacity(
        4096, integer(1), "Tokens of one sequence, prompt and output; at most what the model was trained for."
    )
    page_size: int = _capacity(16, integer(1, 65536), "Tokens of one page of the key-value cache.")
    total_num_pages: int | str = _capacity(
        "auto", auto_or(integer(1)), "Pages of the cache; auto fills memory_fraction of the free memory."
    )
    memory_fraction: float = _capacity(
        0.9, FRACTION, 'Share of the free memory that the cache takes with total_num_pages = "auto".'
    )
    max_logprobs: int = _capacity(20, integer(1, 2**20), "Log-probabilities per token that a request may ask for.")
    max_stop_token_ids: int = _capacity(
        128, integer(1, 4096), "Stop tokens of a request at most, including the model's own."
    )
    max_logit_biases: int = _capacity(1024, integer(1, 2**20), "Entries of a request's logit_bias at most.")
    max_bad_words: int = _capacity(
        128, integer(1, 65536), "Token sequences of a request's bad_words at most; a word can be two."
    )
    max_automata: int = _capacity(
        8, integer(1, 65536), "Structured outputs (choices, regex) that the device follows at the same time."
    )
    max_automaton_states: int = _capacity(
        1024, integer(0, 2**20), "States of all of them together; 0: the host follows every structured output."
    )
    batch_sizes: tuple[int, ...] | list[int] | str = _buckets(
        "auto", auto_or(INTEGERS), "The buckets; max_batch_size is added if it is missing."
    )
    max_graphs: int = _buckets(16, integer(1, 65536), "Buckets that auto chooses at most.")
    capture_when: str = _capture(
        "startup", one_of("startup", "idle", "first-use"), "When a bucket's graph is captured.", name="when"
    )
    backend: str = _capture(
        "auto",
        one_of("auto", "cuda", "recorded", "eager"),
        "What a graph is: a CUDA graph, a recorded step (CPU), or none. auto takes what the device has.",
    )
    warmup_steps: int = _capture(2, integer(1, 1000), "Eager steps before a capture.")
    steps_per_launch: int = _loop(
        1,
        integer(1, 4096),
        "Decode steps of a launch: a loop on the device, which ends when all rows have finished. The host reads "
        "tokens, and requests join and leave, between launches only.",
    )

    def __post_init__(self) -> None:
        check_keys(self)
        if not isinstance(self.batch_sizes, str):
            too_large = [size for size in self.batch_sizes if size > self.max_batch_size]
            if too_large:
                raise ConfigError(f"batch_sizes must be at most max_batch_size={self.max_batch_size}, got {too_large}")

    @cached_property
    def ladder(self) -> BucketLadder:
        """The buckets."""
        if isinstance(self.batch_sizes, str):
            return BucketLadder.auto(self.max_batch_size, self.max_graphs)
        return BucketLadder(self.batch_sizes, self.max_batch_size)

    @classmethod
    def load(cls, path: str | Path) -> BucketConfig:
        """Read these settings from a file, which may have those of an `EngineConfig` too; all are checked."""
        return EngineConfig.load(path).buckets

    def to_toml(self) -> str:
        """Return the text of a file from which `load` reads the same configuration."""
        return written(self, keys_of(self))


@dataclass(frozen=True)
class EngineConfig:
    """All settings of an engine: its buckets, and the sections [scheduling] and [model] of a file.

    A `torch.dtype` and a `torch.device` are kept by their names.
    """

    buckets: BucketConfig = field(default_factory=BucketConfig)
    max_prefill_tokens: int | str = _scheduling(
        "auto",
        auto_or(integer(1)),
        f"Prompt tokens of one engine step; auto is {_AUTO_PREFILL_TOKENS['cuda']} on a GPU and "
        f"{_AUTO_PREFILL_TOKENS['cpu']} on a CPU.",
    )
    target_itl_ms: float = _scheduling(
        0.0, number(0), "Target for the milliseconds between two tokens, kept by smaller prompt chunks; 0: none."
    )
    device: str = _model(
        "auto",
        matching(r"auto|(cpu|cuda)(:\d+)?", "auto, cpu or cuda (one of several: cuda:1)", "auto|cpu|cuda|cuda:N"),
        "Device of the model; auto is a GPU if there is one.",
    )
    dtype: str = _model(
        "auto",
        matching(_DTYPES, "auto, float32, bfloat16 or float16", _DTYPES),
        "Dtype of activations, cache, and weights that are not quantized; auto is the checkpoint's if the device "
        "computes in it, and float16 on a CPU with quantized weights.",
    )
    seed: int = _model(0, LONG_INTEGER, "Seed for requests without one.")
    quantize: str | None = _model(
        None,
        none_or(matching(r"[a-z][\w-]*", "a weight form's name", "FORM"), '"int8"'),
        f"{_QUANTIZE} Forms that are registered from outside go by their own names.",
        help=_QUANTIZE,
    )
    quantize_group_size: int | None = _model(
        None,
        none_or(integer(16), "64"),
        "Weights of a row that share a scale, with int4 or int8. Left out: for int4 the largest of 128, 64 and 32 that "
        "divides all rows, for int8 the row.",
    )
    kv_cache_dtype: str = _model(
        "auto",
        one_of("auto", "fp8", "fp8_e4m3", "int8"),
        "Type of cached keys and values; auto is the model's. 8 bits hold twice as many tokens as 16. int8 has a scale "
        "for each token and head; fp8, which is fp8_e4m3, has the checkpoint's, or none.",
    )
    batch_invariant: bool = _model(
        False,
        BOOLEAN,
        "A request's tokens and log-probabilities do not depend, bit for bit, on the batch, the bucket and the row, "
        "nor on how its prompt is chunked, shared or recomputed. Prefill is slower; a CPU needs a C compiler.",
    )
    prefix_cache: bool = _model(True, BOOLEAN, "Reuse the cached pages of prompts with a common prefix.")
    pooling: str = _model(
        "auto",
        one_of("auto", "last", "mean"),
        "Hidden states of a prompt that embeddings are made of: its last token's, or the mean of all; auto is what the "
        "checkpoint's files of sentence-transformers say, else last.",
    )
    tensor_parallel_size: int = _model(
        1,
        integer(1, 64),
        "Ranks that share the model, each with a part of the weights: one per GPU, or a few on a CPU.",
        flag="--tensor-parallel",
    )
    collectives: str = _model(
        "auto",
        one_of("auto", "shared", "gloo", "nccl"),
        "Backend of the ranks' collectives: shared memory on one machine's CPU (needs a C compiler), or "
        "torch.distributed with gloo or NCCL; auto takes NCCL between GPUs.",
    )
    rank_limit_seconds: float = _model(
        30.0,
        number(0.1),
        "Seconds without a heartbeat of a rank after which all ranks end, with an error that names it.",
    )
    model_impl: str = _model(
        "auto",
        one_of("auto", "native", "transformers"),
        "Implementation of the model: native, which auto prefers, or transformers' own module over our cache.",
    )
    trust_remote_code: bool = _model(False, BOOLEAN, "Run the Python code of a checkpoint if transformers needs it.")
    load_modules: _Texts = _model(
        (),
        texts("FILE"),
        "Python files that every process of the engine imports first, to register families, weight forms, sources and "
        "steps. They run with your rights.",
        flag="--load-module",
    )
    step_kind: str | None = _model(
        None,
        none_or(matching(r"\S+", "the name of a registered step"), '"count-up"'),
        "Name of a registered step that replaces decoding and speculation.",
    )
    skip_tokenizer_init: bool = _model(
        False, BOOLEAN, "Load no tokenizer: prompts are token ids, and outputs have no text."
    )
    enable_sleep_mode: bool = _model(
        False,
        BOOLEAN,
        "Let LLM.sleep give a GPU's memory back: weights and cache lie in memory that can be unmapped. A CPU needs no "
        "mode.",
    )
    state_checkpoints: int = _cache(
        0,
        integer(0, 2**20),
        "Recurrent states of prefixes that are kept at the same time, each as large as that of a row; 0: models with "
        "recurrent states share no prefixes.",
    )
    state_checkpoint_tokens: int = _cache(
        256,
        integer(1),
        "Tokens of a sequence from one such state to the next, in whole pages. Prompts are computed in chunks that end "
        "there, and a prefix is reused up to there.",
    )
    max_adapters: int = _adapters(
        0,
        integer(0, 1024),
        "LoRA adapters that rows can use at the same time, each in a slot of device memory; more can be loaded, and "
        "share the slots. 0: none.",
    )
    max_adapter_rank: int = _adapters(16, integer(1, 512), "Largest rank of an adapter.")
    adapt_experts: bool = _adapters(
        False, BOOLEAN, "Whether single experts can be adapted, too: each slot has room for an adapter of every expert."
    )
    speculation: str = _speculation(
        "off",
        one_of("off", "ngram", "model"),
        "Draft tokens, and verify several in one step; outputs stay the same. ngram drafts what followed an earlier "
        "occurrence in the prompt or the output; model drafts with a small model, which the configuration names.",
        help="Draft tokens, and verify several in one step: ngram by earlier occurrences, model by a small model.",
        name="method",
        flag="--speculate",
    )
    draft_model: str | None = _speculation(
        None,
        none_or(matching(r"\S.*", "a model", "MODEL"), '"a/smaller/one"'),
        "Draft model of the method model: a folder or name as for the target model, with the same vocabulary.",
        name="model",
    )
    num_tokens: int | str = _speculation(
        "auto",
        auto_or(integer(1, MOST_DRAFTS)),
        f"Draft length of each row and step; auto adapts it, up to {MOST_DRAFTS}.",
    )
    ngram_min: int = _speculation(2, integer(1, 64), "Shortest match that ngram drafts from, in tokens.")
    ngram_max: int = _speculation(
        5, integer(1, 64), "Longest match that is looked for, in tokens; the longest one counts."
    )

    def __post_init__(self) -> None:
        if not isinstance(self.buckets, BucketConfig):
            raise ConfigError(f"buckets must be a BucketConfig, got {self.buckets!r:.80}")
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", DTYPES.get(self.dtype, self.dtype))
        torch = sys.modules.get("torch")  # if it is not imported, no argument is an object of it
        if torch is not None:
            if isinstance(self.dtype, torch.dtype):
                object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
            if isinstance(self.device, torch.device):
                object.__setattr__(self, "device", str(self.device))
        if isinstance(self.load_modules, (list, tuple)):  # other processes may have another current folder
            object.__setattr__(self, "load_modules", tuple(map(_absolute, self.load_modules)))
        check_keys(self)
        if self.step_kind is not None and self.speculation != "off":
            raise ConfigError(f"method must be 'off' with step_kind {self.step_kind!r}, got {self.speculation!r}")
        if self.speculation == "model" and self.draft_model is None:
            raise ConfigError("method 'model' needs a draft model: [speculation] model")
        if self.ngram_min > self.ngram_max:
            raise ConfigError(f"ngram_min must be at most ngram_max={self.ngram_max}, got {self.ngram_min}")

    @classmethod
    def load(cls, path: str | Path) -> EngineConfig:
        """Read a configuration file; keys that it leaves out keep their defaults; see `ConfigDocument.read`."""
        return cls._from(ConfigDocument.read(path, all_keys()))

    @classmethod
    def _from(cls, document: ConfigDocument) -> EngineConfig:
        sections = (document.values[name] for name in document.values if name not in (SERVER, REPLICAS))
        try:
            return cls().with_settings(**{name: value for section in sections for name, value in section.items()})
        except ConfigError as error:
            raise document.blamed(error) from error

    def with_settings(self, **changes: Any) -> EngineConfig:
        """Return a copy with some fields of it and of its buckets changed."""
        of_buckets = {field.name for field in fields(BucketConfig)}
        buckets = replace(self.buckets, **{name: value for name, value in changes.items() if name in of_buckets})
        of_engine = {name: value for name, value in changes.items() if name not in of_buckets}
        return replace(self, buckets=buckets, **of_engine)

    @classmethod
    def of(
        cls, config: EngineConfig | BucketConfig | Mapping[str, Any] | str | Path | None, **keywords: Any
    ) -> EngineConfig:
        """Return a configuration, or the defaults, with some fields, the buckets' too, overridden.

        Raises `ConfigError` for a value or file that cannot be used, `ArgumentError` for another type of `config`,
        `TypeError` if there is no such field.
        """
        names = [each.field for each in (*keys_of(BucketConfig), *keys_of(EngineConfig))]
        check_keyword_names(sorted(keywords), names, SETTINGS)
        if config is None:
            config = cls()
        elif isinstance(config, (str, Path)):
            config = cls.load(config)
        elif isinstance(config, Mapping):
            config = cls._from(ConfigDocument("config", config, all_keys()))
        elif isinstance(config, BucketConfig):
            config = cls(buckets=config)
        elif not isinstance(config, EngineConfig):
            raise ArgumentError(
                "config must be an EngineConfig, a BucketConfig, the path of a configuration file, a dict of its "
                f"sections, or None, got {config!r:.80}"
            )
        return config.with_settings(**_with_speculation(keywords))

    def to_toml(self) -> str:
        """Return the text of a file for `load`: all keys of buckets, and others that differ from the defaults."""
        changed = [each for each in keys_of(self) if getattr(self, each.field) != each.default]
        return "\n".join([self.buckets.to_toml(), *([written(self, changed)] if changed else [])])

    def prefill_tokens(self, device_type: str) -> int:
        """Return the prompt tokens of one engine step on a device of this type, `"cuda"` or `"cpu"`."""
        if isinstance(self.max_prefill_tokens, str):
            return _AUTO_PREFILL_TOKENS[device_type]
        return self.max_prefill_tokens


def load_server_config(path: str | Path | None, **changes: Any) -> ServerConfig:
    """Read the section [server] of a configuration file, with `changes`; all of the file is checked."""
    return ServerConfig(**_section(path, SERVER) | changes)


def load_replica_config(path: str | Path | None, **changes: Any) -> ReplicaConfig:
    """Read the section [replicas] of a configuration file; see `load_server_config`."""
    return ReplicaConfig(**_section(path, REPLICAS) | changes)


def is_in_file(path: str | Path | None, field: str) -> bool:
    """Whether a configuration file sets a field of the configuration."""
    return path is not None and any(field in each for each in ConfigDocument.read(path, all_keys()).values.values())


def _section(path: str | Path | None, name: str) -> dict[str, Any]:
    return {} if path is None else ConfigDocument.read(path, all_keys()).values[name]


def _with_speculation(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords with `speculation` as fields: it may be a dict of the section's keys, or None for "off"."""
    speculation = keywords.get("speculation", "off")
    if speculation is None:
        return {**keywords, "speculation": "off"}
    if not isinstance(speculation, Mapping):
        return dict(keywords)
    document = ConfigDocument("speculation", {"speculation": speculation}, keys_of(EngineConfig))
    return {**keywords, "speculation": "ngram", **document.values["speculation"]}


def all_keys() -> list[Key]:
    """Return the keys of all sections of a file."""
    return [*keys_of(BucketConfig), *keys_of(EngineConfig), *keys_of(ServerConfig), *keys_of(ReplicaConfig)]


def _absolute(file: Any) -> Any:
    """Return an absolute path; other values unchanged, for the check."""
    is_path = isinstance(file, (str, Path)) and file != ""
    return str(Path(file).expanduser().absolute()) if is_path else file


# Share of the way down that one step of downscaling goes. Requests in flight do not show what fewer replicas can serve:
# 17 half-busy ones may have as many as one full one, and one step down to that would leave a backlog.
DOWNSCALING_FACTOR = 0.25


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the server: address, access and limits."""

    host: str = _server("127.0.0.1", matching(r"\S+", "an address or a host's name", "HOST"), "Address to listen on.")
    port: int = _server(8000, integer(0, 65535), "Port to listen on; 0 takes a free one.")
    api_keys: _Texts = _server(
        (),
        texts("KEY"),
        "Bearer tokens that may use /v1; none: no token is needed. GRAPHDECODE_API_KEY adds one.",
        flag="--api-key",
    )
    served_model_name: str | None = _server(
        None, none_or(matching(r"\S+", "a name", "NAME"), '"my-model"'), "What clients call the model."
    )
    allowed_hosts: _Texts = _server(
        (),
        texts("HOST"),
        'Host names that requests may have, besides localhost and addresses; "*" allows all. Left out: no others if '
        "the server listens on this machine only, else all.",
        flag="--allowed-host",
    )
    max_models: int = _server(
        3, integer(1), "Models of several that are loaded at the same time; each may take an equal part of the memory."
    )
    keep_alive: float = _server(
        300.0,
        number(-1),
        "Seconds after its last request until one of several models is unloaded; 0: at once, -1: only when another one "
        "needs its place.",
    )
    load_timeout_s: float = _server(
        300.0, number(0), "Seconds that a request waits at most until its model is loaded, then 503; 0: no limit."
    )
    max_connections: int = _server(1000, integer(1), "Open connections at most; further ones get 503.")
    max_waiting: int = _server(256, integer(0), "Waiting requests at most; further ones get 429.")
    max_body_bytes: int = _server(
        16 << 20, integer(1), "Bytes of a request body at most; all bodies in memory may take eight times as much."
    )
    max_stored_responses: int = _server(
        1000, integer(0), "Responses of /v1/responses at most that are kept for requests that go on from them."
    )
    max_stored_bytes: int = _server(64 << 20, integer(0), "Bytes of these responses at most.")
    max_prompts: int = _server(1024, integer(1), "Prompts of one request at most.")
    max_answers: int = _server(128, integer(1), "Outputs of one prompt at most: the largest n.")
    request_timeout_s: float = _server(600.0, number(0), "Seconds after which a request fails with 504; 0: never.")
    idle_timeout_s: float = _server(
        30.0,
        number(0),
        "Seconds after which a connection is closed whose client sends no whole request or reads nothing; 0: never.",
    )
    drain_timeout_s: float = _server(30.0, number(0), "Seconds for requests in flight to finish after SIGTERM.")
    cors_origins: _Texts = _server(
        (), texts("ORIGIN"), 'Origins whose pages may call the server; "*" allows all.', flag="--cors-origin"
    )
    otlp_traces_endpoint: str | None = _server(
        None,
        none_or(matching(r"https?://\S+", "an http address"), '"http://127.0.0.1:4318/v1/traces"'),
        "OTLP/HTTP endpoint for OpenTelemetry traces; needs the extra `otel`.",
    )
    chat_template: str | None = _server(
        None,
        none_or(matching(r"(?s).*\S.*", "a path", "FILE"), '"template.jinja"'),
        "File with a chat template in Jinja; left out: the model's own.",
    )
    trust_request_chat_template: bool = _server(
        False, BOOLEAN, "Allow `chat_template` in requests: a program, which runs in a child process with limits."
    )
    tool_call_parser: str | None = _server(
        None,
        none_or(matching(r"\S+", "a name", "NAME"), '"hermes"'),
        "How the model writes calls of functions, by vLLM's name of the parser; left out: the chat template tells.",
    )
    reasoning_parser: str | None = _server(
        None,
        none_or(matching(r"\S+", "a name", "NAME"), '"qwen3"'),
        "How the model marks its thoughts, by vLLM's name of the parser; left out: the chat template tells.",
    )
    constrain_tool_calls: bool = _server(
        True,
        BOOLEAN,
        "Let calls, once the model begins one, only be of the given functions, with arguments by their schemas.",
    )
    lora_modules: _Texts = _server(
        (),
        texts("NAME=FOLDER"),
        "LoRA adapters, folders of PEFT or GGUF files, which requests name as their model. If [adapters] max_adapters "
        "is left out, each has a slot.",
    )
    lora_folder: str | None = _server(
        None,
        none_or(matching(r"(?s).*\S.*", "a path", "FOLDER"), '"/srv/adapters"'),
        "Folder from which POST /v1/load_lora_adapter may load adapters; left out: the endpoint is disabled.",
    )
    log_requests: bool = _server(False, BOOLEAN, "Log prompts and outputs.")
    root_path: str = _server(
        "",
        matching(r"(/[^/\s]+)*", "a path such as /llm", "PATH"),
        "Path below which a proxy serves this server, whether it strips it or not.",
    )
    dev_endpoints: bool = _server(
        False,
        BOOLEAN,
        "Serve POST /sleep, /wake_up, /reset_prefix_cache and GET /is_sleeping of one engine, behind its API keys.",
    )

    def __post_init__(self) -> None:
        check_keys(self)


@dataclass(frozen=True)
class ReplicaConfig:
    """Settings of replicas on Ray: how many, where, and how requests are routed."""

    count: int | None = _replicas(
        None,
        none_or(integer(1), "2"),
        "Number of engines on Ray; left out, and without autoscale: one engine, without Ray.",
        flag="--replicas",
    )
    autoscale: str | None = _replicas(
        None,
        none_or(matching(r"[1-9]\d*:[1-9]\d*", "MIN:MAX", "MIN:MAX"), '"1:4"'),
        "Smallest and largest number of engines on Ray, which follows the load; instead of count.",
    )
    ray_address: str | None = _replicas(
        None,
        none_or(matching(r"\S+", "an address", "HOST:PORT"), '"10.0.0.1:6379"'),
        "Ray cluster to join; left out: a local one, which ends with the command.",
    )
    cpus_per_device: int = _replicas(1, integer(1), "CPU cores that Ray reserves for each device of an engine.")
    direct: bool = _replicas(False, BOOLEAN, "Serve HTTP in the command itself, without Ray's proxy.")
    fronts: int = _replicas(1, integer(1), "Processes behind Ray's proxies that route requests to engines.")
    slack: int = _replicas(
        8,
        integer(0),
        "Requests that the engine with the prompt's prefix may have in flight beyond the least loaded one.",
    )
    routing: str = _replicas(
        "prefix",
        one_of("prefix", "random"),
        "Routing of requests: prefix prefers, within slack, an engine that has cached the prompt's prefix.",
    )
    target_requests: int | str = _replicas(
        "auto",
        auto_or(integer(1)),
        "Requests in flight per engine that autoscaling aims at; auto: a quarter of max_batch_size.",
    )
    upscale_delay_s: float = _replicas(
        10.0, number(0), "Seconds that the load must be above the target before an engine is added."
    )
    downscale_delay_s: float = _replicas(
        300.0, number(0), "Seconds that the load must be below the target before an engine is removed."
    )

    def __post_init__(self) -> None:
        check_keys(self)
        least, most = self.bounds
        if least > most:
            raise ConfigError(f"autoscale must be MIN:MAX with MIN at most MAX, got {self.autoscale!r}")
        if self.autoscale is not None and self.count is not None:
            raise ConfigError("give count (a fixed number of engines) or autoscale, not both")

    @property
    def enabled(self) -> bool:
        """Whether there are replicas."""
        return self.count is not None or self.autoscale is not None

    @property
    def behind_proxies(self) -> bool:
        """Whether Ray's proxies serve HTTP."""
        return self.enabled and not self.direct

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
