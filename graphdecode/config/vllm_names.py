"""vLLM's names: the fields of its `SamplingParams`, its `LLM`'s methods, the keywords of these and of its `EngineArgs`.

A name that is in none of these tables, nor one of our own, is a mistake of the caller's and gets Python's `TypeError`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar

from graphdecode.errors import ArgumentError

_BACKENDS = ("auto", "guidance")  # names of the one library that reads forms
# keyword of vLLM's LLM -> our setting
SETTINGS: dict[str, str] = {
    "max_model_len": "max_sequence_length",
    "max_num_seqs": "max_batch_size",
    "block_size": "page_size",
    "num_gpu_blocks_override": "total_num_pages",
    "gpu_memory_utilization": "memory_fraction",
    "max_num_batched_tokens": "max_prefill_tokens",
    "enable_prefix_caching": "prefix_cache",
    "cudagraph_capture_sizes": "batch_sizes",
    "cuda_graph_sizes": "batch_sizes",
    "quantization": "quantize",
    "enforce_eager": "backend",
    "speculative_config": "speculation",
}
DTYPES: dict[str, str] = {"half": "float16", "float": "float32"}  # vLLM's name of a dtype -> ours
# key of vLLM's speculative_config -> our key of [speculation]
SPECULATION: dict[str, str] = {
    "method": "method",
    "num_speculative_tokens": "num_tokens",
    "prompt_lookup_min": "ngram_min",
    "prompt_lookup_max": "ngram_max",
}

_Class = TypeVar("_Class", bound=type)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class Unsupported(NamedTuple):
    """A name that vLLM knows and this runtime does not."""

    instead: str  # what to do, or why there is nothing to do
    neutral: tuple[Any, ...] = (None,)  # values that ask for nothing, and are taken


_ONE_DEVICE = Unsupported("devices share a model by tensor_parallel_size: each has a part of every layer", (None, 1))
_REPLICAS = Unsupported("`graphdecode serve --replicas N` runs several engines; LLM is one", (None, 1, False))
_NO_LORA = Unsupported("adapters are not read: merge the adapter into the checkpoint", (None, False))
_NO_MEDIA = Unsupported("models of text alone are run", (None, "", False))
_NO_POOLING = Unsupported("a model generates: embeddings and scores are not made")
_FOLDER = Unsupported("give the folder of what `hf download MODEL --revision REVISION` fetched as the model")
_OWN_TOKENIZER = Unsupported("the tokenizer is what transformers' AutoTokenizer reads from its folder", (None, "auto"))
_NOT_HERE = Unsupported("this is a matter of vLLM's own workings, which are not these", (None, False))

SAMPLING_PARAMS: dict[str, Unsupported] = {
    "best_of": Unsupported("ask for n answers with logprobs=0 and keep the one with the best cumulative_logprob"),
    "use_beam_search": Unsupported("sample n answers instead", (None, False)),
    "length_penalty": Unsupported("beams are not searched", (None, 1.0)),
    "early_stopping": Unsupported("beams are not searched", (None, False)),
    "flat_logprobs": Unsupported("log-probabilities come as a list of dicts, one for each token", (None, False)),
    "logits_processors": Unsupported("a step is a graph, and calls no Python: logit_bias, penalties, min_tokens"),
    "output_kind": Unsupported("LLM.generate gives whole answers, LLM.stream pieces, AsyncLLM.generate all so far"),
    "guided_decoding": Unsupported("structured_outputs is its name now"),
    "extra_args": Unsupported("there is nothing that would read them", (None, {})),
    "skip_reading_prefix_cache": Unsupported(
        "a prompt with prompt_logprobs is computed whole; for others: LLM(prefix_cache=False)", (None, False)
    ),
    "thinking_token_budget": Unsupported("max_tokens limits the answer with its thoughts"),
    "repetition_detection": Unsupported("frequency_penalty and repetition_penalty make loops unlikely"),
    "skip_clone": Unsupported("parameters are frozen, and never copied", (None, True, False)),
    "output_text_buffer_length": Unsupported("what is held back for stop texts follows from them", (None, 0)),
}


LLM_KEYWORDS: dict[str, Unsupported] = {
    "task": Unsupported("a model generates", (None, "auto", "generate")),
    "runner": Unsupported("a model generates", (None, "auto", "generate")),
    "convert": Unsupported("a model generates", (None, "auto", "none")),
    "tokenizer_mode": _OWN_TOKENIZER,
    "allowed_local_media_path": _NO_MEDIA,
    "allowed_media_domains": _NO_MEDIA,
    "limit_mm_per_prompt": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "disable_mm_preprocessor_cache": _NO_MEDIA,
    "enable_mm_embeds": _NO_MEDIA,
    "interleave_mm_strings": _NO_MEDIA,
    "media_io_kwargs": _NO_MEDIA,
    "skip_mm_profiling": _NO_MEDIA,
    "enable_prompt_embeds": Unsupported("prompts are texts or token ids", (None, False)),
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": _REPLICAS,
    **dict.fromkeys(
        (
            "data_parallel_rank",
            "data_parallel_start_rank",
            "data_parallel_size_local",
            "data_parallel_address",
            "data_parallel_rpc_port",
            "data_parallel_hybrid_lb",
            "data_parallel_backend",
        ),
        _REPLICAS,
    ),
    "decode_context_parallel_size": _ONE_DEVICE,
    "worker_use_ray": _ONE_DEVICE._replace(neutral=(None, False)),
    **dict.fromkeys(("enable_eplb", "enable_expert_parallel"), _ONE_DEVICE._replace(neutral=(None, False))),
    "expert_placement_strategy": _ONE_DEVICE._replace(neutral=(None, "linear")),
    "distributed_executor_backend": _ONE_DEVICE,
    "disable_custom_all_reduce": Unsupported(
        "collectives says how devices exchange what they compute", (None, False, True)
    ),
    "revision": _FOLDER,
    "code_revision": _FOLDER,
    "tokenizer_revision": _FOLDER,
    "download_dir": Unsupported("HF_HOME names the folder of what is fetched"),
    "hf_token": Unsupported("log in with `hf auth login`, or set HF_TOKEN"),
    "hf_overrides": Unsupported("change config.json in a copy of the folder", (None, {})),
    "hf_config_path": Unsupported("config.json is the model folder's"),
    "rope_scaling": Unsupported("change config.json in a copy of the folder", (None, {})),
    "rope_theta": Unsupported("change config.json in a copy of the folder"),
    "served_model_name": Unsupported("there is no server in this object"),
    "load_format": Unsupported("weights are read from safetensors", (None, "auto", "safetensors")),
    "config_format": Unsupported("config.json is read as transformers writes it", (None, "auto", "hf")),
    "generation_config": Unsupported("LLM.get_default_sampling_params() reads the model folder's", (None, "auto")),
    "override_generation_config": Unsupported("give SamplingParams", (None, {})),
    "chat_template": Unsupported("give it to LLM.chat(messages, chat_template=...)"),
    "swap_space": Unsupported("a preempted sequence is recomputed, not swapped out", (None, 0, 4)),
    "cpu_offload_gb": Unsupported("weights stay where they are computed with: quantize makes them smaller", (None, 0)),
    "calculate_kv_scales": Unsupported("fp8 takes the scales of the checkpoint, and int8 makes its own", (None, False)),
    "kv_cache_memory_bytes": Unsupported("total_num_pages or memory_fraction say how large the cache is"),
    "disable_sliding_window": Unsupported("a model's window is part of it", (None, False)),
    "enable_chunked_prefill": Unsupported("prompts always come in chunks: max_prefill_tokens", (None, True)),
    "max_seq_len_to_capture": Unsupported("a graph serves every length", (None, 8192)),
    "max_context_len_to_capture": Unsupported("a graph serves every length", (None, 8192)),
    "speculative_model": Unsupported("speculative_config says how tokens are guessed ahead, as in vLLM"),
    "num_speculative_tokens": Unsupported("speculative_config says how many tokens are guessed ahead, as in vLLM"),
    "optimization_level": Unsupported("the sections [buckets] and [capture] of config say what is captured"),
    "logprobs_mode": Unsupported("log-probabilities are of the model's own logits", (None, "raw_logprobs")),
    "prefix_caching_hash_algo": _NOT_HERE._replace(neutral=(None, "builtin", "sha256")),
    "disable_cascade_attn": _NOT_HERE._replace(neutral=(None, False, True)),
    "disable_hybrid_kv_cache_manager": _NOT_HERE,
    "model_loader_extra_config": _NOT_HERE._replace(neutral=(None, {})),
    "stream_interval": Unsupported("LLM.stream gives each piece as it comes", (None, 1)),
    "use_tqdm_on_load": Unsupported("progress=True shows bars while loading", (None, True, False)),
    "disable_log_requests": Unsupported("LLM logs no requests", (None, True, False)),
    "max_num_partial_prefills": Unsupported("max_prefill_tokens is shared by all prompts of a step", (None, 1)),
    "scheduling_policy": Unsupported("requests without a priority are served as they come", (None, "fcfs", "priority")),
    "num_scheduler_steps": Unsupported("steps_per_launch in [loop] of the configuration", (None, 1)),
    "async_scheduling": Unsupported("the next step always runs while one is read, on a GPU", (None, False, True)),
    "reasoning_parser": Unsupported("answers are given as they are", (None, "")),
    "logits_processors": Unsupported("a step is a graph, and calls no Python: see SamplingParams", (None, [], ())),
    "logits_processor_pattern": Unsupported("a step is a graph, and calls no Python: see SamplingParams"),
    "guided_decoding_backend": Unsupported("llguidance reads the forms of answers", (None, *_BACKENDS)),
    "structured_outputs_config": Unsupported(
        "llguidance reads the forms of answers, and StructuredOutputsParams says the rest",
        (None, {}, *({"backend": name} for name in _BACKENDS)),
    ),
    "enable_lora": _NO_LORA,
    "lora_modules": _NO_LORA,
    "max_loras": _NO_LORA,
    "max_lora_rank": _NO_LORA,
    "max_cpu_loras": _NO_LORA,
    "fully_sharded_loras": _NO_LORA,
    "lora_dtype": _NO_LORA._replace(neutral=(None, "auto")),
    "enable_prompt_adapter": _NO_LORA,
    "pooler_config": _NO_POOLING,
    "override_pooler_config": _NO_POOLING,
    "enable_sleep_mode": Unsupported("close() gives the memory back", (None, False)),
    "kv_transfer_config": _NOT_HERE,
    "kv_events_config": _NOT_HERE,
    "compilation_config": Unsupported("the sections [buckets] and [capture] of config say what is captured"),
    "attention_config": _NOT_HERE,
    "attention_backend": _NOT_HERE,
    "profiler_config": Unsupported("`graphdecode profile` measures each bucket"),
    "additional_config": _NOT_HERE._replace(neutral=(None, {})),
    "worker_cls": _NOT_HERE._replace(neutral=(None, "auto")),
    "worker_extension_cls": _NOT_HERE._replace(neutral=(None, "")),
    "preemption_mode": Unsupported("a preempted sequence is recomputed", (None, "recompute")),
    "use_v2_block_manager": Unsupported("there is one", (None, True, False)),
    "disable_async_output_proc": _NOT_HERE._replace(neutral=(None, False, True)),
    "disable_log_stats": Unsupported("LLM.stats counts, and logs nothing", (None, True, False)),
    "show_hidden_metrics_for_version": _NOT_HERE,
    "otlp_traces_endpoint": Unsupported("LLM.stats and RequestOutput.metrics hold the times"),
}


# of LLM.generate, chat and stream
CALL_KEYWORDS: dict[str, Unsupported] = {
    "prompt_token_ids": Unsupported('give token ids as prompts: [[1, 2, 3], ...] or {"prompt_token_ids": [1, 2, 3]}'),
    "lora_request": _NO_LORA,
    "prompt_adapter_request": _NO_LORA,
    "guided_options_request": Unsupported("SamplingParams(structured_outputs=...) says the form of an answer"),
    "mm_processor_kwargs": _NO_MEDIA,
    "tokenization_kwargs": Unsupported("SamplingParams(truncate_prompt_tokens=...) cuts prompts", (None, {})),
    "chat_template_content_format": Unsupported("a template gets contents as texts", (None, "auto", "string")),
    "trace_headers": _NOT_HERE,
    "data_parallel_rank": _REPLICAS._replace(neutral=(None,)),
}
_POOLING = "there is none: " + _NO_POOLING.instead
_WORKERS = "there is none: no worker takes calls; LLM.model and LLM.engine are the objects themselves"
_SLEEP = "there is none: close() gives the memory back, and another LLM reads the weights again"
_PROFILE = "there is none: `graphdecode profile` measures each bucket, with --trace as a Chrome trace"
LLM_METHODS: dict[str, str] = {  # of vLLM's LLM and AsyncLLM -> what there is instead
    "beam_search": "there is none: sample n answers with logprobs=0 and keep that of the best cumulative_logprob",
    **dict.fromkeys(("sleep", "wake_up", "is_sleeping"), _SLEEP),
    **dict.fromkeys(("embed", "encode", "score", "classify", "reward"), _POOLING),
    **dict.fromkeys(("collective_rpc", "apply_model"), _WORKERS),
    **dict.fromkeys(("start_profile", "stop_profile"), _PROFILE),
    "reset_prefix_cache": "there is none: what is kept never changes an answer, and LLM(prefix_cache=False) keeps none",
    "get_metrics": "LLM.stats counts, and RequestOutput.metrics holds the times",
    "llm_engine": "LLM.engine takes and gives tokens",
    "preprocess_chat": "graphdecode.text.render_chat(tokenizer, messages) returns the prompt and its tokens",
    "set_tokenizer": "there is none: LLM(tokenizer=...) takes another",
}


def no_attribute(owner: object, name: str) -> NoReturn:
    """Refuse an attribute that is not there; of a method of vLLM's, say what there is instead.

    Raises:
        AttributeError: always.
    """
    instead = f": {LLM_METHODS[name]}" if name in LLM_METHODS else ""
    raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{instead}", name=name, obj=owner)


def check_known(given: Iterable[str], known: Iterable[str], others: Iterable[str] = ()) -> None:
    """Refuse keywords that nobody knows.

    Args:
        given: their names.
        known: the names that are listed.
        others: what may have been meant beside these.

    Raises:
        TypeError: one is not known; the message says which may have been meant.
    """
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *others], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"unexpected keyword argument {name!r}{hint}; known: {', '.join(known)}")


def without_unsupported(given: Mapping[str, Any], table: Mapping[str, Unsupported]) -> dict[str, Any]:
    """Return keywords without the names of a table, whose values must be neutral.

    Raises:
        ArgumentError: a name of the table asks for something.
    """
    kept = {}
    for name, value in given.items():
        if name not in table:
            kept[name] = value
        elif not any(type(value) is type(neutral) and value == neutral for neutral in table[name].neutral):
            raise ArgumentError(f"{name}={value!r:.40} is not supported: {table[name].instead}")
    return kept


def as_settings(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of an `LLM` by the names of our settings; those that vLLM gives as None are left out.

    Raises:
        ArgumentError: one is not supported, or a setting is given by two names.
    """
    settings: dict[str, Any] = {}
    for name, value in without_unsupported(keywords, LLM_KEYWORDS).items():
        ours = SETTINGS.get(name, name)
        if (value is None and name in (*SETTINGS, "seed", "trust_remote_code")) or (
            name == "enforce_eager" and value is False
        ):
            continue  # vLLM's default, which leaves the setting to the configuration
        if ours in settings:
            raise ArgumentError(f"{ours} is given twice: {name} is vLLM's name of it, or another's")
        settings[ours] = "eager" if name == "enforce_eager" and value is True else value
        if name == "speculative_config" and isinstance(value, Mapping):
            settings[ours] = {SPECULATION.get(key, key): entry for key, entry in value.items()}
    return settings


def refusing(table: Mapping[str, Unsupported]) -> Callable[[_Class], _Class]:
    """Let a class take the neutral values of a table's names, and refuse others by what to do instead."""

    def refused(cls: _Class) -> _Class:
        construct = cls.__init__  # type: ignore[misc]
        known = list(inspect.signature(construct).parameters)[1:]

        @functools.wraps(construct)
        def __init__(self: Any, *args: Any, **given: Any) -> None:
            kept = without_unsupported(given, table)
            check_known(kept, known)
            construct(self, *args, **kept)

        cls.__init__ = __init__  # type: ignore[misc]
        return cls

    return refused


def refusing_calls(*options: str) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Let a method take the neutral values of `CALL_KEYWORDS`, and refuse others by what to do instead.

    Args:
        options: the names of the keywords that it takes beside its parameters.
    """

    def refused(method: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        _, *own = inspect.signature(method).parameters.values()
        known = [*(each.name for each in own if each.kind is not each.VAR_KEYWORD), *options]

        @functools.wraps(method)
        def called(*args: _Parameters.args, **given: _Parameters.kwargs) -> _Result:
            kept: Any = without_unsupported(given, CALL_KEYWORDS) if given else given
            check_known(kept, known)
            return method(*args, **kept)

        return called

    return refused
