"""vLLM's names of `SamplingParams`, `LLM`, its methods and `EngineArgs`: ours, or what to use instead.

Names that are neither in these tables nor ours are a `TypeError`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar

from graphdecode.errors import ArgumentError

_BACKENDS = ("auto", "guidance")  # names of llguidance
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
    "enable_lora": "max_adapters",
    "max_loras": "max_adapters",
    "max_lora_rank": "max_adapter_rank",
}
DTYPES: dict[str, str] = {"half": "float16", "float": "float32"}  # vLLM's name of a dtype -> ours
# key of vLLM's speculative_config -> our key of [speculation]
SPECULATION: dict[str, str] = {
    "num_speculative_tokens": "num_tokens",
    "prompt_lookup_min": "ngram_min",
    "prompt_lookup_max": "ngram_max",
}

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Entry = TypeVar("_Entry")


class Unsupported(NamedTuple):
    """A name of vLLM that this runtime does not support."""

    instead: str  # what to use instead, or why there is nothing
    neutral: tuple[Any, ...] = (None,)  # values without effect, which are accepted


def each_of(names: str, entry: _Entry) -> dict[str, _Entry]:
    """Return the same entry for several names."""
    return dict.fromkeys(names.split(), entry)


_ONE_DEVICE = Unsupported(
    "devices share a model by tensor_parallel_size: each has a part of every layer",
    (None, 1, False, "linear", "allgather_reducescatter"),
)
_REPLICAS = Unsupported("`graphdecode serve --replicas N` runs several engines; LLM is one", (None, 1, False))
_LORA = Unsupported("adapters have the model's dtype; those without a slot stay in host memory", (None, False, "auto"))
_NO_PROMPT_ADAPTER = Unsupported("there are no prompt adapters; lora_request takes LoRA adapters", (None, False))
_NO_MEDIA = Unsupported("only text models are supported", (None, "", False))
_NO_POOLING = Unsupported('pooling="last" or "mean" says which hidden states embeddings are made of')
_FOLDER = Unsupported("give the folder of what `hf download MODEL --revision REVISION` fetched as the model")
_INTERNAL = Unsupported(  # with vLLM's defaults
    "this is internal to vLLM, and has no counterpart here",
    (None, False, 0, 0.0, 1, 16, 32, 512, {}, [], "", "auto", "builtin", "sha256", "warn", "cumem", "recompute"),
)
_MEDIA_DEFAULTS = (None, True, False, 0, 4, 128, 1.5, "lru", "weights", "evs", "direct_rpc", "auto")
_CONFIG_JSON = Unsupported("change config.json in a copy of the folder", (None, {}))
_ANY_LENGTH = Unsupported("a graph serves every length", (None, 8192))
_NO_PYTHON = Unsupported("a step is a graph, and calls no Python: logit_bias, penalties, min_tokens", (None, [], ()))
_BUCKETS = Unsupported("the sections [buckets] and [capture] of config say what is captured")
_SPECULATION = Unsupported("use speculative_config, as in vLLM")

_LIKELY = Unsupported("logprobs gives the most likely tokens, and -1 all of them", (None, []))
_NOT_RETURNED = Unsupported("outputs have token_ids and logprobs", (None, False))
_PIECES = Unsupported("LLM.stream gives each piece as it comes", (None, 1))
_LOADING = Unsupported("safetensors files are mapped, and read once", (None, "lazy", "cpu"))
_ONE_MACHINE = Unsupported("tensor_parallel_size uses the devices of this machine", (None, 1, 0, False))
_UNPARSED = Unsupported("outputs are returned as they are", (None, ""))
_OFF_AT_1 = Unsupported("there is no counterpart here", (None, 1))
_KERNELS = Unsupported("the fastest kernel is measured on this device", (None, "auto", {}))
_OFFLOAD = Unsupported(
    "weights and cache stay where they are computed with: quantize, kv_cache_dtype", (None, 0, 1, {}, "auto", "native")
)
_CHUNKS = Unsupported("max_prefill_tokens and target_itl_ms limit chunks of prompts", (None, 0, False))
_PROFILER = Unsupported("`graphdecode profile --trace` traces steps", (None, False))
_STATS = Unsupported("see LLM.stats, RequestOutput.metrics and the server's /metrics", (None, False, "none", 0.01))
_SLEEPING = Unsupported("enable_sleep_mode=True is all that sleep needs", (None, False))

SAMPLING_PARAMS: dict[str, Unsupported] = {
    "best_of": Unsupported("ask for n outputs with logprobs=0 and keep the one with the best cumulative_logprob"),
    "use_beam_search": Unsupported("sample n outputs instead", (None, False)),
    **each_of("length_penalty early_stopping", Unsupported("there is no beam search", (None, 1.0, False))),
    "flat_logprobs": Unsupported("log-probabilities come as a list of dicts, one for each token", (None, False)),
    "logits_processors": _NO_PYTHON._replace(neutral=(None,)),
    "output_kind": Unsupported(
        "LLM.generate returns whole outputs, LLM.stream yields pieces, AsyncLLM.generate the output so far"
    ),
    "guided_decoding": Unsupported("structured_outputs is its name now"),
    "extra_args": Unsupported("nothing reads them", (None, {})),
    "skip_reading_prefix_cache": Unsupported(
        "a prompt with prompt_logprobs is computed whole; for others: LLM(prefix_cache=False)", (None, False)
    ),
    "repetition_detection": Unsupported("frequency_penalty and repetition_penalty make loops unlikely"),
    "watermarking": Unsupported("outputs carry no watermark", (None, False)),
    **each_of("logprob_token_ids prompt_logprob_token_ids", _LIKELY),
    "prompt_logprob_start": Unsupported("prompt_logprobs scores the whole prompt", (None, 0)),
    "stream_interval": _PIECES,
    "routed_experts_prompt_start": _NOT_RETURNED._replace(neutral=(None, 0)),
    "trace_decode_token_ids": Unsupported("score given tokens as a prompt, with prompt_logprobs"),
    "skip_clone": Unsupported("parameters are frozen, and not copied", (None, True, False)),
    "output_text_buffer_length": Unsupported("what is held back for stop texts follows from them", (None, 0)),
}


LLM_KEYWORDS: dict[str, Unsupported] = {
    **each_of("task runner convert", Unsupported("models only generate", (None, "auto", "generate", "none"))),
    "tokenizer_mode": Unsupported("the tokenizer is what transformers' AutoTokenizer reads", (None, "auto")),
    **each_of("allowed_local_media_path allowed_media_domains limit_mm_per_prompt mm_processor_kwargs", _NO_MEDIA),
    **each_of("disable_mm_preprocessor_cache enable_mm_embeds interleave_mm_strings media_io_kwargs", _NO_MEDIA),
    "skip_mm_profiling": _NO_MEDIA,
    "enable_prompt_embeds": Unsupported("prompts are texts or token ids", (None, False)),
    **each_of("pipeline_parallel_size decode_context_parallel_size distributed_executor_backend", _ONE_DEVICE),
    **each_of("worker_use_ray enable_eplb enable_expert_parallel expert_placement_strategy", _ONE_DEVICE),
    **each_of("data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local", _REPLICAS),
    **each_of("data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_backend", _REPLICAS),
    "disable_custom_all_reduce": Unsupported("collectives says how devices exchange results", (None, False, True)),
    **each_of("revision code_revision tokenizer_revision", _FOLDER),
    "download_dir": Unsupported("HF_HOME names the folder of what is fetched"),
    "hf_token": Unsupported("log in with `hf auth login`, or set HF_TOKEN"),
    **each_of("hf_overrides rope_scaling rope_theta", _CONFIG_JSON),
    "hf_config_path": Unsupported("config.json is the model folder's"),
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
    **each_of("max_seq_len_to_capture max_context_len_to_capture", _ANY_LENGTH),
    **each_of("speculative_model num_speculative_tokens", _SPECULATION),
    **each_of("optimization_level compilation_config", _BUCKETS),
    "logprobs_mode": Unsupported("log-probabilities are of the model's own logits", (None, "raw_logprobs")),
    **each_of("disable_hybrid_kv_cache_manager kv_transfer_config kv_events_config attention_config", _INTERNAL),
    **each_of("attention_backend show_hidden_metrics_for_version prefix_caching_hash_algo", _INTERNAL),
    **each_of("model_loader_extra_config additional_config worker_cls worker_extension_cls", _INTERNAL),
    **each_of("disable_cascade_attn disable_async_output_proc", _INTERNAL._replace(neutral=(None, False, True))),
    "stream_interval": _PIECES,
    "use_tqdm_on_load": Unsupported("progress=True shows bars while loading", (None, True, False)),
    "disable_log_requests": Unsupported("LLM logs no requests", (None, True, False)),
    "max_num_partial_prefills": Unsupported("max_prefill_tokens is shared by all prompts of a step", (None, 1)),
    "scheduling_policy": Unsupported("requests without a priority are served as they come", (None, "fcfs", "priority")),
    "num_scheduler_steps": Unsupported("steps_per_launch in [loop] of the configuration", (None, 1)),
    "async_scheduling": Unsupported("the next step always runs while one is read, on a GPU", (None, False, True)),
    **each_of("reasoning_parser reasoning_parser_plugin reasoning_config", _UNPARSED),
    **each_of("logits_processors logits_processor_pattern", _NO_PYTHON),
    "guided_decoding_backend": Unsupported("llguidance reads structured outputs", (None, *_BACKENDS)),
    "structured_outputs_config": Unsupported(
        "use StructuredOutputsParams", (None, {}, *({"backend": name} for name in _BACKENDS))
    ),
    **each_of("max_cpu_loras fully_sharded_loras lora_dtype enable_moe_shared_loras", _LORA),
    "enable_prompt_adapter": _NO_PROMPT_ADAPTER,
    "lora_modules": Unsupported("LLM.load_lora_adapter(name, path) loads one, as lora_request does", (None,)),
    **each_of("pooler_config override_pooler_config", _NO_POOLING),
    "profiler_config": Unsupported("`graphdecode profile` measures each bucket"),
    "use_v2_block_manager": Unsupported("there is only one", (None, True, False)),
    "disable_log_stats": Unsupported("LLM.stats counts, and logs nothing", (None, True, False)),
    "otlp_traces_endpoint": Unsupported("see LLM.stats and RequestOutput.metrics"),
    **each_of("enable_return_routed_experts return_sampling_mask", _NOT_RETURNED),
    **each_of("model_weights model_class_overrides", Unsupported("give a folder as the model", (None, "", {}))),
    **each_of("safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size", _LOADING),
    **each_of("max_parallel_loading_workers ignore_patterns pt_load_map_location", _LOADING),
    "max_cudagraph_capture_size": Unsupported("max_batch_size is the largest bucket"),
    **each_of("master_addr master_port nnodes node_rank distributed_timeout_seconds", _ONE_MACHINE),
    **each_of("cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus", _ONE_MACHINE),
    "device_ids": Unsupported("CUDA_VISIBLE_DEVICES says which devices there are"),
    **each_of("prefill_context_parallel_size max_num_active_seqs prefill_schedule_interval", _OFF_AT_1),
    **each_of("dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size", _ONE_DEVICE),
    **each_of("data_parallel_external_lb data_parallel_multi_port_external_lb", _REPLICAS),
    **each_of("enable_hc_sp enable_batch_sharded_sampling enable_ep_weight_filter enable_elastic_ep", _ONE_DEVICE),
    "all2all_backend": _ONE_DEVICE,
    **each_of("elastic_ep_max_dp_size eplb_config dp_sync_interval disable_nccl_for_dp_synchronization", _ONE_DEVICE),
    **each_of("enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold", _INTERNAL),
    **each_of("moe_backend linear_backend sparse_indexer_topk_backend", _KERNELS),
    **each_of("ir_op_priority kernel_config mamba_backend mamba_ssu_algorithm gdn_prefill_backend", _KERNELS),
    **each_of("kda_prefill_backend kda_decode_backend monokernel enable_flashinfer_autotune", _KERNELS),
    "prefix_match_unit": Unsupported("page_size is the unit in which prefixes are shared"),
    "enable_mamba_shared_prefix_checkpoint": Unsupported("state_checkpoints keeps recurrent states", (None, False)),
    **each_of("mamba_cache_mode mamba_block_size", Unsupported("state_checkpoint_tokens says it here")),
    **each_of("enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds use_replayssm", _INTERNAL),
    **each_of("mamba_config engram_config diffusion_config watermark_config aux_output_config", _INTERNAL),
    **each_of("offload_backend cpu_offload_params offload_params offload_group_size offload_num_in_group", _OFFLOAD),
    **each_of("offload_prefetch_step kv_offloading_size kv_offloading_backend", _OFFLOAD),
    **each_of("kv_sharing_fast_prefill tokens_only enable_trace_replay replayssm_buffer_len", _INTERNAL),
    **each_of("use_fp64_gumbel prefix_cache_retention_interval scheduler_cls renderer_num_workers", _INTERNAL),
    **each_of(
        "sleep_mode_backend watermark kv_cache_dtype_skip_layers lora_target_modules shutdown_timeout", _INTERNAL
    ),
    **each_of("preemption_mode mamba_cache_dtype mamba_ssm_cache_dtype", _INTERNAL),
    **each_of("swa_bounded_replay allow_deprecated_quantization", _INTERNAL._replace(neutral=(None, True, False))),
    "max_num_scheduled_tokens": Unsupported("max_prefill_tokens says it here"),
    **each_of("long_prefill_token_threshold long_prefill_token_threshold_adaptive", _CHUNKS),
    "scheduler_reserve_full_isl": Unsupported("a prompt is admitted with pages for all of it", (None, True, False)),
    **each_of(
        "max_num_queued_reqs max_num_queued_tokens", Unsupported("[server] max_waiting limits the server's queue")
    ),
    "quantization_config": Unsupported("the checkpoint's is read; quantize says another form"),
    **each_of("mm_encoder_only mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path", _NO_MEDIA),
    **each_of("mm_encoder_fp8_scale_save_path video_pruning_rate io_processor_plugin default_mm_loras", _NO_MEDIA),
    **each_of("disable_chunked_mm_input enable_mm_processor_stats mm_hasher_algorithm", _NO_MEDIA),
    **each_of(
        "language_model_only enable_shm_tensor_arena mm_processor_cache_gb mm_ipc_gpu_memory_gb mm_device_do_normalize "
        "mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_fp8_scale_save_margin video_pruning_method "
        "mm_tensor_ipc mm_processor_device mm_processor_cache_type",
        _NO_MEDIA._replace(neutral=_MEDIA_DEFAULTS),
    ),
    **each_of("enable_tower_connector_lora specialize_active_lora max_lora_cls_labels", _LORA),
    "enable_mixed_moe_lora_format": Unsupported("adapt_experts=True takes both forms", (None, False)),
    **each_of("ray_workers_use_nsight enable_layerwise_nvtx_tracing", _PROFILER),
    **each_of("spec_method spec_model spec_tokens", _SPECULATION),
    **each_of("collect_detailed_traces kv_cache_metrics cudagraph_metrics enable_mfu_metrics", _STATS),
    **each_of("enable_logging_iteration_details custom_histogram_buckets aggregate_engine_logging", _STATS),
    **each_of("per_request_spec_decode_metrics kv_cache_metrics_sample", _STATS),
    **each_of(
        "logging_config log_level log_config_file", Unsupported("Python's logging, logger 'graphdecode', says it")
    ),
    "enable_log_requests": Unsupported("LLM logs no requests; [server] log_requests does", (None, False)),
    **each_of(
        "ec_transfer_config ec_manager_config weight_transfer_config watchdog_config jit_monitor_mode", _INTERNAL
    ),
    **each_of(
        "fault_tolerance_config enable_fault_tolerance fail_on_environ_validation jit_monitor_verbose", _INTERNAL
    ),
    **each_of("sleep_mode_offload_cudagraph enable_cumem_allocator enable_nccl_comm_suspend", _SLEEPING),
    "sleep_preserve_parameter_names": _SLEEPING,
    "performance_mode": Unsupported("target_itl_ms in [scheduling] weighs latency", (None, "balanced")),
}


# of LLM.generate, chat and stream
CALL_KEYWORDS: dict[str, Unsupported] = {
    "prompt_token_ids": Unsupported('give token ids as prompts: [[1, 2, 3], ...] or {"prompt_token_ids": [1, 2, 3]}'),
    "prompt_adapter_request": _NO_PROMPT_ADAPTER,
    "guided_options_request": Unsupported("SamplingParams(structured_outputs=...) says what an output must match"),
    "mm_processor_kwargs": _NO_MEDIA,
    "tokenization_kwargs": Unsupported("SamplingParams(truncate_prompt_tokens=...) cuts prompts", (None, {})),
    "chat_template_content_format": Unsupported("a template gets contents as texts", (None, "auto", "string")),
    "data_parallel_rank": _REPLICAS._replace(neutral=(None,)),
    **each_of("trace_headers prompt_text session_id kv_hints reasoning_ended reasoning_parser_kwargs", _INTERNAL),
}
# of LLM.embed and score
POOLING_KEYWORDS: dict[str, Unsupported] = {
    "tokenization_kwargs": Unsupported("truncate_prompt_tokens=... cuts prompts", (None, {})),
    "chat_template": Unsupported("the checkpoint's template is used, if it knows queries and documents"),
}
_POOLING = "there is none: LLM.embed and LLM.score pool hidden states"
_WORKERS = "there is none: no worker takes calls; LLM.model and LLM.engine are the objects themselves"
_IN_LLM = "AsyncLLM.llm, an LLM, has it"
_PROFILE = "there is none: `graphdecode profile` measures each bucket, with --trace as a Chrome trace"
_PAUSE = "there is none: AsyncLLM.abort ends requests, and LLM.sleep refuses them"
_HEALTH = "there is none: an AnswerError of an output says what failed"
_AUTOSCALE = "there is none: see `graphdecode serve --autoscale`"
_INTERNAL_METHOD = "there is none: it is internal to vLLM"
_UPDATES = "LLM.update_weights takes new weights"
LLM_METHODS: dict[str, str] = {  # methods of vLLM's LLM and AsyncLLM -> what to use instead
    "beam_search": "there is none: sample n outputs with logprobs=0 and keep that of the best cumulative_logprob",
    **each_of("sleep wake_up is_sleeping reset_prefix_cache update_weights", _IN_LLM),
    **each_of("tokenizer get_tokenizer get_default_sampling_params", _IN_LLM),
    "enqueue": "LLM.stream adds a request at once, and its iterator waits; LLM.generate takes many",
    "enqueue_chat": "graphdecode.text.render_chat gives the prompt's tokens for LLM.stream; LLM.chat takes many",
    "wait_for_completion": "LLM.generate waits for all of its prompts, and a stream for its own",
    **dict.fromkeys(("from_engine_args", "from_vllm_config"), "give the same keywords to LLM(...) or AsyncLLM(...)"),
    "get_world_size": "LLM.engine_config.tensor_parallel_size",
    **each_of("reset_mm_cache reset_encoder_cache", "there is none: only text models are supported"),
    "release_kv_cache_memory": "LLM.sleep(level=1) gives its memory back",
    **each_of("pause_generation resume_generation is_paused", _PAUSE),
    "shutdown": "close() ends it",
    "add_request": "generate adds one, and yields its outputs",
    **each_of("get_num_unfinished_requests get_num_queued_tokens", "AsyncLLM.llm.num_waiting counts"),
    **each_of("is_tracing_enabled do_log_stats", "LLM.stats counts, and RequestOutput.metrics has times"),
    **each_of("check_health errored dead_error get_status", _HEALTH),
    **each_of("is_running is_stopped should_keep_api_server_alive handle_fault", _HEALTH),
    "add_lora": "LLM.load_lora_adapter(name, path) loads one, as lora_request does",
    "remove_lora": "LLM.unload_lora_adapter(name) forgets one",
    "list_loras": "LLM.engine.adapters.names lists them",
    "pin_lora": "there is none: max_adapters slots hold those that are used",
    "wait_for_requests_to_drain": "there is none: wait for the outputs",
    **each_of("scale_elastic_ep get_external_elastic_ep_status", _AUTOSCALE),
    **each_of("checkpoint_prepare checkpoint_restore compute_weight_checksums", _INTERNAL_METHOD),
    **each_of("get_kv_event_sources notify_kv_transfer_request_rejected check_admission", _INTERNAL_METHOD),
    "get_supported_tasks": _INTERNAL_METHOD,
    **each_of("init_weight_transfer_engine shutdown_weight_transfer_engine", _UPDATES),
    **each_of("start_weight_update start_draft_weight_update finish_weight_update", _UPDATES),
    **each_of("update_weight_version get_weight_version", _UPDATES),
    **each_of("embed score", _IN_LLM),
    **each_of("encode classify reward", _POOLING),
    **each_of("collective_rpc apply_model", _WORKERS),
    **each_of("start_profile stop_profile", _PROFILE),
    "get_metrics": "LLM.stats has counts, and RequestOutput.metrics times",
    "llm_engine": "LLM.engine takes and gives tokens",
    "preprocess_chat": "graphdecode.text.render_chat(tokenizer, messages) returns the prompt and its tokens",
    "set_tokenizer": "there is none: LLM(tokenizer=...) takes another",
}


def no_attribute(owner: object, name: str) -> NoReturn:
    """Raise an AttributeError, with what to use instead of a method of vLLM."""
    instead = f": {LLM_METHODS[name]}" if name in LLM_METHODS else ""
    raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{instead}", name=name, obj=owner)


def check_keyword_names(keywords: Iterable[str], known: Iterable[str], others: Iterable[str] = ()) -> None:
    """Raise a TypeError for an unknown keyword, with a suggestion from `known` or `others`."""
    known = list(known)
    for name in keywords:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *others], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"unexpected keyword argument {name!r}{hint}; known: {', '.join(known)}")


def without_unsupported(keywords: Mapping[str, Any], table: Mapping[str, Unsupported]) -> dict[str, Any]:
    """Return keywords without the names of a table; raises ArgumentError if one of them has an effect."""
    for name in (name for name in keywords if name in table):
        value, (instead, neutral) = keywords[name], table[name]
        if not any(type(value) is type(each) and value == each for each in neutral):
            raise ArgumentError(f"{name}={value!r:.40} is not supported: {instead}")
    return {name: value for name, value in keywords.items() if name not in table}


def as_settings(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of an `LLM` by the names of our settings; None, vLLM's default, is left out.

    Raises `ArgumentError` if one is not supported, or a setting has two values.
    """
    settings: dict[str, Any] = {}
    for name, value in without_unsupported(keywords, LLM_KEYWORDS).items():
        ours = SETTINGS.get(name, name)
        if (value is None and name in (*SETTINGS, "seed", "trust_remote_code", "enable_sleep_mode")) or (
            name in ("enforce_eager", "enable_lora") and value is False
        ):
            continue  # vLLM's default, which leaves the setting to the configuration
        if name == "enable_lora" and value is True:
            if "max_loras" not in keywords:
                settings[ours] = 1  # vLLM's max_loras
            continue
        if ours in settings:
            raise ArgumentError(f"{ours} is given twice: {name} is another name of it")
        settings[ours] = "eager" if name == "enforce_eager" and value is True else value
        if name == "speculative_config" and isinstance(value, Mapping):
            settings[ours] = {SPECULATION.get(key, key): entry for key, entry in value.items()}
    return settings


def refusing(
    table: Mapping[str, Unsupported], *options: str
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Return a method decorator: names of the table are accepted with neutral values, and else refused.

    `options` are keywords besides the parameters.
    """

    def refused(method: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        _, *parameters = inspect.signature(method).parameters.values()
        known = [*(each.name for each in parameters if each.kind is not each.VAR_KEYWORD), *options]

        @functools.wraps(method)
        def called(*args: Any, **keywords: Any) -> Any:
            keywords = without_unsupported(keywords, table) if keywords else keywords
            check_keyword_names(keywords, known)
            return method(*args, **keywords)

        return called

    return refused
