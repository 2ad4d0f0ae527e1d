"""Fields of vLLM's, OpenAI's and llama.cpp's requests that our bodies do not have: without effect, or refused.

With the fields of the bodies in `protocol`, which are honoured, this is all that these servers take.
"""

from __future__ import annotations

from typing import Any

from graphdecode.config.vllm_names import Unsupported, each_of
from graphdecode.errors import shown
from graphdecode.server.anthropic.request import CountTokens, Messages
from graphdecode.server.http import HttpError
from graphdecode.server.pooling import Embeddings, Rerank, Score
from graphdecode.server.protocol import (
    Body,
    ChatCompletion,
    Completion,
    Detokenize,
    Generation,
    LoadAdapter,
    Tokenize,
    UnloadAdapter,
)
from graphdecode.server.responses.request import Responses

_OFF: tuple[Any, ...] = (None, False)
_NOTHING: tuple[Any, ...] = (None, "", [], {})


def _use(name: str, *neutral: Any) -> Unsupported:
    return Unsupported(f"{name} says it here", (None, *neutral))


_NO_BEAMS = Unsupported("there is no beam search; request n outputs with logprobs and choose", _OFF)
_NO_COUNTERPART = Unsupported("there is no counterpart here", (None, {}))
_NO_LIMIT = Unsupported("[server] request_timeout_s limits a request", (None, 0, -1))
_NO_MEDIA = Unsupported("only text models are served", _NOTHING)
_NO_SAMPLER = Unsupported("there is no such sampler; top_k, top_p and min_p choose among tokens", (None, 0))
_NO_REASONING = Unsupported("reasoning comes apart from the content, by the model's own markers")
_NOT_RETURNED = Unsupported("responses do not contain it", _OFF)
_INTERNAL = Unsupported("this is internal to the other server", _NOTHING)
_FOR_CHATS = Unsupported("this is a field of /v1/chat/completions", (*_NOTHING, False, 0, "none"))
_FOR_COMPLETIONS = Unsupported("this is a field of /v1/completions", _NOTHING)

# None: it changes no output, whatever its value
_GENERATION: dict[str, Unsupported | None] = {
    # vLLM's
    "use_beam_search": _NO_BEAMS,
    "early_stopping": _NO_BEAMS,
    "length_penalty": _NO_BEAMS._replace(neutral=(None, 1)),
    "watermarking": Unsupported("outputs carry no watermark", _OFF),
    "logprob_token_ids": Unsupported("logprobs gives the most likely tokens, and -1 all of them", (None, [])),
    "prompt_embeds": Unsupported("prompts are texts or token ids", (None, [])),
    "logits_processors": Unsupported("a step is a graph, and calls no Python; there is logit_bias", (None, [])),
    **each_of("kv_transfer_params ec_transfer_params vllm_xargs", _NO_COUNTERPART),
    **each_of("mm_processor_kwargs media_io_kwargs", _NO_MEDIA),
    "repetition_detection": Unsupported("frequency_penalty and repetition_penalty make loops unlikely"),
    "stream_interval": Unsupported("a chunk is sent for each step", (None, 1)),
    **each_of("return_weight_versions return_token_offsets return_prompt_text", _NOT_RETURNED),
    "routed_experts_prompt_start": _NOT_RETURNED._replace(neutral=(None, 0)),
    "structural_tag": Unsupported("a grammar can say the same", (None,)),
    **each_of("mm_payload return_mm_kwargs session_id guided_decoding_backend", None),
    # OpenAI's
    **each_of("user metadata store service_tier safety_identifier", None),
    **each_of("prompt_cache_key prompt_cache_options prompt_cache_retention prediction", None),
    # llama.cpp's
    "n_predict": _use("max_tokens"),
    "n_cmpl": _use("n", 1),
    "n_probs": _use("logprobs", 0),
    "repeat_penalty": _use("repetition_penalty", 1),
    "return_tokens": _use("return_token_ids", False),
    "repeat_last_n": Unsupported("penalties count all tokens", (None, -1)),
    "lora": Unsupported("a request names its adapter as its model", (None, [])),
    "typical_p": _NO_SAMPLER._replace(neutral=(None, 1)),
    "samplers": _NO_SAMPLER._replace(neutral=(None,)),
    **each_of("top_n_sigma adaptive_target", _NO_SAMPLER._replace(neutral=(None, -1))),
    **each_of("xtc_probability dry_multiplier mirostat dynatemp_range min_keep", _NO_SAMPLER),
    **each_of("xtc_threshold dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers", None),
    **each_of("mirostat_tau mirostat_eta dynatemp_exponent adaptive_decay", None),  # of samplers that are off
    "n_indent": Unsupported("a regular expression in structured_outputs can say it", (None, 0)),
    **each_of("t_max_predict_ms t_max_prompt_ms", _NO_LIMIT),
    "response_fields": Unsupported("responses are whole", (None, [])),
    **each_of("post_sampling_probs timings_per_token return_progress verbose", _NOT_RETURNED),
    "sse_ping_interval": Unsupported("a stream sends no pings", (None, -1)),
    "grammar_lazy": _INTERNAL._replace(neutral=_OFF),
    **each_of("grammar_triggers grammar_type chat_format chat_parser generation_prompt preserved_tokens", _INTERNAL),
    "reasoning_format": _NO_REASONING._replace(neutral=(None, "auto", "deepseek")),
    **each_of("reasoning_budget_tokens thinking_budget_tokens", _use("thinking_token_budget", -1)),
    "reasoning_control": _NO_REASONING._replace(neutral=_OFF),
    **each_of("reasoning_budget_start_tag reasoning_budget_end_tags reasoning_budget_end_tag", None),
    "reasoning_budget_message": None,  # as the tags, of a budget that is refused by this name
    **each_of("cache_prompt n_cache_reuse n_keep n_discard id_slot backend_sampling message_delimiters", None),
}
_OF_MESSAGES: dict[str, Unsupported | None] = {
    **each_of("cache_control context_management diagnostics inference_geo metadata service_tier speed betas", None),
    **each_of("user_profile_id workspace_id", None),
    **each_of("container mcp_servers", Unsupported("the server runs no tools", _NOTHING)),
}
_OF_RESPONSES: dict[str, Unsupported | None] = {
    **each_of("service_tier stream_options client_metadata max_tool_calls access_programs context_management", None),
    **each_of("prompt_cache_options prompt_cache_retention image background_options", None),
    "background": Unsupported("stream the response, or wait for it", _OFF),
    "conversation": Unsupported("previous_response_id goes on from a response", _NOTHING),
    "prompt": Unsupported("there are no stored prompts; give instructions and input", _NOTHING),
    "moderation": Unsupported("nothing is moderated", _NOTHING),
}
_OFF_IN_TEXTS = Unsupported("texts are embedded as they are", _OFF)
_OF_POOLING: dict[str, Unsupported | None] = {
    "normalize": _use("use_activation"),
    "padding": Unsupported("nothing is padded", (None, "do_not_pad")),
    **each_of("mm_processor_kwargs media_io_kwargs", _NO_MEDIA),
    "chat_template": Unsupported("the checkpoint's template is used, if it knows queries and documents"),
    "task": Unsupported("the path says it"),
}
_OF_PAIRS: dict[str, Unsupported | None] = {
    **each_of("max_tokens_per_query max_tokens_per_doc", _use("truncate_prompt_tokens", 0)),
    "chat_template_kwargs": _use("instruction", {}),
}
_OF_BODY: dict[type[Body], dict[str, Unsupported | None]] = {
    Completion: {
        **_GENERATION,
        **each_of("messages tools tool_choice top_logprobs documents reasoning_effort chat_template", _FOR_CHATS),
        **each_of("chat_template_kwargs continue_final_message functions function_call modalities audio", _FOR_CHATS),
        **each_of("add_generation_prompt parallel_tool_calls include_reasoning parse_tool_calls", None),
        "max_completion_tokens": _use("max_tokens"),
        "suffix": Unsupported("text is generated after a prompt only", (None, "")),
        **each_of("verbosity web_search_options moderation", _FOR_CHATS),
    },
    ChatCompletion: {
        **_GENERATION,
        **each_of("prompt suffix", _FOR_COMPLETIONS),
        "best_of": _FOR_COMPLETIONS._replace(neutral=(None, 1)),
        "parse_tool_calls": Unsupported("tool_choice says it here", (None, True)),
        "functions": Unsupported("tools is its name now", (None, [])),
        "function_call": Unsupported("tool_choice is its name now", (None, "none", "auto")),
        "modalities": _NO_MEDIA._replace(neutral=(None, ["text"])),
        "audio": _NO_MEDIA,
        "verbosity": Unsupported("tell the model in a message", (None, "medium")),
        "web_search_options": Unsupported("there is no search"),
        "moderation": Unsupported("nothing is moderated"),
    },
    Tokenize: {
        **each_of("media_io_kwargs mm_processor_kwargs", _NO_MEDIA),
        "content": _use("prompt"),
        "add_special": _use("add_special_tokens"),
        "with_pieces": _use("return_token_strs", False),
        "parse_special": Unsupported("special tokens in a text are tokens", (None, True)),
    },
    CountTokens: _OF_MESSAGES,
    Messages: _OF_MESSAGES,
    Responses: _OF_RESPONSES,
    Detokenize: {},
    Embeddings: _OF_POOLING
    | {
        "messages": Unsupported("render them, and give the text as input", (None, [])),
        "embed_dtype": Unsupported("base64 is of float32", (None, "float32")),
        "endianness": Unsupported("base64 is little-endian", (None, "native", "little")),
        **each_of("add_generation_prompt continue_final_message", _OFF_IN_TEXTS),
    },
    Score: _OF_POOLING | _OF_PAIRS,
    Rerank: _OF_POOLING | _OF_PAIRS,
    LoadAdapter: {
        "load_inplace": Unsupported("unload the adapter first", _OFF),
        "is_3d_lora_weight": None,  # shapes decide it
    },
    UnloadAdapter: {"lora_int_id": None},  # names tell adapters apart
}


def unsupported_fields(kind: type[Body]) -> dict[str, Unsupported | None]:
    """Return the known fields that bodies of a kind do not honour; None: of no effect, whatever its value."""
    return _OF_BODY.get(kind, {})


def check_fields(body: Body) -> list[str]:
    """Return the names of a body's unknown fields; raise `HttpError` for one that is refused."""
    table, unknown = unsupported_fields(type(body)), []
    for name, value in (body.model_extra or {}).items():
        entry = table.get(name)
        if name not in table:
            unknown.append(name)
        elif entry is not None and not any(_is_same(value, each) for each in entry.neutral):
            raise HttpError(400, f"{name} {shown(value)} is not supported: {entry.instead}", param=name)
    if isinstance(body, Generation) and body.stream_options is not None and not body.stream:
        raise HttpError(400, "stream_options needs stream to be true", param="stream_options")
    return unknown


def _is_same(value: Any, neutral: Any) -> bool:
    """Whether a value is a neutral one; 1 is 1.0 in JSON, and not true."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
