"""vLLM's names: the fields of its `SamplingParams`, the keywords of its `LLM` and of its `EngineArgs`.

A name that is in none of these tables, nor one of our own, is a mistake of the caller's and gets Python's `TypeError`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from graphdecode.errors import ArgumentError, unknown_keyword

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
# key of vLLM's speculative_config -> our key of [speculation]
SPECULATION: dict[str, str] = {
    "method": "method",
    "num_speculative_tokens": "num_tokens",
    "prompt_lookup_min": "ngram_min",
    "prompt_lookup_max": "ngram_max",
}

_Class = TypeVar("_Class", bound=type)
_Call = TypeVar("_Call", bound=Callable[..., Any])


class Unsupported(NamedTuple):
    """A name that vLLM knows and this runtime does not."""

    instead: str  # what to do, or why there is nothing to do
    neutral: tuple[Any, ...] = (None,)  # values that ask for nothing, and are taken


_ONE_DEVICE = Unsupported("devices share a model by tensor_parallel_size: each has a part of every layer", (None, 1))
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
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": Unsupported("start one process for each device", (None, 1)),
    "enable_expert_parallel": _ONE_DEVICE._replace(neutral=(None, False)),
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
    "load_format": Unsupported(
        "what the model's name leads to says how weights are read: a folder of safetensors, a .gguf file, "
        "or shape:NAME for random ones",
        (None, "auto", "safetensors", "gguf"),
    ),
    "config_format": Unsupported("config.json is read as transformers writes it", (None, "auto", "hf")),
    "generation_config": Unsupported("LLM.get_default_sampling_params() reads the model folder's", (None, "auto")),
    "override_generation_config": Unsupported("give SamplingParams", (None, {})),
    "chat_template": Unsupported("give it to LLM.chat(messages, chat_template=...)"),
    "swap_space": Unsupported("a sequence that gives way is recomputed, not swapped out", (None, 0, 4)),
    "cpu_offload_gb": Unsupported("weights stay where they are computed with: quantize makes them smaller", (None, 0)),
    "calculate_kv_scales": Unsupported("fp8 takes the scales of the checkpoint, and int8 makes its own", (None, False)),
    "kv_cache_memory_bytes": Unsupported("total_num_pages or memory_fraction say how large the cache is"),
    "disable_sliding_window": Unsupported("a model's window is part of it", (None, False)),
    "enable_chunked_prefill": Unsupported("prompts always come in chunks: max_prefill_tokens", (None, True)),
    "max_seq_len_to_capture": Unsupported("a graph serves every length", (None, 8192)),
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
    "preemption_mode": Unsupported("a sequence that gives way is recomputed", (None, "recompute")),
    "use_v2_block_manager": Unsupported("there is one", (None, True, False)),
    "disable_async_output_proc": _NOT_HERE._replace(neutral=(None, False, True)),
    "disable_log_stats": Unsupported("LLM.stats counts, and logs nothing", (None, True, False)),
    "show_hidden_metrics_for_version": _NOT_HERE,
    "otlp_traces_endpoint": Unsupported("LLM.stats and RequestOutput.metrics hold the times"),
}


# keyword of vLLM's LLM.generate and LLM.chat
GENERATE_KEYWORDS: dict[str, Unsupported] = {
    "prompt_token_ids": Unsupported("give them as the prompt: [1, 2, 3], or {'prompt_token_ids': [1, 2, 3]}"),
    "lora_request": _NO_LORA,
    "prompt_adapter_request": _NO_LORA,
    "mm_processor_kwargs": _NO_MEDIA,
    "guided_options_request": Unsupported("SamplingParams takes structured_outputs"),
    "tokenization_kwargs": Unsupported("SamplingParams takes truncate_prompt_tokens", (None, {})),
    "chat_template_content_format": Unsupported("contents are texts", (None, "auto", "string", "openai")),
}
# attribute of vLLM's LLM -> what serves instead
ATTRIBUTES: dict[str, str] = {
    "llm_engine": "LLM.engine is what answers in tokens",
    "set_tokenizer": "give it to LLM(tokenizer=...)",
    "get_metrics": "LLM.stats counts, and RequestOutput.metrics has the times",
    "beam_search": "sample n answers instead",
    **dict.fromkeys(("embed", "encode", "classify", "reward", "score"), _NO_POOLING.instead),
    **dict.fromkeys(("sleep", "wake_up"), "close() gives the memory back"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "LLM.model is the model of this process"),
    **dict.fromkeys(("start_profile", "stop_profile"), "`graphdecode profile` measures each bucket"),
}
DTYPES: dict[str, str] = {"half": "float16", "float": "float32"}  # vLLM's name -> ours
# of vLLM's quantization: what a checkpoint says of itself
_OF_CHECKPOINTS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "bitsandbytes", "mxfp4")


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
        if name == "quantization" and value in _OF_CHECKPOINTS:
            raise ArgumentError(
                f"quantization={value!r}: a checkpoint in few bits is read as it is, without being told to; "
                "quantize='int4', 'int8' or 'fp8' rounds plain weights"
            )
        settings[ours] = "eager" if name == "enforce_eager" and value is True else value
        if name == "dtype" and isinstance(value, str):
            settings[ours] = DTYPES.get(value, value)
        if name == "speculative_config" and isinstance(value, Mapping):
            settings[ours] = {SPECULATION.get(key, key): entry for key, entry in value.items()}
    return settings


def refusing(table: Mapping[str, Unsupported]) -> Callable[[_Class], _Class]:
    """Let a class take the neutral values of a table's names, and refuse others by what to do instead."""

    def refused(cls: _Class) -> _Class:
        cls.__init__ = refusing_call(table)(cls.__init__)  # type: ignore[misc]
        return cls

    return refused


def refusing_call(table: Mapping[str, Unsupported]) -> Callable[[_Call], _Call]:
    """Return a decorator that lets a method take names of a table, as `refusing` does a class."""

    def refused(method: _Call) -> _Call:
        parameters = list(inspect.signature(method).parameters.values())[1:]
        known = [each.name for each in parameters]
        takes_others = parameters[-1].kind is inspect.Parameter.VAR_KEYWORD

        @functools.wraps(method)
        def called(self: Any, *args: Any, **given: Any) -> Any:
            kept = without_unsupported(given, table)
            for name in () if takes_others else kept:
                if name not in known:
                    raise unknown_keyword(name, known)
            return method(self, *args, **kept)

        return called  # type: ignore[return-value]

    return refused
