"""vLLM's names: each is there under its own name, means a setting of ours, or is refused with what to do instead."""

import json
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from graphdecode import (
    LLM,
    ArgumentError,
    AsyncLLM,
    BucketConfig,
    EngineConfig,
    GraphdecodeError,
    SamplingParams,
    StructuredOutputsParams,
)
from graphdecode.config.vllm_names import (
    CALL_KEYWORDS,
    LLM_KEYWORDS,
    LLM_METHODS,
    SAMPLING_PARAMS,
    SETTINGS,
    as_settings,
)
from graphdecode.text.chat import ChatOptions
from graphdecode.text.outputs import Logprob

# names of earlier versions, which the pinned sources do not have
FIELDS = """best_of use_beam_search length_penalty early_stopping logits_processors truncate_prompt_tokens
guided_decoding"""
KEYWORDS = """task swap_space max_seq_len_to_capture disable_async_output_proc override_pooler_config rope_scaling
rope_theta cuda_graph_sizes calculate_kv_scales guided_decoding_backend num_speculative_tokens speculative_model"""
METHODS = "beam_search reward llm_engine preprocess_chat"
PINNED: dict[str, str] = json.loads(Path(__file__).with_name("vllm_names.json").read_text())  # of vLLM's sources
OWN_SETTINGS = {each.name for config in (EngineConfig, BucketConfig) for each in fields(config)} | {"tokenizer"}


@pytest.mark.parametrize("name", sorted({*FIELDS.split(), *PINNED["SamplingParams"].split()}))
def test_every_field_of_sampling_params_is_there_or_refused_with_what_to_do_instead(name: str) -> None:
    if name in {field.name for field in fields(SamplingParams) if field.init}:
        assert name not in SAMPLING_PARAMS
        return
    with pytest.raises(ArgumentError, match=f"^{name}=<object"):
        SamplingParams(**{name: object()})


@pytest.mark.parametrize("name", sorted({*KEYWORDS.split(), *PINNED["EngineArgs"].split()} - {"model"}))
def test_every_keyword_of_llm_is_a_setting_or_refused_with_what_to_do_instead(name: str) -> None:
    if name in SETTINGS or name in OWN_SETTINGS:
        assert name not in LLM_KEYWORDS
        assert SETTINGS.get(name, name) in OWN_SETTINGS
        return
    with pytest.raises(ArgumentError, match=f"^{name}=<object"):
        LLM("demo", **{name: object()})


def test_neutral_values_are_accepted() -> None:
    neutral = {name: value for name, entry in SAMPLING_PARAMS.items() for value in entry.neutral}
    assert SamplingParams(**neutral) == SamplingParams()
    assert SamplingParams(best_of=None, flat_logprobs=False) == SamplingParams()
    with pytest.raises(ArgumentError, match="flat_logprobs=True"):
        SamplingParams(flat_logprobs=True)
    assert as_settings({name: value for name, entry in LLM_KEYWORDS.items() for value in entry.neutral}) == {}
    assert as_settings({"enforce_eager": False, "max_model_len": None, "seed": None, "quantization": None}) == {}


def test_an_unknown_keyword_is_a_type_error_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match="'temprature'.*'temperature'"):
        SamplingParams(temprature=1.0)
    with pytest.raises(TypeError, match="'zzz'"):
        SamplingParams(zzz=1)
    with pytest.raises(TypeError, match="'max_modellen'.*'max_model_len'"):
        LLM("demo", max_modellen=1)


@pytest.mark.parametrize("name", METHODS.split())
def test_a_missing_method_of_vllm_names_the_alternative(renamed: LLM, name: str) -> None:
    with pytest.raises(AttributeError, match=f"'LLM'.*'{name}': {LLM_METHODS[name][:20]}"):
        getattr(renamed, name)
    with pytest.raises(AttributeError, match=f"'AsyncLLM'.*'{name}': "):
        getattr(AsyncLLM.__new__(AsyncLLM), name)
    assert not hasattr(renamed, "anything_else")


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in (LLM, AsyncLLM) for n in PINNED[k.__name__].split()])
def test_every_method_of_vllm_exists_or_has_an_alternative(kind: type, name: str) -> None:
    assert hasattr(kind, name) or len(LLM_METHODS[name]) > 10


@pytest.mark.parametrize("call", ["LLM.generate", "LLM.chat", "AsyncLLM.generate"])
def test_every_keyword_of_vllms_calls_is_accepted_or_has_an_alternative(call: str) -> None:
    kind, _, method = call.partition(".")
    own = signature(getattr({"LLM": LLM, "AsyncLLM": AsyncLLM}[kind], method)).parameters.keys()
    taken = {*own, *CALL_KEYWORDS, *(ChatOptions.__annotations__ if method == "chat" else ())}
    assert set(PINNED[call].split()) - taken == set()


def test_parameters_are_changed_in_a_copy_as_the_error_of_an_assignment_says() -> None:
    params = SamplingParams(temperature=0.5, stop="a")
    changed = params.replace(temperature=0.0, stop=["b"])
    assert (changed.temperature, changed.stop_strings, params.temperature) == (0.0, ("b",), 0.5)
    assert params.clone() == params
    assert SamplingParams(seed=-1) == SamplingParams()
    with pytest.raises(FrozenInstanceError, match=r"temperature.*params.replace\(temperature=...\)"):
        params.temperature = 1.0  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match=r"dataclasses.replace\(it, regex=...\)"):
        StructuredOutputsParams(regex="a").regex = "b"  # type: ignore[misc]
    with pytest.raises(ArgumentError, match="temperature"):
        params.replace(temperature=-1.0)
    entry = Logprob(-1.5)
    assert (entry.logprob, entry.rank, entry.decoded_token) == (-1.5, None, None)


def test_cached_prefixes_can_be_dropped_and_chats_have_priorities() -> None:
    with LLM("demo", max_num_seqs=2, max_model_len=96, block_size=8, enforce_eager=True) as llm:
        greedy, template = SamplingParams(temperature=0.0, max_tokens=4), "{{ messages[0].content }}"
        talk = [{"role": "user", "content": "12+30=" * 4}]

        def cached() -> int:
            (output,) = llm.chat(talk, greedy, priority=3, chat_template=template, use_tqdm=False)
            return output.num_cached_tokens

        assert [cached(), cached()] == [0, 16]
        with llm.stream("12+30=", greedy):
            assert not llm.reset_prefix_cache()  # a request uses the cache
        llm.step()
        assert llm.reset_prefix_cache()
        assert (cached(), llm.is_sleeping) == (0, False)
        with pytest.raises(ArgumentError, match="priority"):
            llm.chat(talk, greedy, priority="high", chat_template=template)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["sleep", "wake_up"])
def test_async_llm_names_the_methods_that_llm_has(name: str) -> None:
    assert hasattr(LLM, name)
    with pytest.raises(AttributeError, match=f"'AsyncLLM'.*'{name}': AsyncLLM.llm"):
        getattr(AsyncLLM.__new__(AsyncLLM), name)


def test_keywords_of_vllms_calls_are_accepted_or_refused_with_advice(renamed: LLM) -> None:
    greedy = SamplingParams(temperature=0.0)
    for neutral in ({"use_tqdm": False}, {"lora_request": None}):
        (output,) = renamed.generate("12+30=", greedy, **neutral)  # type: ignore[arg-type]
        assert output.outputs[0].text == "42"
    with pytest.raises(ArgumentError, match="prompt_token_ids="):
        renamed.generate(prompt_token_ids=[[1, 2]], sampling_params=greedy)  # type: ignore[call-arg]
    for call in (renamed.generate, renamed.stream, renamed.chat, AsyncLLM.generate, AsyncLLM.chat):
        given = () if hasattr(call, "__self__") else (None,)
        with pytest.raises(ArgumentError, match="prompt_adapter_request="):
            call(*given, "a", prompt_adapter_request=object())  # type: ignore[operator]
        with pytest.raises(TypeError, match="'sampling_parms'.*'sampling_params'"):
            call(*given, "a", sampling_parms=greedy)  # type: ignore[operator]


def test_vllms_dtypes_are_understood() -> None:
    assert [EngineConfig(dtype=name).dtype for name in ("half", "float")] == ["float16", "float32"]


@pytest.fixture(scope="module")
def renamed() -> Iterator[LLM]:
    """An engine whose settings all go by vLLM's names."""
    with LLM(
        "demo",
        dtype="float32",
        max_model_len=96,
        max_num_seqs=3,
        block_size=8,
        num_gpu_blocks_override=40,
        gpu_memory_utilization=0.25,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        cudagraph_capture_sizes=[1],
        enforce_eager=True,
        disable_log_stats=True,
        trust_remote_code=False,
        seed=None,
    ) as llm:
        yield llm


def test_vllms_names_mean_our_settings(renamed: LLM) -> None:
    buckets = renamed.config
    assert (buckets.max_sequence_length, buckets.max_batch_size, buckets.page_size) == (96, 3, 8)
    assert (buckets.total_num_pages, buckets.memory_fraction, buckets.batch_sizes) == (40, 0.25, (1,))
    assert buckets.backend == renamed.graphs.backend == "eager"
    assert (renamed.engine_config.max_prefill_tokens, renamed.engine_config.prefix_cache) == (64, False)
    assert renamed.capacity.token_limit == 96


def test_another_folders_tokenizer_may_be_taken() -> None:
    with LLM("demo", tokenizer="demo", max_num_seqs=1, max_model_len=32, enforce_eager=True) as llm:
        assert llm.tokenizer.name_or_path.endswith("demo")
    with pytest.raises(GraphdecodeError, match="'no-such-folder'"):
        LLM("demo", tokenizer="no-such-folder")


def test_a_setting_that_is_given_by_two_names_is_refused() -> None:
    with pytest.raises(ArgumentError, match="^max_sequence_length "):
        LLM("demo", max_model_len=64, max_sequence_length=128)


def test_a_dict_is_read_as_the_file_is() -> None:
    config = EngineConfig.of(
        {"capacity": {"max_batch_size": 3}, "capture": {"when": "first-use"}, "model": {"seed": 4}}
    )
    assert (config.buckets.max_batch_size, config.buckets.capture_when, config.seed) == (3, "first-use", 4)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"capacity": {"max_batch_size": 0}}, r"^config: \[capacity\] max_batch_size must be an integer in"),
        ({"capacity": {"rows": 1}}, r"^config: \[capacity\] rows: unknown key; known: max_batch_size"),
        (
            {"max_batch_size": 1},
            r"^config: unknown section or key 'max_batch_size'; it is a key of \[capacity\]; known",
        ),
        ({"capacity": {"quantize": "int8"}}, r"^config: \[capacity\] quantize: unknown key; it is a key of \[model\]"),
        ({"capacity": {"max_batch_size": 2}, "buckets": {"batch_sizes": [4]}}, "^config: batch_sizes must be at most"),
    ],
)
def test_what_is_wrong_in_a_dict_is_named(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        EngineConfig.of(document)


def answered(llm: LLM, prompt: str, **params: Any) -> Any:
    (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, **params), use_tqdm=False)
    return output.outputs[0]


def test_without_max_tokens_an_answer_may_fill_the_capacity(renamed: LLM) -> None:
    answer = answered(renamed, "12+30=", max_tokens=None, ignore_eos=True)
    assert len(answer.token_ids) == 96 - 6
    assert answer.finish_reason == "length"
    assert SamplingParams(max_tokens=None, min_tokens=1000).min_tokens == 1000


def test_include_stop_str_in_output_keeps_the_stop_text(renamed: LLM) -> None:
    assert answered(renamed, "rev oceanic=", stop="nae").text == "ci"
    asked = answered(renamed, "rev oceanic=", stop="nae", include_stop_str_in_output=True)
    assert (asked.text, asked.stop_reason, asked.finish_reason) == ("cinae", "nae", "stop")
    included = SamplingParams(temperature=0.0, stop="nae", include_stop_str_in_output=True)
    assert "".join(renamed.stream("rev oceanic=", included)) == "cinae"
    token = ord("n")  # the demo's tokens are bytes
    assert answered(renamed, "rev oceanic=", stop_token_ids=[token]).text == "ci"
    assert answered(renamed, "rev oceanic=", stop_token_ids=[token], include_stop_str_in_output=True).text == "cin"


def test_tokens_alone_are_given_where_no_text_is_wanted(renamed: LLM) -> None:
    answer = answered(renamed, "12+30=", detokenize=False, logprobs=1)
    assert (answer.text, answer.token_ids[:2], answer.finish_reason) == ("", [ord("4"), ord("2")], "stop")
    assert all(entry.decoded_token is None for place in answer.logprobs for entry in place.values())
    with pytest.raises(ArgumentError, match="^stop must be .*detokenize"):
        SamplingParams(detokenize=False, stop="a")
